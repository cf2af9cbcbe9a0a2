"""What is known about one job at one instant, by source: the input of `reconcile`. Plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticctl.api.goal import PoolStatus
from elasticctl.api.observed.workers import Pod, PodWait
from elasticctl.api.status import (
    Activity,
    CheckpointStatus,
    GroupGeneration,
    ProgressStatus,
    ShareStatus,
    TokenStatus,
)
from elasticctl.api.usage import JobUsage
from elasticctl_controller.core.group.worker_tokens import EVERY_S
from elasticctl_controller.core.interruption_notices import LeaveNotice


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What the cluster shows.

    `pods` may include pods that are not the job's. `lost_nodes` are gone or NotReady. `taken` are names of workers that
    belong to pods not in `pods`, and whether it is time to try each name again. `refused` is why the last worker could
    not be created (None: none was tried). `events` is what events say about pods that have not started, by uid (None:
    nothing). `notices` are the running workers that will have to leave, by uid, and `avoid` the nodes that workers have
    to leave.
    """

    pods: tuple[Pod, ...] = ()
    lost_nodes: frozenset[str] = frozenset()
    refused: str | None = None
    taken: Mapping[str, bool] = field(default_factory=dict)
    events: Mapping[str, PodWait | None] = field(default_factory=dict)
    notices: Mapping[str, LeaveNotice] = field(default_factory=dict)
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupView:
    """What the rendezvous service knows about the job's group; empty for a job that brings its own service.

    `generations` come oldest first. `silent` are the uids of workers that are alive but gave no sign of life when the
    group re-formed. `growth` is why newcomers that are ready are not in the group yet, `activity` what the group is
    doing, and `usage` what its workers use of their machines. `notices` are what launchers have reported about workers
    that will have to leave, by uid.
    """

    progress: ProgressStatus | None = None
    checkpoint: CheckpointStatus | None = None
    generations: tuple[GroupGeneration, ...] = ()
    silent: frozenset[str] = frozenset()
    growth: str = ""
    activity: Activity | None = None
    usage: JobUsage | None = None
    notices: Mapping[str, LeaveNotice] = field(default_factory=dict)


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
class SeenPools:
    """What similar jobs have seen of the pools of a job with a goal, and what changes have `costs` those jobs, in the
    form that plans keep."""

    pools: tuple[PoolStatus, ...] = ()
    costs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenView:
    """The job's newest token, as far as this controller knows (None: unknown), and the number of the last one that was
    delivered (0: none). The next one is due after `every_s`."""

    known: TokenStatus | None = None
    delivered: int = 0
    every_s: float = EVERY_S


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known about one job at one instant. `allotment` is None for a job that is not shared."""

    cluster: ClusterView = ClusterView()
    group: GroupView = GroupView()
    allotment: Allotment | None = None
    seen_pools: SeenPools = SeenPools()
    token: TokenView = TokenView()

    @property
    def share(self) -> ShareStatus | None:
        """The job's share of the cluster; None if it is not shared."""
        return None if self.allotment is None else self.allotment.share


@dataclass(frozen=True, slots=True)
class WorkerMoves:
    """Which workers leave or move, and where new ones are created, by sharing and by the job's plan or order of pools.

    `leave`: uids of the workers that go first if there are too many. `moves`: uids of workers that go and are replaced.
    `moves_to`: the better pool that a worker will make room for, by uid. `nodes` and `pools` are those of new workers.
    """

    leave: frozenset[str] = frozenset()
    moves: frozenset[str] = frozenset()
    moves_to: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()

    @classmethod
    def of(cls, allotment: Allotment | None) -> WorkerMoves:
        """What sharing wants; empty for a job that is not shared."""
        return cls() if allotment is None else cls(allotment.leave, allotment.moves, nodes=allotment.nodes)
