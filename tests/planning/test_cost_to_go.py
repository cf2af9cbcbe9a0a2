"""The table of expected costs where it can be calculated by hand, and what the policy makes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from elasticctl.planning.availability import AvailabilityRecord
from elasticctl.planning.cost_to_go import Outlook, passing, rules_for, state_of
from elasticctl.planning.deadline_policy import decide
from elasticctl.planning.situation import ON_DEMAND, Choice, Costs, HeldWorkers, Market, SizeReason, Speeds, SpotPool
from tests.support.planning import situation

LINEAR = Speeds.of({1: 1.0, 2: 2.0, 4: 4.0})
CERTAIN = tuple(tuple(float(i == state) for i in range(6)) for state in range(6))


def outlook_of(leaves: float, returns: float) -> Outlook:
    market = Market(leaves, returns, 0.0, 4, 0.25)
    return Outlook(rules_for(LINEAR, Costs(), 1.0, market))


def test_spot_that_stays_costs_its_price_and_none_at_all_that_of_on_demand() -> None:
    hours = 8 * 3600.0  # of one worker
    table = outlook_of(leaves=2**-10, returns=2**-10)
    assert table.usd(CERTAIN[state_of(True, 0)], hours, 10.0) == pytest.approx(8 * 0.25, rel=0.03)
    assert table.usd(CERTAIN[state_of(False, 9)], hours, 10.0) == pytest.approx(8 * 1.0, rel=0.03)


def test_more_work_costs_more_and_more_time_less() -> None:
    table = outlook_of(leaves=1.0, returns=1.0)
    for state in CERTAIN:
        rising = [table.usd(state, share * 4 * 3600 * 10, 10.0) for share in (0.1, 0.3, 0.6, 0.9, 1.0, 1.2)]
        assert rising == sorted(rising)
        falling = [table.usd(state, 4 * 3600.0, time_h) for time_h in (1.0, 2.0, 5.0, 20.0)]
        assert all(
            later <= 1.01 * sooner for sooner, later in itertools.pairwise(falling)
        )  # between nodes it is a guess
        assert table.hours(state, 4 * 3600.0, 20.0) <= 20.0


def test_chances_add_up() -> None:
    for hours in (0.05, 1.0, 100.0):
        for row in passing(outlook_of(leaves=2.0, returns=0.5).rules, hours):
            assert sum(row) == pytest.approx(1.0)
            assert min(row) >= -1e-12


def test_recent_observations_move_the_guess_more_than_old_ones() -> None:
    seen = AvailabilityRecord(up=True)
    assert (seen.leaves, seen.returns) == (1.0, 1.0)
    for _ in range(30):
        seen = seen.after(0.2, up=False).after(0.2, up=True)
    assert seen.leaves > 3
    assert seen.returns > 3
    settled = seen
    for _ in range(200):
        settled = settled.after(5.0, up=True)
    assert settled.leaves < 0.3
    assert settled.age_h == pytest.approx(1000.0)


def test_the_plan_takes_many_workers_when_cheap_and_waits_when_expensive() -> None:
    there = decide(situation(time_left_s=24 * 3600.0, there=8))
    assert (there.choice.pool, there.choice.on_demand) == ("zone-a", 0)
    assert there.choice.spot >= 4
    away = decide(situation(time_left_s=36 * 3600.0, there=0))
    assert (away.choice, away.reason) == (Choice(), SizeReason.CHEAPEST)


def test_the_plan_prefers_the_cheaper_pool_and_stays_among_equals() -> None:
    base = situation(time_left_s=24 * 3600.0, there=8, held=(HeldWorkers("zone-a", 8),))
    other = SpotPool("zone-b", 0.3, 8)
    assert decide(replace(base, pools=(other, *base.pools))).choice.pool == "zone-a"
    assert decide(replace(base, pools=(replace(other, usd_per_h=0.1), *base.pools))).choice.pool == "zone-b"


def test_the_order_of_pools_is_not_what_decides() -> None:
    base = situation(time_left_s=24 * 3600.0, there=8)
    pools = (*base.pools, SpotPool("zone-b", 0.3, 8), SpotPool("zone-c", 0.3, 4))
    assert decide(replace(base, pools=pools)) == decide(replace(base, pools=pools[::-1]))


def test_sizes_that_are_no_faster_are_left_out() -> None:
    assert Speeds.of({1: 1.0, 2: 1.5, 4: 1.4, 8: 2.0}).sizes == (1, 2, 8)
    for wrong in ({}, {0: 1.0}, {1: 0.0}, {1: float("inf")}):
        with pytest.raises(ValueError, match=r"rate"):
            Speeds.of(wrong)
    assert [LINEAR.rate(workers) for workers in (0, 3, 9)] == [0.0, 3.0, 4.0]


def test_a_short_job_has_spot_machines_too() -> None:
    """A start is long compared with the time left, and still it pays."""
    base = situation(time_left_s=45 * 60.0, there=8)
    work = 15 * 60 * base.speeds.per_s[-1]
    decision = decide(replace(base, work_left=work, saved_left=work, look_s=10.0))
    assert (decision.choice.pool, decision.choice.on_demand, decision.kept) == ("zone-a", 0, True)
    assert decision.choice.spot >= 4


@pytest.mark.parametrize("ready_in_s", [150.0, 60.0, 5.0])
def test_starting_machines_are_worth_more_than_new_requests(ready_in_s: float) -> None:
    base = situation(time_left_s=60 * 60.0, there=8, held=(HeldWorkers("zone-a", 8, ready_in_s),))
    work = 15 * 60 * base.speeds.per_s[-1]
    assert decide(replace(base, work_left=work, saved_left=work, look_s=10.0)).choice == Choice("zone-a", 8)


def test_once_it_is_late_starting_on_demand_machines_are_not_released() -> None:
    coming = (HeldWorkers(ON_DEMAND, 8, 100.0),)
    late = decide(situation(time_left_s=3600.0, there=8, held=coming))
    assert (late.reason, late.choice.on_demand) == (SizeReason.LATE, 8)
    base = situation(time_left_s=1140.0, there=0, held=(HeldWorkers(ON_DEMAND, 8, 1.0),))
    work = 600 * base.speeds.rate(4)  # four of them would do, and just so
    close = decide(replace(base, work_left=work, saved_left=work))
    assert (close.reason, close.choice) == (SizeReason.DEADLINE, Choice(on_demand=8))
