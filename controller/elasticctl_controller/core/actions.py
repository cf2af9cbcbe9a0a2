"""What `reconcile` observes and what it decides: plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticctl.api.goal import PoolStatus
from elasticctl.api.observed.workers import Pod, PodWait
from elasticctl.api.status import (
    Activity,
    CheckpointStatus,
    GroupGeneration,
    JobStatus,
    ProgressStatus,
    ShareStatus,
    TokenStatus,
)
from elasticctl.api.usage import JobUsage
from elasticctl_controller.core.group.worker_tokens import EVERY_S
from elasticctl_controller.core.interruption_notices import Notice


@dataclass(frozen=True, slots=True)
class Allotment:
    """What one job gets of a shared cluster.

    `leave`: uids of the workers to remove first. `nodes`: nodes for new workers. `moves`: uids of workers to remove and
    to create again on those nodes, because another job needs their node as a whole.
    """

    share: ShareStatus
    leave: frozenset[str] = frozenset()
    moves: frozenset[str] = frozenset()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known about one job at one instant.

    The cluster: `pods` may include pods that are not the job's. `lost_nodes` are gone or NotReady. `taken` are names of
    workers that belong to pods not in `pods`, and whether it is time to try each name again. `refused` is why the last
    worker could not be created (None: none was tried). `told` is what events say about pods that have not started, by
    uid (None: nothing). `notices` are the running workers that will have to leave, by uid, and `avoid` the nodes that
    workers have to leave.

    The rendezvous service, empty for a job that brings its own: `progress`, `checkpoint`, `generations` (oldest first),
    `silent` (uids of workers that are alive but gave no sign of life when the group re-formed), `growth` (why newcomers
    that are ready are not in the group yet), `activity` (what the group is doing) and `usage` (what its workers use of
    their machines). `known_token` is the job's newest token (None: unknown), and `delivered_token` the number of the
    last one that was delivered (0: none); the next one is due after `token_every_s`.

    Sharing: `share`, `leave`, `moves` and `nodes` are the job's `Allotment`; None and empty if the job is not shared.

    Pools, if the job has a goal or an order of pools: `pools` are those of new workers, and `moves_to` is the better
    pool that a worker will make room for, by uid. `evidence` is what similar jobs have seen of the pools, and `costs`
    what changes have cost those jobs, in the form that plans keep.
    """

    pods: tuple[Pod, ...] = ()
    lost_nodes: frozenset[str] = frozenset()
    progress: ProgressStatus | None = None
    checkpoint: CheckpointStatus | None = None
    generations: tuple[GroupGeneration, ...] = ()
    silent: frozenset[str] = frozenset()
    growth: str = ""
    activity: Activity | None = None
    usage: JobUsage | None = None
    share: ShareStatus | None = None
    leave: frozenset[str] = frozenset()
    moves: frozenset[str] = frozenset()
    nodes: tuple[str, ...] = ()
    refused: str | None = None
    taken: Mapping[str, bool] = field(default_factory=dict)
    told: Mapping[str, PodWait | None] = field(default_factory=dict)
    notices: Mapping[str, Notice] = field(default_factory=dict)
    avoid: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    moves_to: Mapping[str, str] = field(default_factory=dict)
    evidence: tuple[PoolStatus, ...] = ()
    costs: tuple[float, ...] = ()
    known_token: TokenStatus | None = None
    delivered_token: int = 0
    token_every_s: float = EVERY_S


@dataclass(frozen=True, slots=True)
class CreateWorker:
    """Create the pod (and Service) with this index: on `node` if one is named, on none of the nodes to `avoid`, and on
    a machine of `pool` if the job's plan or order of pools names one.
    """

    index: int
    node: str = ""
    avoid: tuple[str, ...] = ()
    pool: str = ""


@dataclass(frozen=True, slots=True)
class DeleteWorker:
    """Delete the pod with this uid; `force` skips the grace period (its node is gone, or it has ended)."""

    name: str
    uid: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job object: its time to live has passed."""


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event about the job; `type` is "Normal" or "Warning", and `worker` the worker concerned, if any."""

    type: str
    reason: str
    message: str
    worker: str = ""


Action = CreateWorker | DeleteWorker | DeleteJob


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. The loop writes `status` first, and runs `actions` only if that write succeeded.

    `requeue_s`: reconcile again after this many seconds even if nothing changes (None: no need). `unexplained`: a pod
    that has not started for a reason that only events can tell.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_s: float | None = None
    unexplained: Pod | None = None
