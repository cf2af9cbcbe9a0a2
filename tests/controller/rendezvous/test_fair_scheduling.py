"""Each job's share of the service's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from elasticctl_controller.rendezvous.fair_scheduling import SLICE_S, Turns
from tests.support.controller.samples import Clock


def run(work: Callable[[Turns, Clock, list[str]], None]) -> list[str]:
    """What was done, in order; "-" each time that the event loop came to other things."""
    done: list[str] = []

    async def main() -> None:
        clock = Clock()
        turns = Turns(clock)
        work(turns, clock, done)
        while turns._queues:
            await asyncio.sleep(0)
            done.append("-")

    asyncio.run(main())
    return done


def act(turns: Turns, clock: Clock, done: list[str], job: str, cost_s: float) -> None:
    with turns.measure(job):
        clock.now += cost_s
    done.append(job)


def test_a_flood_delays_another_job_by_a_slice() -> None:
    def work(turns: Turns, clock: Clock, done: list[str]) -> None:
        for _ in range(5000):
            turns.queue("flood", partial(act, turns, clock, done, "flood", 0.0005))
        turns.queue("quiet", partial(act, turns, clock, done, "quiet", 0.0005))

    done = run(work)
    assert done.count("flood") == 5000
    assert done.index("quiet") <= 2


def test_jobs_get_the_same_time_at_any_cost_of_a_turn() -> None:
    def work(turns: Turns, clock: Clock, done: list[str]) -> None:
        for _ in range(400):
            turns.queue("dear", partial(act, turns, clock, done, "dear", 0.010))
            turns.queue("cheap", partial(act, turns, clock, done, "cheap", 0.001))

    done = run(work)
    until = len(done) - done[::-1].index("cheap")
    assert 30 <= done[:until].count("dear") <= 100


def test_the_event_loop_comes_to_other_things_every_few_milliseconds() -> None:
    def work(turns: Turns, clock: Clock, done: list[str]) -> None:
        for _ in range(1000):
            turns.queue("flood", partial(act, turns, clock, done, "flood", 0.001))

    longest = max(len(piece) for piece in "".join(word[0] for word in run(work)).split("-"))
    assert longest * 0.001 <= 5 * SLICE_S


def test_an_idle_job_saves_up_no_time() -> None:
    def work(turns: Turns, clock: Clock, done: list[str]) -> None:
        def later() -> None:
            for job in ("old", "new"):
                for _ in range(50):
                    turns.queue(job, partial(act, turns, clock, done, job, 0.001))

        for _ in range(1000):
            turns.queue("old", partial(act, turns, clock, done, "old", 0.001))
        turns.queue("old", later)

    done = [word for word in run(work) if word != "-"]
    assert 20 <= done[1001:1061].count("old") <= 40


def test_a_job_that_has_ended_leaves_nothing() -> None:
    async def main() -> None:
        turns = Turns()
        for number in range(100):
            turns.queue(f"job-{number}", lambda: None)
            turns.drop_job(f"job-{number}")  # while something of it still waits
        while turns._queues or turns._used_s:
            await asyncio.sleep(0)
        assert [turns._queues, turns._used_s, turns._turn_s, turns._ready] == [{}, {}, {}, []]

    asyncio.run(main())


def test_an_error_at_one_turn_affects_no_other_turn(caplog: pytest.LogCaptureFixture) -> None:
    def work(turns: Turns, clock: Clock, done: list[str]) -> None:
        turns.queue("a", lambda: done[1_000_000].encode())
        for job in ("a", "b"):
            turns.queue(job, partial(act, turns, clock, done, job, 0.001))

    assert {word for word in run(work) if word != "-"} == {"a", "b"}
    assert "job a: what was due at its turn failed" in caplog.text
