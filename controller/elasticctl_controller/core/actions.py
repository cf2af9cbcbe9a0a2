"""What `reconcile` sees and what it decides: plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from elasticctl.api.spec import Pod
from elasticctl.api.status import CheckpointStatus, GroupGeneration, JobStatus, ProgressStatus, ShareStatus


@dataclass(frozen=True, slots=True)
class Allotment:
    """What sharing lets one job have, the uids of the workers that it would rather have go, and nodes for new ones.

    `moves`: uids of workers that are to go and to be made again on those nodes, because theirs is needed as a whole.
    """

    share: ShareStatus
    leave: frozenset[str] = frozenset()
    moves: frozenset[str] = frozenset()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """The world at one instant: pods (the job's and possibly strangers'), nodes that are gone or NotReady, and what
    the rendezvous service has been told (`generations` oldest first, `silent`: uids of workers that live but did not
    join again when the group re-formed, `growth`: why newcomers that are ready are not in it yet; all empty where a job
    brings its own rendezvous). `share`, `leave`, `moves` and `nodes` are the job's `Allotment`; None and empty where
    sharing has no say.
    """

    pods: tuple[Pod, ...] = ()
    lost_nodes: frozenset[str] = frozenset()
    progress: ProgressStatus | None = None
    checkpoint: CheckpointStatus | None = None
    generations: tuple[GroupGeneration, ...] = ()
    silent: frozenset[str] = frozenset()
    growth: str = ""
    share: ShareStatus | None = None
    leave: frozenset[str] = frozenset()
    moves: frozenset[str] = frozenset()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CreateWorker:
    """Create the pod (and Service) of this index; it should go to `node`, if one is named."""

    index: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class DeleteWorker:
    """Delete this very pod; `force` skips the grace period (its node is gone, or it has ended)."""

    name: str
    uid: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job object: its time to live is over."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something a person should read; `type` is "Normal" or "Warning"."""

    type: str
    reason: str
    message: str


Action = CreateWorker | DeleteWorker | DeleteJob


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. The loop writes `status` first, and runs `actions` only if that write succeeded.

    `requeue_s`: look again after this many seconds even if nothing changes (None: no need).
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_s: float | None = None
