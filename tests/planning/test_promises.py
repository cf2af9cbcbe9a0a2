"""The policy's promises under the worst that spot machines can do, replayed: never late, never over budget."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticctl.planning.deadline_policy import decide
from elasticctl.planning.situation import Choice, Costs, PlannedSize, Situation, Speeds
from elasticctl.simulation.replay import Replay, ReplayedJob, ReplayResult
from elasticctl.simulation.traces import Recording, Trace
from tests.support.planning import situation

GAP_S = 300.0
TICKS = 240
"""Of a recording: more than any job here takes."""
SPEEDS = Speeds.of({1: 1.0, 2: 1.9, 4: 3.6, 8: 6.6})
STEADY = Costs(start_s=240, reform_s=10, loss_s=30, save_every_s=300)
OTHERS = (Costs(0.0, 0.0, 0.0, 60.0, 0.0), STEADY, Costs(900.0, 60.0, 30.0, 600.0, 600.0))
CURVES = (SPEEDS, Speeds.of({3: 1.0}), Speeds.of({2: 2.0, 5: 2.5}))
"""Few, so that the policy's tables are shared between examples."""


class Watched:
    """The policy, and what it said first: whether it can keep what it is asked for."""

    def __init__(self) -> None:
        self.decisions: list[PlannedSize] = []

    def __call__(self, now: Situation) -> PlannedSize:
        self.decisions.append(decide(now))
        return self.decisions[-1]


Spans = list[tuple[int, int]]
"""(machines, ticks)."""
spans = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 40)), min_size=1, max_size=10)


def recording_of(zones: list[Spans], usd_per_h: float = 0.3) -> Recording:
    """The spans of each zone, over and over."""
    traces = []
    for number, zone in enumerate(zones):
        ticks = [count for count, length in zone for _ in range(length)]
        traces.append(Trace(f"zone-{number}", GAP_S, tuple((ticks * (TICKS // len(ticks) + 1))[:TICKS])))
    return Recording.of(traces, max(1, *(max(trace.there) for trace in traces)), usd_per_h)


@st.composite
def plans(draw: st.DrawFn) -> ReplayedJob:
    """Work of up to three hours at the largest size; a deadline or a budget or both, generous or impossible."""
    speeds, costs = draw(st.sampled_from(CURVES)), draw(st.sampled_from(OTHERS))
    shortest_s = draw(st.floats(0.1, 3.0)) * 3600
    deadline_s = draw(st.none() | st.floats(0.9, 4.0).map(lambda times: times * shortest_s + 3600))
    dear = speeds.most * (shortest_s / 3600 + 1)
    no_limit = st.nothing() if deadline_s is None else st.none()
    budget_usd = draw(st.floats(0.05, 3.0).map(lambda times: times * dear) | no_limit)
    return ReplayedJob(shortest_s * speeds.per_s[-1], speeds, costs, 1.0, deadline_s, budget_usd, draw(st.booleans()))


def replayed(plan: ReplayedJob, recording: Recording, losses_s: tuple[float, ...] = ()) -> tuple[ReplayResult, Watched]:
    policy = Watched()
    return Replay(plan, recording, 0, policy, losses_s).run(), policy


@settings(max_examples=15)
@given(plan=plans(), zones=st.lists(spans, min_size=1, max_size=2), loss_s=st.none() | st.floats(0, 12 * 3600))
@example(  # the money lasts for less than a second more
    ReplayedJob(49303.21688280517, SPEEDS, OTHERS[0], 1.0, None, 2.460040972485023),
    [[(0, 1)], [(1, 26), (4, 9)]],
    None,
)
def test_never_over_budget_and_never_late_when_it_was_promised(
    plan: ReplayedJob, zones: list[Spans], loss_s: float | None
) -> None:
    """Whatever is lost and when; of on-demand machines one may be lost too."""
    found, policy = replayed(plan, recording_of(zones), () if loss_s is None else (loss_s,))
    if plan.budget_usd is not None:
        assert found.usd <= plan.budget_usd + 1e-6
    if plan.deadline_s is not None and policy.decisions[0].kept:
        assert found.finished_s is not None
        assert found.finished_s <= plan.deadline_s + 1e-3


def test_losses_in_the_last_minute_do_not_make_it_late() -> None:
    """Spot is there until some tick, comes back for a moment, and is then gone for good."""
    plan = ReplayedJob(2 * 3600 * SPEEDS.per_s[-1], SPEEDS, STEADY, 1.0, 3.5 * 3600)
    for gone in range(1, 42, 4):
        found, policy = replayed(plan, recording_of([[(8, gone), (0, 1), (8, 2), (0, TICKS)]]))
        assert policy.decisions[0].kept
        assert found.finished_s is not None
        assert found.finished_s <= 3.5 * 3600, gone


def test_an_on_demand_machine_that_is_lost_when_only_those_are_left_does_not_make_it_late() -> None:
    nothing = recording_of([[(0, TICKS)]])
    plan = ReplayedJob(2 * 3600 * SPEEDS.per_s[-1], SPEEDS, STEADY, 1.0, 3 * 3600)
    for loss_s in range(0, 3 * 3600, 1800):
        found, policy = replayed(plan, nothing, (float(loss_s),))
        assert policy.decisions[0].kept
        assert found.finished_s is not None
        assert found.finished_s <= 3 * 3600, loss_s


def test_an_unreachable_goal_is_not_promised() -> None:
    nothing = recording_of([[(0, TICKS)]])
    work = 4 * 3600 * SPEEDS.per_s[-1]
    too_soon, policy = replayed(ReplayedJob(work, SPEEDS, STEADY, 1.0, 4 * 3600), nothing)
    assert not policy.decisions[0].kept
    assert too_soon.finished_s is not None  # late, and as fast as it goes
    assert too_soon.finished_s < 4 * 3600 + 1800
    too_dear, policy = replayed(ReplayedJob(work, SPEEDS, STEADY, 1.0, 8 * 3600, 5.0), nothing)
    assert (policy.decisions[0].kept, too_dear.finished_s) == (False, None)
    assert too_dear.usd <= 5.0


def test_money_that_lasts_for_spot_only_is_spent_on_spot_up_to_the_last_cent() -> None:
    steady = recording_of([[(8, TICKS)]])
    work = 4 * 3600 * SPEEDS.per_s[-1]
    enough, _ = replayed(ReplayedJob(work, SPEEDS, STEADY, 1.0, 8 * 3600, 12.0), steady)
    assert enough.finished_s is not None
    assert enough.finished_s <= 8 * 3600
    assert enough.usd <= 12.0 < 4 * 8  # which is what it takes on demand
    spent, _ = replayed(ReplayedJob(work, SPEEDS, STEADY, 1.0, 8 * 3600, 3.0), steady)
    assert spent.finished_s is None
    assert 2.8 < spent.usd <= 3.0


def test_a_deadline_that_is_moved_in_mid_run_replans_immediately() -> None:
    relaxed = situation(time_left_s=40 * 3600.0, there=0)
    assert decide(relaxed).choice == Choice()
    tight = decide(replace(relaxed, time_left_s=10.3 * 3600))
    assert tight.choice.on_demand > 0


def test_money_buys_time_if_that_is_wanted() -> None:
    steady = recording_of([[(8, TICKS)]])
    plan = ReplayedJob(4 * 3600 * SPEEDS.per_s[-1], SPEEDS, STEADY, 1.0, 15 * 3600, 100.0)
    cheap, _ = replayed(plan, steady)
    fast, _ = replayed(replace(plan, soon=True), steady)
    assert fast.finished_s is not None
    assert cheap.finished_s is not None
    assert fast.finished_s < 5 * 3600 < cheap.finished_s
    assert cheap.usd < fast.usd
