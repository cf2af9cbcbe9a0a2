"""The queue: no key is lost, none is worked on twice at a time, and delays and back-off are as asked for."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl_controller.loop.workqueue import BASE_DELAY_S, MAX_DELAY_S, WorkQueue, fair_pause_s
from tests.support.controller.samples import Clock
from tests.support.waiting import wait_until


class Passing(Clock):
    """A clock on which time passes from one look to the next."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def queue_at(clock: Clock, jitter: float = 0.0) -> WorkQueue:
    return WorkQueue(clock, jitter=lambda: jitter)


def take(queue: WorkQueue) -> str | None:
    return queue.get(timeout_s=0)


def test_a_key_waits_once_however_often_it_is_added() -> None:
    queue = queue_at(Clock())
    for key in ("a", "b", "a"):
        queue.add(key)
    assert [take(queue), take(queue), take(queue)] == ["a", "b", None]


def test_a_key_added_while_it_is_worked_on_comes_back_afterwards() -> None:
    queue = queue_at(Clock())
    queue.add("a")
    assert take(queue) == "a"
    queue.add("a")
    assert take(queue) is None
    queue.done("a")
    assert take(queue) == "a"
    queue.done("a")
    assert take(queue) is None


def test_the_earliest_delay_counts_and_counts_once() -> None:
    clock = Clock()
    queue = queue_at(clock)
    for delay_s in (5.0, 2.0, 9.0):
        queue.add_after("a", delay_s)
    clock.now += 1.9
    assert take(queue) is None
    clock.now += 0.1
    assert take(queue) == "a"
    queue.done("a")
    clock.now += 100
    assert take(queue) is None


def test_namespaces_take_turns() -> None:
    queue = queue_at(Clock())
    for number in range(1000):
        queue.add(f"flood/job-{number}")
    queue.add("quiet/a")
    queue.add("quiet/b")
    assert [take(queue) for _ in range(5)] == ["flood/job-0", "quiet/a", "flood/job-1", "quiet/b", "flood/job-2"]


def test_one_namespace_leaves_threads_to_the_others() -> None:
    queue = WorkQueue(Clock(), most_at_once=2)
    for number in range(4):
        queue.add(f"flood/job-{number}")
    assert [take(queue) for _ in range(3)] == ["flood/job-0", "flood/job-1", None]
    queue.add("quiet/a")
    assert [take(queue), take(queue)] == ["quiet/a", None]
    queue.done("flood/job-1")
    assert [take(queue), take(queue)] == ["flood/job-2", None]


def test_a_namespace_at_its_limit_is_gone_on_with_as_soon_as_a_pass_ends() -> None:
    queue = WorkQueue(most_at_once=1)
    taken: list[str | None] = []
    queue.add("flood/a")
    queue.add("flood/b")
    assert queue.get(timeout_s=0) == "flood/a"
    thread = threading.Thread(target=lambda: taken.append(queue.get()))
    thread.start()
    queue.done("flood/a")
    thread.join()
    assert taken == ["flood/b"]


def test_a_pause_is_shared_by_the_jobs_of_a_namespace_and_not_with_the_jobs_of_others() -> None:
    flood = [f"flood/job-{number}" for number in range(10_000)]
    assert fair_pause_s(flood, flood[0], per_s=20.0) == 500
    assert fair_pause_s([*flood, "quiet/a"], flood[0], per_s=20.0) == 1000
    assert fair_pause_s([*flood, "quiet/a"], "quiet/a", per_s=20.0) == 0.1


def test_failures_back_off_up_to_a_limit_until_they_are_reset() -> None:
    clock = Clock()
    queue = queue_at(clock, jitter=1.0)
    pauses_s = []
    for _ in range(15):
        queue.add_rate_limited("a")
        pauses_s.append(next_due(queue, clock))
        assert take(queue) == "a"
        queue.done("a")
    assert pauses_s[:3] == [BASE_DELAY_S, 2 * BASE_DELAY_S, 4 * BASE_DELAY_S]
    assert pauses_s[-1] == MAX_DELAY_S
    queue.reset_failures("a")
    queue.add_rate_limited("a")
    assert next_due(queue, clock) == BASE_DELAY_S


def test_jitter_shortens_a_pause_to_half_at_most() -> None:
    clock = Clock()
    queue = queue_at(clock, jitter=0.0)
    queue.add_rate_limited("a")
    assert next_due(queue, clock) == BASE_DELAY_S / 2


def next_due(queue: WorkQueue, clock: Clock) -> float:
    """Move the clock to the next timer and return how far that was."""
    pause_s = queue._pause_s(None)
    assert pause_s is not None
    clock.now += pause_s
    return round(pause_s, 6)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.4, 0.6, 0.9, 1.5])
def test_a_delay_that_passes_between_two_looks_at_the_clock_ends_no_taker(share: float) -> None:
    delay_s = 0.1  # which the taker really waits for, again and again
    queue = queue_at(Passing(share * delay_s))
    queue.add_after("a", delay_s)
    assert queue.get() == "a"


def test_a_far_deadline_that_is_put_off_again_and_again_leaves_no_timers_behind() -> None:
    clock = Clock()
    queue = queue_at(clock)
    for _ in range(5_000):
        queue.add_after("a", 7 * 86_400.0)  # as a pass does for a job with a deadline ...
        queue.add_after("a", 0.1)  # ... and each report of its ranks
        clock.now += 0.1
        assert take(queue) == "a"
        queue.done("a")
    assert len(queue._timers) < 200


def test_a_key_that_was_put_off_is_taken_after_the_timers_were_tidied() -> None:
    clock = Clock()
    queue = queue_at(clock)
    for number in range(300):
        queue.add_after("a", 1_000.0 - number)
    assert len(queue._timers) < 200
    clock.now += 701.0
    assert [take(queue), take(queue)] == ["a", None]


def test_a_time_beyond_what_a_lock_can_wait_for_ends_no_taker() -> None:
    queue = WorkQueue()
    taken: list[str | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.get()))
    queue.add_after("in a thousand years", 1000 * 365 * 86_400.0)
    thread.start()
    queue.add_after("a", 0.05)
    thread.join()
    assert taken == ["a"]


def test_shutting_down_releases_those_who_wait() -> None:
    queue = WorkQueue()
    taken: list[str | None] = []
    threads = [threading.Thread(target=lambda: taken.append(queue.get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.shut_down()
    for thread in threads:
        thread.join()
    assert taken == [None, None, None]


def test_a_delay_passes_by_itself() -> None:
    queue = WorkQueue()
    queue.add_after("a", 0.01)
    assert queue.get() == "a"


def test_threads_share_the_work_and_never_a_key() -> None:
    queue = WorkQueue()
    working: Counter[str] = Counter()
    worked: Counter[str] = Counter()
    clashes: list[str] = []
    lock = threading.Lock()

    def work() -> None:
        while (key := queue.get()) is not None:
            with lock:
                working[key] += 1
                worked[key] += 1
                if working[key] > 1:
                    clashes.append(key)
            with lock:
                working[key] -= 1
            queue.done(key)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(2000):
        queue.add(str(number % 7))
    wait_until(lambda: not queue._waiting)
    queue.shut_down()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert set(worked) == {str(n) for n in range(7)}


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["a/1", "a/2", "a/3", "b/1"]),
            st.sampled_from(["add", "after", "fail", "take", "done", "tick"]),
        )
    ),
    most=st.integers(1, 3),
)
def test_an_added_key_is_always_taken_later(steps: list[tuple[str, str]], most: int) -> None:
    clock = Clock()
    queue = WorkQueue(clock, jitter=lambda: 0.0, most_at_once=most)
    additions = {"add": queue.add, "after": lambda k: queue.add_after(k, 3.0), "fail": queue.add_rate_limited}
    owed: set[str] = set()  # keys whose last addition has not been taken yet
    asked: Counter[str] = Counter()  # additions less takings: a delayed one may come after an immediate one
    held: set[str] = set()
    for key, step in steps:
        if step in additions:
            additions[step](key)
            owed.add(key)
            asked[key] += 1
        elif step == "take":
            taken = take(queue)
            if taken is not None:
                assert asked[taken] > 0
                assert taken not in held
                assert sum(key[0] == taken[0] for key in held) < most
                asked[taken] -= 1
                held.add(taken)
                owed.discard(taken)
        elif step == "done" and key in held:
            held.discard(key)
            queue.done(key)
        elif step == "tick":
            clock.now += 1.0
    for key in held:
        queue.done(key)
    clock.now += MAX_DELAY_S
    found = set()
    while (taken := take(queue)) is not None:
        found.add(taken)
        queue.done(taken)
    assert owed <= found
