"""The launcher as a state machine: its states, its events, and one transition function.

`restart_ranks.Agent` does the work of each state, and passes every event to `transition`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class LauncherState(Enum):
    """What the launcher of one worker is doing."""

    JOINING = "joining"
    """Waits at the rendezvous for the next generation."""
    PREPARING = "preparing"
    """The group trains without this worker, which starts its ranks first so that the others need not wait for them."""
    STARTING = "starting"
    """The group has formed: starts this worker's ranks."""
    RUNNING = "running"
    """The ranks train."""
    NOTICED = "noticed"
    """The ranks train, but this worker has to leave once it is replaced or its time is up."""
    DRAINING = "draining"
    """The group is about to change: the ranks agree on a step, commit it and stop."""
    DRAINING_TO_LEAVE = "draining to leave"
    """As DRAINING, but this worker has to leave and does not join again."""
    JUDGING = "judging"
    """A rank failed or hangs: waits for the service's verdict, and stops the other ranks."""
    RESTARTING = "restarting"
    """Stops the remaining ranks, to restart them in the next generation."""
    FINISHING = "finishing"
    """All ranks of this worker succeeded: waits for those of its peers, which may need its store or a new generation.
    """
    FINISHING_TO_LEAVE = "finishing to leave"
    """As FINISHING, but this worker has to leave: it waits only briefly and does not join again."""
    LEAVING = "leaving"
    """This worker has to leave: reports that to the service, then stops the ranks."""
    FAILING = "failing"
    """The job has used up its restarts, or restarts cannot help: reports that to the service, and ends."""
    SUCCEEDED = "succeeded"
    """The end, with exit code 0."""
    LEFT = "left"
    """The end after SIGTERM or a spot notice, with exit code 143."""
    FAILED = "failed"
    """The end after an error, with the exit code of the rank that failed, else 1."""


class LauncherEvent(Enum):
    """What can happen to the launcher."""

    GROUP_FORMED = "group formed"
    RANKS_WANTED = "ranks wanted"
    """The group does not wait for ranks that have not been started yet."""
    RANKS_PREPARED = "ranks prepared"
    """The ranks are ready for a place in the group, or have ended and restart once there is a place."""
    RANKS_STARTED = "ranks started"
    ALL_RANKS_SUCCEEDED = "all ranks succeeded"
    RANK_FAILED = "rank failed"
    RANK_SUSPENDED = "rank suspended"
    """The generation ended, and a rank of this worker was found stopped by SIGSTOP."""
    RANKS_HUNG = "ranks hung"
    RANKS_DECLINED = "ranks declined"
    """A rank that could have stayed in its process must be restarted."""
    GENERATION_STALE = "generation stale"
    """The service reports that the group has changed."""
    DRAIN_REQUESTED = "drain requested"
    """The service reports that the group is about to change."""
    LEAVE_DUE = "leave due"
    """This worker has to leave now, because the service says so or no time is left."""
    CANNOT_DRAIN = "cannot drain"
    """The script does not use the training library."""
    RANKS_DRAINED = "ranks drained"
    DRAIN_TIMED_OUT = "drain timed out"
    """This worker has to leave, and the part of its grace period for the drain is over."""
    SIGTERM = "SIGTERM"
    """The signal itself, or a spot notice, which is passed on as the signal."""
    REJOIN_ORDERED = "rejoin ordered"
    """The service restarts the group, including this worker."""
    EXIT_ORDERED = "exit ordered"
    """The service orders this worker to exit with its failure, refuses to answer, or need not be asked."""
    RANKS_STOPPED = "ranks stopped"
    GROUP_FINISHED = "group finished"
    """The ranks of all members succeeded."""
    REMOVED = "removed"
    """The job is over, or this worker is no longer part of it."""
    ERROR = "error"
    """The rendezvous or the operating system refused something that the launcher needs."""


_S, _E = LauncherState, LauncherEvent

FINAL_STATES = frozenset({_S.SUCCEEDED, _S.LEFT, _S.FAILED})

_WITH_RANKS = (_S.RUNNING, _S.NOTICED, _S.DRAINING, _S.DRAINING_TO_LEAVE)
_FINISHED = (_S.FINISHING, _S.FINISHING_TO_LEAVE, _S.FINISHING, _S.FINISHING_TO_LEAVE)
_JUDGED = (_S.JUDGING, _S.LEAVING, _S.JUDGING, _S.LEAVING)
_RESTARTED = (_S.RESTARTING, _S.LEAVING, _S.RESTARTING, _S.LEAVING)
"""What follows from the four states with ranks: a worker that has to leave leaves instead."""

_TRANSITIONS: Mapping[LauncherEvent, Mapping[LauncherState, LauncherState]] = {
    _E.GROUP_FORMED: {_S.JOINING: _S.STARTING},
    _E.RANKS_WANTED: {_S.JOINING: _S.PREPARING},
    _E.RANKS_PREPARED: {_S.PREPARING: _S.JOINING},
    _E.RANKS_STARTED: {_S.STARTING: _S.RUNNING},
    _E.ALL_RANKS_SUCCEEDED: dict(zip(_WITH_RANKS, _FINISHED, strict=True)),
    _E.RANK_FAILED: dict(zip(_WITH_RANKS, _JUDGED, strict=True)) | {_S.RESTARTING: _S.JUDGING},
    _E.RANK_SUSPENDED: dict(zip(_WITH_RANKS, _JUDGED, strict=True)),
    _E.RANKS_HUNG: dict(zip(_WITH_RANKS, _JUDGED, strict=True)),
    _E.RANKS_DECLINED: dict(zip(_WITH_RANKS, _RESTARTED, strict=True)),
    _E.GENERATION_STALE: dict(zip(_WITH_RANKS, _RESTARTED, strict=True)),
    _E.DRAIN_REQUESTED: {
        _S.RUNNING: _S.DRAINING,
        _S.NOTICED: _S.DRAINING_TO_LEAVE,
        _S.DRAINING: _S.DRAINING,
        _S.DRAINING_TO_LEAVE: _S.DRAINING_TO_LEAVE,
    },
    _E.LEAVE_DUE: dict.fromkeys((_S.RUNNING, _S.NOTICED, _S.DRAINING_TO_LEAVE), _S.DRAINING_TO_LEAVE),
    _E.CANNOT_DRAIN: {_S.DRAINING: _S.RESTARTING, _S.DRAINING_TO_LEAVE: _S.LEAVING},
    _E.RANKS_DRAINED: dict(zip(_WITH_RANKS, _RESTARTED, strict=True)),
    _E.DRAIN_TIMED_OUT: {_S.DRAINING_TO_LEAVE: _S.LEAVING},
    _E.SIGTERM: {
        **dict.fromkeys((_S.JOINING, _S.PREPARING, _S.STARTING, _S.JUDGING, _S.LEAVING), _S.LEAVING),
        **dict.fromkeys((_S.FINISHING, _S.FINISHING_TO_LEAVE), _S.LEAVING),
        **dict.fromkeys((_S.RUNNING, _S.NOTICED), _S.NOTICED),
        **dict.fromkeys((_S.DRAINING, _S.DRAINING_TO_LEAVE), _S.DRAINING_TO_LEAVE),
        _S.RESTARTING: _S.RESTARTING,  # handled when the next generation would be joined
        _S.FAILING: _S.FAILING,
    },
    _E.REJOIN_ORDERED: {
        _S.JUDGING: _S.RESTARTING,
        _S.FINISHING: _S.RESTARTING,
        _S.FINISHING_TO_LEAVE: _S.LEAVING,
    },
    _E.EXIT_ORDERED: {_S.JUDGING: _S.FAILING},
    _E.RANKS_STOPPED: {_S.RESTARTING: _S.JOINING, _S.LEAVING: _S.LEFT, _S.FAILING: _S.FAILED},
    _E.GROUP_FINISHED: dict.fromkeys((_S.JOINING, _S.FINISHING, _S.FINISHING_TO_LEAVE), _S.SUCCEEDED),
    _E.REMOVED: {_S.JOINING: _S.LEFT},
    _E.ERROR: dict.fromkeys((state for state in LauncherState if state not in FINAL_STATES), _S.FAILED),
}


class ImpossibleLauncherEvent(Exception):
    """The event cannot happen in that state, which is a programming error."""


def transition(state: LauncherState, event: LauncherEvent) -> LauncherState:
    """Return the state after `event`; it stays the same if the event is ignored. Raises ImpossibleLauncherEvent."""
    after = _TRANSITIONS[event].get(state)
    if after is None:
        raise ImpossibleLauncherEvent(f"{event.value} while {state.value}")
    return after
