"""The life of a worker on this machine: a state machine that the keeper drives. Pure.

`transition` decides every pair of state and event; docs/state-machines.md shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class KeeperState(Enum):
    """Where a worker stands."""

    WAITING = "waiting"  # it has no process: it needs GPUs, a secret or another attempt
    STARTING = "starting"  # its shim runs and has not reported the worker's process yet
    RUNNING = "running"  # the worker's process runs
    STOPPING = "stopping"  # it was sent SIGTERM, and its grace period runs
    KILLING = "killing"  # its grace period is over: its processes are killed until none is left
    ENDED = "ended"  # no process is left, and how it ended is stored
    REMOVED = "removed"  # its pod is gone


class KeeperEvent(Enum):
    """What can happen to a worker."""

    SHIM_STARTED = "shim started"
    START_REFUSED = "start refused"
    WORKER_STARTED = "worker started"
    STOP_REQUESTED = "stop requested"
    GRACE_EXPIRED = "grace period over"
    EXITED = "exited"
    SHIM_LOST = "shim lost"
    POD_DELETED = "pod deleted"


class ImpossibleKeeperEvent(Exception):
    """The event cannot happen in that state: a programming error."""


def transition(state: KeeperState, event: KeeperEvent) -> KeeperState:
    """Return the state after `event`; the same state where the event is ignored. Raises ImpossibleKeeperEvent."""
    after = _TRANSITIONS[event].get(state)
    if after is None:
        raise ImpossibleKeeperEvent(f"{event.value} while {state.value}")
    return after


_WAITING, _STARTING, _RUNNING, _STOPPING, _KILLING, _ENDED, _REMOVED = KeeperState
_WITH_PROCESS = (_STARTING, _RUNNING, _STOPPING, _KILLING)
_TRANSITIONS: Mapping[KeeperEvent, Mapping[KeeperState, KeeperState]] = {
    KeeperEvent.SHIM_STARTED: {_WAITING: _STARTING},
    KeeperEvent.START_REFUSED: {_WAITING: _ENDED},
    KeeperEvent.WORKER_STARTED: {_STARTING: _RUNNING},
    KeeperEvent.STOP_REQUESTED: {
        _STARTING: _STOPPING,
        _RUNNING: _STOPPING,
        _STOPPING: _STOPPING,
        _KILLING: _KILLING,
    },
    KeeperEvent.GRACE_EXPIRED: dict.fromkeys(_WITH_PROCESS, _KILLING),
    KeeperEvent.EXITED: dict.fromkeys(_WITH_PROCESS, _ENDED),
    KeeperEvent.SHIM_LOST: dict.fromkeys(_WITH_PROCESS, _WAITING),
    KeeperEvent.POD_DELETED: {_WAITING: _REMOVED, _ENDED: _REMOVED},
}


def recovered_state(*, ended: bool, running: bool, started: bool) -> KeeperState:
    """Return the state in which a new supervisor finds a worker.

    `ended` and `running` say what phase its pod was stored in, `started` whether there is a shim, or a report of one.
    """
    if ended:
        return KeeperState.ENDED
    if running:
        return KeeperState.RUNNING
    return KeeperState.STARTING if started else KeeperState.WAITING
