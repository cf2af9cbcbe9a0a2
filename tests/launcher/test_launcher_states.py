"""The launcher's state machine: every pair of state and event."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticctl_launcher.launcher_states import (
    FINAL_STATES,
    ImpossibleLauncherEvent,
    LauncherEvent,
    LauncherState,
    transition,
)

PAIRS = [(state, event) for state in LauncherState for event in LauncherEvent]
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
    for state, event in PAIRS:
        try:
            yield state, event, transition(state, event)
        except ImpossibleLauncherEvent:
            continue


def reachable(*starts: LauncherState) -> set[LauncherState]:
    found, seen = set(starts), 0
    while seen != len(found):
        seen = len(found)
        found |= {after for state, _, after in edges() if state in found}
    return found


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair_is_decided(state: LauncherState, event: LauncherEvent) -> None:
    if state in FINAL_STATES:
        with pytest.raises(ImpossibleLauncherEvent, match=f"{event.value} while {state.value}"):
            transition(state, event)
    elif event is E.ERROR:
        assert transition(state, event) is S.FAILED
    elif event is E.SIGTERM:
        assert transition(state, event) is ON_SIGTERM.get(state, state)
    elif (state, event, S.SUCCEEDED) in edges():
        assert event is E.GROUP_FINISHED, "the only way to exit code 0"
        assert state in (S.FINISHING, S.FINISHING_TO_LEAVE, S.JOINING)


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
    assert {(state, event) for state, event, after in edges() if after is S.STARTING} == {(S.JOINING, E.GROUP_FORMED)}
    assert {(state, event) for state, event, after in edges() if after is S.JOINING} == {
        (S.RESTARTING, E.RANKS_STOPPED),
        (S.PREPARING, E.RANKS_PREPARED),
    }


def test_a_worker_that_is_told_to_exit_fails_and_nothing_else() -> None:
    assert reachable(S.FAILING) == {S.FAILING, S.FAILED}
