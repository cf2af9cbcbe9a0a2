"""The life of a worker on this machine: a state machine that the kubelet drives. Pure.

`transition` decides every pair of state and event; docs/state-machines.md shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class KubeletState(Enum):
    """Where a worker stands."""

    WAITING = "waiting"  # it has no process: it needs GPUs, a secret or another attempt
    STARTING = "starting"  # its shim runs and has not reported the worker's process yet
    RUNNING = "running"  # the worker's process runs
    STOPPING = "stopping"  # it was sent SIGTERM, and its grace period runs
    KILLING = "killing"  # its grace period is over: its processes are killed until none is left
    ENDED = "ended"  # no process is left, and how it ended is stored
    REMOVED = "removed"  # its pod is gone


class KubeletEvent(Enum):
    """What can happen to a worker."""

    SHIM_STARTED = "shim started"
    START_REFUSED = "start refused"
    WORKER_STARTED = "worker started"
    STOP_REQUESTED = "stop requested"
    GRACE_EXPIRED = "grace period over"
    EXITED = "exited"
    SHIM_LOST = "shim lost"
    POD_DELETED = "pod deleted"


class ImpossibleKubeletEvent(Exception):
    """The event cannot happen in that state: a programming error."""


def transition(state: KubeletState, event: KubeletEvent) -> KubeletState:
    """Return the state after `event`; the same state where the event is ignored. Raises ImpossibleKubeletEvent."""
    after = _TRANSITIONS[event].get(state)
    if after is None:
        raise ImpossibleKubeletEvent(f"{event.value} while {state.value}")
    return after


_WAITING, _STARTING, _RUNNING, _STOPPING, _KILLING, _ENDED, _REMOVED = KubeletState
_WITH_PROCESS = (_STARTING, _RUNNING, _STOPPING, _KILLING)
_TRANSITIONS: Mapping[KubeletEvent, Mapping[KubeletState, KubeletState]] = {
    KubeletEvent.SHIM_STARTED: {_WAITING: _STARTING},
    KubeletEvent.START_REFUSED: {_WAITING: _ENDED},
    KubeletEvent.WORKER_STARTED: {_STARTING: _RUNNING},
    KubeletEvent.STOP_REQUESTED: {
        _STARTING: _STOPPING,
        _RUNNING: _STOPPING,
        _STOPPING: _STOPPING,
        _KILLING: _KILLING,
    },
    KubeletEvent.GRACE_EXPIRED: dict.fromkeys(_WITH_PROCESS, _KILLING),
    KubeletEvent.EXITED: dict.fromkeys(_WITH_PROCESS, _ENDED),
    KubeletEvent.SHIM_LOST: dict.fromkeys(_WITH_PROCESS, _WAITING),
    KubeletEvent.POD_DELETED: {_WAITING: _REMOVED, _ENDED: _REMOVED},
}


def recovered_state(*, ended: bool, running: bool, started: bool) -> KubeletState:
    """Return the state in which a new supervisor finds a worker.

    `ended` and `running` say what phase its pod was stored in, `started` whether there is a shim, or a report of one.
    """
    if ended:
        return KubeletState.ENDED
    if running:
        return KubeletState.RUNNING
    return KubeletState.STARTING if started else KubeletState.WAITING
