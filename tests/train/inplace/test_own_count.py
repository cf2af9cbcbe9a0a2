"""Has a script ended training by a count of its own?"""

from __future__ import annotations

import pytest

from elasticctl_train.inplace.own_count import OwnCount


def train(steps: int, repeated: int, *, begin: int = 0, asks_first: bool = True, asks_last: bool = False) -> OwnCount:
    """A loop that runs so often, of which some times were for nothing."""
    count = OwnCount()
    count.begin(begin)
    if asks_first:
        count.ask()
    for _ in range(steps + repeated):
        count.call()
    if asks_last:
        count.ask()
    return count


@pytest.mark.parametrize("begin", [0, 100])
@pytest.mark.parametrize("repeated", [0, 1, 3])
def test_a_loop_over_a_range_is_ahead_by_what_was_repeated(begin: int, repeated: int) -> None:
    assert train(20, repeated, begin=begin).is_ahead(begin + 20) == (repeated > 0)


def test_who_asks_behind_the_last_step_goes_by_the_steps_that_count() -> None:
    assert not train(20, 3, asks_last=True).is_ahead(20)


def test_who_never_asks_would_begin_anew() -> None:
    assert not train(20, 3, asks_first=False).is_ahead(20)


def test_a_state_that_was_taken_over_is_no_repetition() -> None:
    """Another rank has made more steps than this one has called for."""
    assert not train(20, 0).is_ahead(21)


def test_who_asks_before_each_step_is_led_by_run() -> None:
    count = OwnCount()
    count.ask()
    count.call()
    assert not count.leads, "as a loop that asks before each step"
    count.call()
    assert count.leads
    count.ask()
    count.call()
    assert not count.leads


def test_who_never_asks_leads_nowhere() -> None:
    assert not train(20, 0, asks_first=False).leads
