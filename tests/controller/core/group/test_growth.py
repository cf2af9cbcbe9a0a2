"""The rule by which a group grows, against its formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl_controller.core.group.growth import Batching, GrowthOption, decide_growth, expected_quiet_s, speedup

GROUP = GrowthOption(size=4, ready=4, coming=0, ready_since=0.0, reform_cost_s=10.0)
LINEAR = {4: 400.0, 8: 800.0}


def test_it_pays_back_as_the_formula_says() -> None:
    """Twice as fast: half of the time is gained, so 10 s of standstill are paid back after 20 s."""
    verdict = decide_growth(replace(GROUP, rates=LINEAR), now=0.0)
    assert verdict.grow
    assert verdict.pays_back_s == pytest.approx(20.0)
    assert verdict.words == "joining costs 10s and pays for itself after 20s; the next change is expected in 1h00m"


@given(
    size=st.integers(1, 50),
    ready=st.integers(1, 50),
    cost_s=st.floats(0.1, 1000.0),
    quiet_s=st.floats(1.0, 1e5),
    slope=st.floats(0.1, 1.0),
)
def test_it_grows_exactly_where_that_is_more_work_until_the_next_change(size, ready, cost_s, quiet_s, slope) -> None:
    growth = GrowthOption(size, ready, 0, 0.0, cost_s)
    verdict = decide_growth(growth, 0.0, Batching(typical_quiet_s=quiet_s, exponent=slope))
    staying, growing = size**slope * quiet_s, (size + ready) ** slope * (quiet_s - cost_s)
    assert verdict.grow == (growing > staying) or math.isclose(growing, staying, rel_tol=1e-6)


def test_it_does_not_grow_before_a_change_that_comes_sooner() -> None:
    restless = replace(GROUP, rates=LINEAR, changes=9, watched_s=90.0)
    verdict = decide_growth(restless, 1000.0, Batching(typical_quiet_s=100.0))
    assert not verdict.grow
    assert verdict.words == "joining costs 10s and pays for itself after 20s, but the next change is expected in 19s"
    assert verdict.again_at == pytest.approx(1010.0)
    later = replace(restless, watched_s=90.0 + 10.1)  # when it was told to ask again, and nothing had changed
    assert decide_growth(later, 1010.1, Batching(typical_quiet_s=100.0)).grow


def test_it_does_not_grow_just_before_the_end() -> None:
    ending = replace(GROUP, rates=LINEAR, remaining_s=15.0)
    verdict = decide_growth(ending, 0.0)
    assert (verdict.grow, verdict.again_at) == (False, None)
    assert verdict.words.endswith("but training ends in 15s")
    assert decide_growth(replace(ending, remaining_s=25.0), 0.0).grow


def test_it_waits_for_those_on_their_way_until_that_costs_as_much_as_another_joining() -> None:
    batch = replace(GROUP, rates=LINEAR, ready_since=100.0, coming=2)
    waiting = decide_growth(batch, 110.0)
    assert (waiting.grow, waiting.again_at) == (False, 120.0)
    assert waiting.words == "4 ready to join; waits at most 10s for 2 more to start"
    assert decide_growth(batch, 120.0).grow
    assert decide_growth(replace(batch, coming=0), 110.0).grow
    assert decide_growth(batch, 105.0, Batching(window_s=5.0)).grow


def test_more_workers_that_are_not_faster_do_not_join() -> None:
    verdict = decide_growth(replace(GROUP, rates={4: 400.0, 8: 390.0}), 0.0)
    assert (verdict.grow, verdict.again_at, verdict.pays_back_s) == (False, None, math.inf)
    assert verdict.words == "4 more workers would not make training faster, as measured"


def test_there_has_to_be_somebody_and_something_to_join() -> None:
    assert not decide_growth(replace(GROUP, ready=0), 0.0).grow
    assert decide_growth(replace(GROUP, size=0), 0.0).grow


def test_a_group_left_in_peace_is_trusted_more() -> None:
    batching = Batching(typical_quiet_s=600.0)
    assert expected_quiet_s(0, 0.0, batching) == 600.0
    assert expected_quiet_s(0, 6000.0, batching) == 6600.0
    assert expected_quiet_s(9, 6000.0, batching) == 660.0


def test_what_was_measured_counts_more_than_what_is_usual() -> None:
    assert speedup(4, 64, {}, 0.8) == pytest.approx(16**0.8)
    assert speedup(4, 8, {4: 10.0, 8: 15.0}, 0.8) == pytest.approx(1.5)
    assert speedup(4, 16, {2: 10.0, 4: 15.0}, 0.8) == pytest.approx(1.5**2)  # half as much again by each doubling
    assert speedup(4, 8, {2: 10.0, 4: 5.0}, 0.8) == 1.0  # never slower than it is, where that was not measured
    assert speedup(4, 8, {0: 1.0, 4: 0.0, 2: 7.0}, 1.0) == pytest.approx(2.0)
