"""From what ranks have summed up to shares of the time."""

from __future__ import annotations

import pytest

from elasticctl_launcher.usage import measure_usage
from elasticctl_launcher.usage.measure_usage import KEEP_S, StepTimeShares
from elasticctl_protocol.reports import StepShares, StepSums
from elasticctl_protocol.requests import WIRE


def test_shares_are_of_the_time_since_the_last_look_over_all_ranks() -> None:
    times = StepTimeShares()
    assert times.shares() == StepShares()
    times.add(1, 0, StepSums(wall=10.0, data=1.0, all_reduce=2.0, save=1.0))
    assert times.shares() == StepShares(data=0.1, all_reduce=0.2, save=0.1, compute=0.6)
    times.add(1, 0, StepSums(wall=20.0, data=6.0, all_reduce=2.0, save=1.0))
    times.add(1, 1, StepSums(wall=10.0, data=0.0, all_reduce=0.0, save=1.0))
    assert times.shares() == StepShares(data=0.25, all_reduce=0.0, save=0.05, compute=0.7)


def test_a_part_that_one_rank_does_not_tell_is_not_known() -> None:
    times = StepTimeShares()
    times.add(1, 0, StepSums(wall=10.0, data=1.0, all_reduce=2.0, save=0.0))
    times.add(1, 1, StepSums(wall=10.0, data=1.0, save=0.0))
    assert times.shares() == StepShares(data=0.1, save=0.0, compute=0.9)


def test_sums_that_begin_anew_are_taken_from_their_beginning() -> None:
    times = StepTimeShares()
    times.add(1, 0, StepSums(wall=100.0, data=90.0))
    times.shares()
    times.add(1, 0, StepSums(wall=4.0, data=1.0))
    assert times.shares().data == 0.25
    times.add(2, 0, StepSums(wall=50.0, data=10.0))
    assert times.shares().data == 0.2


def test_between_long_steps_it_is_what_it_was_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(measure_usage.time, "monotonic", lambda: now[0])
    times = StepTimeShares()
    times.add(1, 0, StepSums(wall=10.0, data=1.0))
    first = times.shares()
    now[0] += KEEP_S - 1
    assert times.shares() == first
    now[0] += 2
    assert times.shares() == StepShares()


@pytest.mark.parametrize(
    "told", [{}, {"wall": "x"}, {"wall": -1.0}, {"wall": float("nan")}, {"wall": True}, {"wall": 1e300}]
)
def test_whatever_a_script_sends_is_no_trouble(told: dict[str, object]) -> None:
    times = StepTimeShares()
    times.add(1, 0, WIRE.decode(StepSums, told))
    times.add(1, 5, StepSums(wall=0.0, data=3.0))
    assert times.shares() == StepShares()
