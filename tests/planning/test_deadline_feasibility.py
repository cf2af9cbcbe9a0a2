"""What is refused before anything has run: only the impossible, however quickly machines come."""

from __future__ import annotations

import pytest

from elasticctl.planning.deadline_feasibility import judge
from elasticctl.planning.situation import Costs, Speeds

SPEEDS = Speeds.of({1: 1.0, 4: 3.6})
WORK = 3.6 * 120
"""Two minutes at the largest size: less than a start is guessed to take."""


@pytest.mark.parametrize(("time_s", "possible", "promised"), [(110.0, False, False), (125.0, True, False)])
def test_a_guess_of_a_start_refuses_nothing(time_s: float, *, possible: bool, promised: bool) -> None:
    found = judge(WORK, SPEEDS, Costs(), (1.0, 0.3), (time_s, None))
    assert (found.possible, found.promised) == (possible, promised)


def test_a_promise_leaves_time_for_a_start_and_a_loss() -> None:
    costs = Costs()
    takes_s = 120 + 2 * (costs.start_s + costs.reform_s) + costs.save_every_s + costs.loss_s
    assert not judge(WORK, SPEEDS, costs, (1.0, 0.3), (takes_s - 1, None)).promised
    assert judge(WORK, SPEEDS, costs, (1.0, 0.3), (takes_s + 1, None)).promised
    assert not judge(WORK, SPEEDS, costs, (1.0, 0.3), (takes_s + 1, 0.01)).possible
