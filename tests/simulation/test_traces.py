"""Recorded availability: what is read, what is refused, and a replay that can be calculated by hand."""

from __future__ import annotations

import json

import pytest

from elasticctl.api.errors import SpecError
from elasticctl.planning.situation import Choice, Costs, PlannedSize, Situation, SizeReason, Speeds
from elasticctl.simulation.replay import Replay, ReplayedJob
from elasticctl.simulation.traces import Recording, Trace, parse_trace

COSTS = Costs(start_s=100.0, reform_s=10.0, loss_s=20.0, save_every_s=300.0, billed_s=60.0)
SPEEDS = Speeds.of({1: 1.0, 2: 2.0, 4: 4.0})


def always(choice: Choice):
    return lambda now: PlannedSize(choice, SizeReason.CHEAPEST, now.look_s, kept=True)


def spot_if_there(now: Situation) -> PlannedSize:
    return PlannedSize(Choice("a", min(4, now.pools[0].there)), SizeReason.CHEAPEST, now.look_s, kept=True)


def test_a_trace_is_read() -> None:
    trace = parse_trace(json.dumps({"metadata": {"gap_seconds": 300}, "data": [0, 16, 8]}), "x")
    assert (trace.gap_s, trace.there, trace.lasts_s) == (300.0, (0, 16, 8), 900.0)
    assert trace.scaled(4).there == (0, 4, 2)
    assert trace.at_gap(150.0).there == (0, 0, 16, 16, 8, 8)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "[" * 100_000, '{"metadata": {}, "data": [1, 2]}', '{"metadata": [], "data": [1, 2]}',
        '{"metadata": {"gap_seconds": 0}, "data": [1, 2]}', '{"metadata": {"gap_seconds": true}, "data": [1, 2]}',
        '{"metadata": {"gap_seconds": NaN}, "data": [1, 2]}', '{"metadata": {"gap_seconds": 300}, "data": [1]}',
        '{"metadata": {"gap_seconds": 300}, "data": [1, -1]}', '{"metadata": {"gap_seconds": 300}, "data": [1, 0.5]}',
        '{"metadata": {"gap_seconds": 300}, "data": {"0": 1}}',
    ],
)  # fmt: skip
def test_an_invalid_trace_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="not a trace"):
        parse_trace(text, "x")


def test_on_demand_takes_its_start_and_its_work_and_is_paid_for_both() -> None:
    nothing = Recording.of([Trace("a", 300.0, (0,) * 20)], 4, 0.25)
    found = Replay(ReplayedJob(4 * 1000.0, SPEEDS, COSTS, 1.0), nothing, 0, always(Choice(on_demand=4))).run()
    assert found.finished_s == pytest.approx(1100.0)
    assert found.usd == pytest.approx(4 * 1100 / 3600)
    assert found.on_demand_h == pytest.approx(4 * 1100 / 3600)


def test_after_losing_all_workers_unsaved_work_is_repeated() -> None:
    """Ready at 100 s, saved at 400 s, lost at 600 s; back at 900 s, ready at 1000 s, 700 s of work are left."""
    away = Recording.of([Trace("a", 300.0, (4, 4, 0, *(4,) * 20))], 4, 0.25)
    found = Replay(ReplayedJob(4 * 1000.0, SPEEDS, COSTS, 1.0), away, 0, spot_if_there).run()
    assert found.finished_s == pytest.approx(1700.0)
    assert found.usd == pytest.approx(4 * (600 + 800) / 3600 * 0.25)
    assert found.losses == 1


def test_with_workers_left_training_continues_after_a_short_stop() -> None:
    """Two of four are lost at 600 s: 2000 units done, 20 s still, then two at a time."""
    half = Recording.of([Trace("a", 300.0, (4, 4, *(2,) * 20))], 4, 0.25)
    found = Replay(ReplayedJob(4 * 1000.0, SPEEDS, COSTS, 1.0), half, 0, spot_if_there).run()
    assert found.finished_s == pytest.approx(620 + 2000 / 2)
    assert found.usd == pytest.approx((4 * 600 + 2 * 1020) / 3600 * 0.25)


def test_a_move_starts_the_new_before_the_old_leave_and_both_are_paid() -> None:
    """Asked at 0, when ready at 100 s, and at 400 s: on demand is ready at 500 s, and the group still for 10 s."""
    steady = Recording.of([Trace("a", 300.0, (4,) * 20)], 4, 0.25)

    def moves(now: Situation) -> PlannedSize:
        late = now.workers("") or now.work_left < 4 * 850
        choice = Choice(on_demand=4) if late else Choice("a", 4)
        return PlannedSize(choice, SizeReason.CHEAPEST, now.look_s, kept=True)

    found = Replay(ReplayedJob(4 * 1000.0, SPEEDS, COSTS, 1.0), steady, 0, moves).run()
    assert found.finished_s == pytest.approx(1110.0)
    assert found.spot_h == pytest.approx(4 * 500 / 3600)
    assert found.on_demand_h == pytest.approx(4 * 710 / 3600)


def test_machines_that_come_back_are_news() -> None:
    """They are there from 600 s on, which is no time at which the policy wants to look."""
    asked = []

    def watches(now: Situation) -> PlannedSize:
        asked.append(now.pools[0].there)
        return PlannedSize(Choice("a", now.pools[0].there), SizeReason.CHEAPEST, 1e6, kept=True)

    back = Recording.of([Trace("a", 300.0, (0, 0, *(4,) * 20))], 4, 0.25)
    found = Replay(ReplayedJob(4 * 500.0, SPEEDS, COSTS, 1.0), back, 0, watches).run()
    assert (found.finished_s, asked[:2]) == (pytest.approx(600 + 100 + 500), [0, 4])


def test_a_machine_that_hardly_ran_is_paid_for_its_least_time() -> None:
    steady = Recording.of([Trace("a", 300.0, (4,) * 20)], 4, 0.25)
    found = Replay(ReplayedJob(1.0, SPEEDS, Costs(0, 0, 0, 300, 60), 1.0), steady, 0, always(Choice("a", 1))).run()
    assert (found.finished_s, found.usd) == (pytest.approx(1.0), pytest.approx(0.25 / 60))


def test_observations_at_a_tick_do_not_know_the_future() -> None:
    one = Recording.of([Trace("a", 300.0, (4,) * 50 + (0,) * 50)], 4, 0.25)
    other = Recording.of([Trace("a", 300.0, (4,) * 100)], 4, 0.25)
    assert one.markets[:50] == other.markets[:50]
    assert one.markets[-1] != other.markets[-1]
