"""How the ranks of a new group come to one state."""

from __future__ import annotations

from elasticctl_train.inplace.newest_state import Agreement, Standing, decide

FRESH = Standing()


def standing(step: int, epoch: int = 0) -> Standing:
    return Standing(step, epoch, has_state=True)


def test_the_first_of_those_that_are_furthest_gives_its_state() -> None:
    found = decide([standing(7), standing(8), FRESH, standing(8)])
    assert (found.source, found.receivers) == (1, (0, 2))
    assert found.newest == standing(8)


def test_ranks_that_are_equally_far_need_nothing() -> None:
    assert decide([standing(7), standing(7)]).receivers == ()


def test_a_torn_step_is_no_state() -> None:
    torn = Standing(9, 0, has_state=False)
    found = decide([torn, standing(8)])
    assert (found.source, found.receivers) == (1, (0,))


def test_a_new_job_has_no_state() -> None:
    assert decide([FRESH, FRESH]) == Agreement(None, (), (FRESH, FRESH))


def test_a_state_before_the_first_step_is_one_too() -> None:
    found = decide([FRESH, standing(0)])
    assert (found.source, found.receivers) == (1, (0,))
