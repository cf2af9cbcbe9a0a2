"""What other threads, signal handlers and the rendezvous service report to the agent's main thread."""

from __future__ import annotations

from dataclasses import dataclass

from elasticctl_launcher.hangs.watch_ranks import Hang
from elasticctl_launcher.launcher_states import LauncherEvent
from elasticctl_launcher.rank_processes import Rank
from elasticctl_launcher.service.questions import Question


@dataclass(frozen=True, slots=True)
class SigtermReceived:
    """This process got SIGTERM, or a notice that its worker has to leave."""


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
    """A rank that can stay in its process has lost its connection to other ranks; `why` is the error."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class RankDeclined:
    """A rank that could have stayed in its process must be restarted, because of `why`."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class TrainingDone:
    """A rank has made its last step. Its script may continue for long, for example with an export or a test.

    If `is_over` is False, its script has since begun another training.
    """

    generation: int
    is_over: bool = True


@dataclass(frozen=True, slots=True)
class RanksStandStill:
    """The ranks have not moved for so long that it is reported (`still`), or they move again; no generation ends."""

    generation: int
    still: bool


@dataclass(frozen=True, slots=True)
class RanksHung:
    """Nothing in the group has moved for as long as is allowed."""

    hang: Hang


@dataclass(frozen=True, slots=True)
class ServiceAnnounced:
    """The rendezvous service reports a change.

    The group has changed (GENERATION_STALE) or is about to (DRAIN_REQUESTED), or this worker has to leave now
    (LEAVE_DUE).
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
