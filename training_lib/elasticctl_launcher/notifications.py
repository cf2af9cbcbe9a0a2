"""What the agent's main thread is told by its other threads, by signals and by the rendezvous service."""

from __future__ import annotations

from dataclasses import dataclass

from elasticctl_launcher.hangs.watch_ranks import Hang
from elasticctl_launcher.rank_processes import Rank
from elasticctl_launcher.service.questions import Question
from elasticctl_launcher.states import LauncherEvent


@dataclass(frozen=True, slots=True)
class SigtermReceived:
    """This process got SIGTERM, or word that it has to go."""


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank ended, with any exit code."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class RankDrained:
    """A rank has committed the step that the ranks agreed on."""

    generation: int
    global_rank: int


@dataclass(frozen=True, slots=True)
class RankLostPeers:
    """A rank that can stay in its process has lost the connection to others."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class RankDeclined:
    """A rank that could have stayed in its process has to be started again."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class TrainingDone:
    """A rank has made its last step; what its script does after that, an export or a test, may take long.

    Not `is_over`: its script has begun another training then.
    """

    generation: int
    is_over: bool = True


@dataclass(frozen=True, slots=True)
class RanksStandStill:
    """The ranks have not moved for so long that it is told (`still`), or move again. It ends nothing."""

    generation: int
    still: bool


@dataclass(frozen=True, slots=True)
class RanksHung:
    """Nothing in the group has moved for as long as is allowed."""

    hang: Hang


@dataclass(frozen=True, slots=True)
class ServiceAnnounced:
    """The rendezvous service says that the group has changed (GENERATION_STALE) or will (DRAIN_REQUESTED), or that this
    worker has to go now (LEAVE_DUE).
    """

    generation: int
    event: LauncherEvent


@dataclass(frozen=True, slots=True)
class ServiceAnswered:
    """The rendezvous service has answered a question."""

    question: Question


Notification = (
    SigtermReceived
    | RankExited
    | RankDrained
    | RankLostPeers
    | RankDeclined
    | TrainingDone
    | RanksStandStill
    | RanksHung
    | ServiceAnnounced
    | ServiceAnswered
)
