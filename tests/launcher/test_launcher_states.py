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


def test_final_states_accept_no_event() -> None:
    for state, event in itertools.product(FINAL_STATES, LauncherEvent):
        with pytest.raises(ImpossibleLauncherEvent, match=f"{event.value} while {state.value}"):
            transition(state, event)


def test_every_state_handles_errors_and_sigterm() -> None:
    for state in set(LauncherState) - FINAL_STATES:
        assert transition(state, E.ERROR) is S.FAILED
        assert transition(state, E.SIGTERM) is ON_SIGTERM.get(state, state)


def test_only_a_finished_group_leads_to_success() -> None:
    ends = {(state, event) for state, event, after in EDGES if after is S.SUCCEEDED}
    assert ends == {(state, E.GROUP_FINISHED) for state in (S.FINISHING, S.FINISHING_TO_LEAVE, S.JOINING)}


def test_every_state_is_reachable_and_leads_to_an_end() -> None:
    assert reachable(S.JOINING) == set(LauncherState)
    for state in LauncherState:
        assert reachable(state) & FINAL_STATES


def test_a_worker_that_leaves_never_joins_again() -> None:
    assert not reachable(S.NOTICED, S.DRAINING_TO_LEAVE, S.FINISHING_TO_LEAVE, S.LEAVING, S.FAILING) & {
        S.JOINING,
        S.STARTING,
        S.RUNNING,
    }


def test_ranks_are_started_only_in_a_new_group() -> None:
    assert {(state, event) for state, event, after in EDGES if after is S.STARTING} == {(S.JOINING, E.GROUP_FORMED)}
    assert {(state, event) for state, event, after in EDGES if after is S.JOINING} == {
        (S.RESTARTING, E.RANKS_STOPPED),
        (S.PREPARING, E.RANKS_PREPARED),
    }


def test_an_order_to_exit_leads_only_to_failure() -> None:
    assert reachable(S.FAILING) == {S.FAILING, S.FAILED}
