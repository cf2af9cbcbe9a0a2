"""The launcher's state machine: every pair of state and event."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

import pytest

from elasticctl_launcher.launcher_states import (
    FINAL_STATES,
    ImpossibleLauncherEvent,
    LauncherEvent,
    LauncherState,
    transition,
)

S, E = LauncherState, LauncherEvent
ON_SIGTERM = {
    S.JOINING: S.LEAVING,
    S.STARTING: S.LEAVING,
    S.PREPARING: S.LEAVING,
    S.RUNNING: S.NOTICED,
    S.DRAINING: S.DRAINING_TO_LEAVE,
    S.JUDGING: S.LEAVING,
    S.FINISHING: S.LEAVING,
    S.FINISHING_TO_LEAVE: S.LEAVING,
}
"""Where SIGTERM leads; it is ignored in the other states."""


def edges() -> Iterator[tuple[LauncherState, LauncherEvent, LauncherState]]:
    for state, event in itertools.product(LauncherState, LauncherEvent):
        with suppress(ImpossibleLauncherEvent):
            yield state, event, transition(state, event)


EDGES = list(edges())


def reachable(*starts: LauncherState) -> set[LauncherState]:
    found, seen = set(starts), 0
    while seen != len(found):
        seen = len(found)
        found |= {after for state, _, after in EDGES if state in found}
    return found


def test_nothing_happens_behind_the_end() -> None:
    for state, event in itertools.product(FINAL_STATES, LauncherEvent):
        with pytest.raises(ImpossibleLauncherEvent, match=f"{event.value} while {state.value}"):
            transition(state, event)


def test_errors_and_sigterm_are_decided_in_every_state() -> None:
    for state in set(LauncherState) - FINAL_STATES:
        assert transition(state, E.ERROR) is S.FAILED
        assert transition(state, E.SIGTERM) is ON_SIGTERM.get(state, state)


def test_the_only_way_to_exit_code_0_is_that_the_group_has_finished() -> None:
    ends = {(state, event) for state, event, after in EDGES if after is S.SUCCEEDED}
    assert ends == {(state, E.GROUP_FINISHED) for state in (S.FINISHING, S.FINISHING_TO_LEAVE, S.JOINING)}


def test_all_states_can_be_reached_and_end() -> None:
    assert reachable(S.JOINING) == set(LauncherState)
    for state in LauncherState:
        assert reachable(state) & FINAL_STATES


def test_a_worker_that_has_to_go_never_joins_again() -> None:
    assert not reachable(S.NOTICED, S.DRAINING_TO_LEAVE, S.FINISHING_TO_LEAVE, S.LEAVING, S.FAILING) & {
        S.JOINING,
        S.STARTING,
        S.RUNNING,
    }


def test_ranks_are_started_only_in_a_group_that_has_formed_anew() -> None:
    assert {(state, event) for state, event, after in EDGES if after is S.STARTING} == {(S.JOINING, E.GROUP_FORMED)}
    assert {(state, event) for state, event, after in EDGES if after is S.JOINING} == {
        (S.RESTARTING, E.RANKS_STOPPED),
        (S.PREPARING, E.RANKS_PREPARED),
    }


def test_a_worker_that_is_told_to_exit_fails_and_nothing_else() -> None:
    assert reachable(S.FAILING) == {S.FAILING, S.FAILED}
