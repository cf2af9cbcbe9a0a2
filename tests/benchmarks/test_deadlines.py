"""A trace that runs faster: the same machines at the same hour, and the same job foretold on it."""

from __future__ import annotations

import pytest

from benchmarks.deadlines.trace_playback import HOUR_S, ON_DEMAND_USD, SPOT_USD, Tape, hours_of, plan_of
from elasticctl.api.codec import from_json
from elasticctl.api.goal import SPOT, PoolStatus
from elasticctl.planning.situation import Costs
from elasticctl.simulation.traces import Trace
from elasticctl_controller.core.goal.pools import seen_of

TRACE = Trace("zone", 600.0, (1,) * 60 + (0,) * 12 + (1,) * 600)
"""Ten hours with a machine, two without, and then with one."""
RATES = {1: 1.0, 2: 1.9}
COSTS = Costs(5.0, 1.0, 2.0, 2.0, 1.0)


def test_an_hour_passes_in_seconds() -> None:
    tape = Tape.of(TRACE, workers=2, from_h=8)
    assert [tape.there(hours * HOUR_S + 1) for hours in (0, 1.4, 2, 3.4, 4, 1e6)] == [2, 2, 0, 0, 2, 2]


def test_what_was_seen_before_the_start_is_handed_on() -> None:
    found = from_json(PoolStatus, Tape.of(TRACE, 2, from_h=20).seen(SPOT, 1e9))
    assert (found.name, found.up) == (SPOT, True)
    assert (sum(found.up_ends), sum(found.away_ends)) == (pytest.approx(1, rel=0.01), pytest.approx(1, rel=0.01))
    seen = seen_of(found)
    assert seen.up_h * 3600 / HOUR_S == pytest.approx(18, rel=0.1)


def test_a_job_is_foretold_with_the_traces_prices() -> None:
    steady = Tape.of(TRACE, 2, from_h=20)
    found = steady.foretell(plan_of(60.0, RATES, COSTS, 200.0))
    spot_h, on_demand_h = hours_of(found)
    assert found.finished_s is not None
    assert found.finished_s <= 200
    assert spot_h > on_demand_h
    assert found.usd == pytest.approx(spot_h * SPOT_USD + on_demand_h * ON_DEMAND_USD)
    gone = Tape(Trace("zone", 5.0, (1, 1) + (0,) * 200), 1)
    on_demand = gone.foretell(plan_of(60.0, RATES, COSTS, 90.0))
    assert on_demand.finished_s is not None
    assert on_demand.usd >= 60 / RATES[1] / HOUR_S * ON_DEMAND_USD
