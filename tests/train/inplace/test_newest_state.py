"""How the ranks of a new group agree on one state."""

from __future__ import annotations

from elasticctl_train.inplace.newest_state import Agreement, Standing, decide

FRESH = Standing()


def standing(step: int, epoch: int = 0) -> Standing:
    return Standing(step, epoch, has_state=True)


def test_the_first_rank_with_the_newest_step_is_the_source() -> None:
    found = decide([standing(7), standing(8), FRESH, standing(8)])
    assert (found.source, found.receivers) == (1, (0, 2))
    assert found.newest == standing(8)


def test_ranks_at_the_same_step_receive_nothing() -> None:
    assert decide([standing(7), standing(7)]).receivers == ()


def test_an_incomplete_state_is_not_a_source() -> None:
    torn = Standing(9, 0, has_state=False)
    found = decide([torn, standing(8)])
    assert (found.source, found.receivers) == (1, (0,))


def test_a_new_job_has_no_state() -> None:
    assert decide([FRESH, FRESH]) == Agreement(None, (), (FRESH, FRESH))


def test_a_state_before_the_first_step_counts() -> None:
    found = decide([FRESH, standing(0)])
    assert (found.source, found.receivers) == (1, (0,))
