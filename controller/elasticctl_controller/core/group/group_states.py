"""The states of a job's training group with their data, the events that change them, and the one transition function.

`membership.Group` turns the reports of agents and the controller into events. docs/state-machines.md shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from elasticctl_protocol.requests import Member


class GroupState(Enum):
    """Where the group of a job stands."""

    STARTING = "starting"  # no generation has formed yet
    RESTORED = "restored"  # the service was restarted; the last generation may still be training
    FORMING = "forming"  # the last generation has ended; its members join the next
    TRAINING = "training"  # a generation has formed
    DRAINING = "draining"  # a generation has formed, and is about to stop at a commit
    BREAKING = "breaking"  # ranks of the formed generation have failed; the ends of the others are waited for
    OVER = "over"  # all ranks of the last generation have succeeded


class GroupEvent(Enum):
    """What can happen to the group."""

    WORKER_JOINED = "worker joined"
    MEMBER_REJOINED = "member joined again"
    GROUP_REPORTED = "running group reported"
    MEMBER_LOST = "member lost"
    MEMBER_LEFT = "member left"
    MEMBER_FAILED = "member failed"
    MEMBER_FINISHED = "member finished"
    ALL_FINISHED = "all finished"
    REMOVAL_ANNOUNCED = "removal announced"
    NEWCOMERS_DUE = "newcomers due"
    FAILURE_JUDGED = "failure judged"
    QUORUM_REACHED = "quorum reached"


class ImpossibleGroupEvent(Exception):
    """The event cannot happen in that state: a programming error."""


def transition(state: GroupState, event: GroupEvent) -> GroupState:
    """Return the state after `event`; the same state where the event is ignored. Raises ImpossibleGroupEvent."""
    after = _TRANSITIONS[event].get(state)
    if after is None:
        raise ImpossibleGroupEvent(f"{event.value} while {state.value}")
    return after


_STARTING, _RESTORED, _FORMING, _TRAINING, _DRAINING, _BREAKING, _OVER = GroupState
_UNCHANGED = {state: state for state in GroupState}
_FORMED_ENDS = dict.fromkeys((_TRAINING, _DRAINING, _BREAKING), _FORMING)
_TRANSITIONS: Mapping[GroupEvent, Mapping[GroupState, GroupState]] = {
    GroupEvent.WORKER_JOINED: _UNCHANGED,
    GroupEvent.MEMBER_REJOINED: dict.fromkeys(GroupState, _FORMING) | {_OVER: _OVER},
    GroupEvent.GROUP_REPORTED: _UNCHANGED | {_STARTING: _TRAINING, _RESTORED: _TRAINING},
    GroupEvent.MEMBER_LOST: _UNCHANGED | _FORMED_ENDS,
    GroupEvent.MEMBER_LEFT: _UNCHANGED | _FORMED_ENDS,
    GroupEvent.MEMBER_FAILED: _UNCHANGED | {_TRAINING: _BREAKING, _DRAINING: _BREAKING},
    GroupEvent.MEMBER_FINISHED: _UNCHANGED,
    GroupEvent.ALL_FINISHED: dict.fromkeys((_RESTORED, _TRAINING, _DRAINING, _BREAKING), _OVER),
    GroupEvent.REMOVAL_ANNOUNCED: _UNCHANGED | {_TRAINING: _DRAINING},
    GroupEvent.NEWCOMERS_DUE: {_TRAINING: _DRAINING},
    GroupEvent.FAILURE_JUDGED: {_BREAKING: _FORMING},
    GroupEvent.QUORUM_REACHED: dict.fromkeys((_STARTING, _RESTORED, _FORMING), _TRAINING),
}


@dataclass(frozen=True, slots=True)
class GroupWorld:
    """A formed generation; `members` in order of group rank. The store of rank 0's agent serves it.

    `from_start`: all ranks start from the beginning of the script, also those that could stay in their processes.
    """

    generation: int
    members: tuple[Member, ...]
    from_start: bool = False


@dataclass(frozen=True, slots=True)
class StartingGroup:
    """Data of the state STARTING."""

    state: ClassVar = GroupState.STARTING


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """Data of the state RESTORED: a restarted service knows only what the status says about the last generation."""

    state: ClassVar = GroupState.RESTORED


@dataclass(frozen=True, slots=True)
class FormingGroup:
    """Why there is no formed generation, `since` when, and how long it must wait; in seconds since the epoch."""

    state: ClassVar = GroupState.FORMING
    since: float
    reason: str
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """The formed generation."""

    state: ClassVar = GroupState.TRAINING
    world: GroupWorld


@dataclass(frozen=True, slots=True)
class DrainingGroup:
    """A formed generation that is about to stop, and why."""

    state: ClassVar = GroupState.DRAINING
    world: GroupWorld
    reason: str


@dataclass(frozen=True, slots=True)
class BreakingGroup:
    """A formed generation some of whose ranks have failed, `since` when (seconds since the epoch).

    `drain`: why it was draining at the time, if it was.
    """

    state: ClassVar = GroupState.BREAKING
    world: GroupWorld
    since: float
    drain: str = ""


@dataclass(frozen=True, slots=True)
class OverGroup:
    """Data of the state OVER."""

    state: ClassVar = GroupState.OVER


Situation = StartingGroup | RestoredGroup | FormingGroup | TrainingGroup | DrainingGroup | BreakingGroup | OverGroup
