"""What `reconcile` observes and what it decides: plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticctl.api.goal import PoolStatus
from elasticctl.api.observed.workers import Pod, PodWait
from elasticctl.api.status import Activity, CheckpointStatus, GroupGeneration, JobStatus, ProgressStatus, ShareStatus
from elasticctl.api.usage import JobUsage
from elasticctl_controller.core.group.tokens import EVERY_S
from elasticctl_controller.core.notices import Notice


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
    """What is known of one job at one instant.

    `pods` may include pods that are not the job's. `lost_nodes` are gone or NotReady. What the rendezvous service
    knows: `progress`, `checkpoint`, `generations` (oldest first), `silent` (uids of workers that are alive but gave no
    sign of life when the group re-formed), `growth` (why newcomers that are ready are not in the group yet), `activity`
    (what the group does) and `usage` (what its workers use of their machines); all empty for a job that brings its own
    rendezvous. `share`, `leave`, `moves` and `nodes` are the job's `Allotment`; None and empty when the job is not
    shared. `taken` are workers' names of pods that are not among `pods`: is it time to try them again? `refused` says
    why the last worker could not be created; None while none has been tried. `told` is what events say of pods that
    have not started, by uid; None where they say nothing. `notices` say which workers that run will have to go, and
    why, by uid; `avoid` are nodes that workers have to leave. `pools` are those
    of new workers, if the job has a goal or an order of them, and `moves_to` is the better one for which a worker will
    make room, by uid; `evidence` is what jobs like it have seen of pools, and `costs` what changes have cost them, as
    plans keep that. `delivered_token` is the number of the last token that was delivered (0: none), and the next one is
    due after `token_every_s`.
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
    delivered_token: int = 0
    token_every_s: float = EVERY_S


@dataclass(frozen=True, slots=True)
class CreateWorker:
    """Create the pod (and Service) of this index, on `node` if one is named, and on none of those to `avoid`.

    `pool`: on a machine of this pool, as the plan of a job with a goal, or its order of pools, wants it.
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
    """A Kubernetes event about the job; `type` is "Normal" or "Warning", `worker` the one that it is about, if any."""

    type: str
    reason: str
    message: str
    worker: str = ""


Action = CreateWorker | DeleteWorker | DeleteJob


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. The loop writes `status` first, and runs `actions` only if that write succeeded.

    `requeue_s`: reconcile again after this many seconds even if nothing changes (None: no need). `unexplained`: the pod
    of which events may say why it has not started.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_s: float | None = None
    unexplained: Pod | None = None
