"""The kubelet's state machine, pair by pair."""

from __future__ import annotations

import pytest

from elasticctl_controller.local.lifecycle import (
    ImpossibleKubeletEvent,
    KubeletEvent,
    KubeletState,
    recovered_state,
    transition,
)

STATES = ("waiting", "starting", "running", "stopping", "killing", "ended", "removed")
TABLE = {
    "shim started": ("starting", "", "", "", "", "", ""),
    "start refused": ("ended", "", "", "", "", "", ""),
    "worker started": ("", "running", "", "", "", "", ""),
    "stop requested": ("", "stopping", "stopping", "stopping", "killing", "", ""),
    "grace period over": ("", "killing", "killing", "killing", "killing", "", ""),
    "exited": ("", "ended", "ended", "ended", "ended", "", ""),
    "shim lost": ("", "waiting", "waiting", "waiting", "waiting", "", ""),
    "pod deleted": ("removed", "", "", "", "", "removed", ""),
}
"""Event -> the state after it, for each state in the order of `STATES`; "": it cannot happen there."""


@pytest.mark.parametrize("event", KubeletEvent)
@pytest.mark.parametrize("state", KubeletState)
def test_every_pair_of_state_and_event_is_decided(state: KubeletState, event: KubeletEvent) -> None:
    expected = TABLE[event.value][STATES.index(state.value)]
    if expected:
        assert transition(state, event) is KubeletState(expected)
    else:
        with pytest.raises(ImpossibleKubeletEvent, match=f"{event.value} while {state.value}"):
            transition(state, event)


@pytest.mark.parametrize(
    ("ended", "running", "started", "state"),
    [
        (True, False, True, KubeletState.ENDED),
        (True, False, False, KubeletState.ENDED),
        (False, True, True, KubeletState.RUNNING),
        (False, True, False, KubeletState.RUNNING),
        (False, False, True, KubeletState.STARTING),
        (False, False, False, KubeletState.WAITING),
    ],
)
def test_a_new_supervisor_continues_where_the_last_one_stopped(
    ended: bool, running: bool, started: bool, state: KubeletState
) -> None:
    assert recovered_state(ended=ended, running=running, started=started) is state
