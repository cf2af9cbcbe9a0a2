"""The status of a job, which the controller writes and the command line reads.

Times are `Timestamp`s: seconds since the epoch, UTC. Durations are seconds. All of it is stored as the `status` of the
ElasticJob object through `elasticctl.api.codec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elasticctl.api.codec import (
    MANY,
    Timestamp,
    from_json,
    from_rfc3339,
    pack_names,
    to_json,
    to_rfc3339,
    unpack_names,
)
from elasticctl.api.goal import PlanStatus, PoolsStatus
from elasticctl.api.usage import JobUsage, UsageHistory
from elasticctl_protocol.codec import written_as
from elasticctl_protocol.failures import GROUP_HANGS

_RUNNING = "Running"


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in chronological order, as columns: `at_s` is seconds after `since`, `samples_per_s` over the whole group.

    A column that began later is shorter; its last value belongs to the last point. None stands for a value that was not
    finite.
    """

    since: Timestamp | None = None
    at_s: tuple[float, ...] = ()
    step: tuple[int, ...] = ()
    samples_per_s: tuple[float, ...] = ()
    metrics: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)


class Phase(StrEnum):
    """The phase of a job's life."""

    PENDING = "Pending"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def terminal(self) -> bool:
        """True when the job will never run again."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)


class Cause(StrEnum):
    """Why a worker ended; one per worker, decided by `elasticctl_controller.core.causes`.

    It never changes, except that an unresponsive worker becomes `NODE_LOST` once its node turns out to be lost.
    """

    SCALED_IN = "ScaledIn"
    PREEMPTED = "Preempted"
    DRAINED = "Drained"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"
    DELETED = "Deleted"
    OOM_KILLED = "OOMKilled"
    KILLED = "Killed"
    COLLATERAL = "Collateral"
    STUCK = "Stuck"
    UNRESPONSIVE = "Unresponsive"
    APPLICATION = "ApplicationError"
    COMPLETED = "Completed"

    @property
    def counted(self) -> bool:
        """True if it counts towards the job's `backoffLimit`."""
        return self in (Cause.APPLICATION, Cause.OOM_KILLED, Cause.STUCK)

    @property
    def interruption(self) -> bool:
        """True if training was disturbed: neither a removal of ours nor a success."""
        return self not in (Cause.SCALED_IN, Cause.COMPLETED)


class ConditionType(StrEnum):
    """TorchElastic's condition types, plus Suspended and two reasons for missing workers.

    WorkersWaiting: wanted workers are not running. OverLimit: the limits of its project do not allow the job.
    """

    CREATED = "Created"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    SUSPENDED = "Suspended"
    WORKERS_WAITING = "WorkersWaiting"
    OVER_LIMIT = "OverLimit"


@dataclass(frozen=True, slots=True)
class Condition:
    """One entry of `status.conditions`; `status` is "True" or "False"."""

    type: str = ""
    status: str = "False"
    reason: str = ""
    message: str = ""
    last_update_time: Timestamp | None = None
    last_transition_time: Timestamp | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """TorchElastic's counts of one replica type."""

    active: int = 0
    succeeded: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker that the controller knows of. This roster is why each ending is counted exactly once.

    `removal` is why it is removed (ScaledIn, Suspended, Finished), stored beforehand; `cause` and `ended_at` are
    set once its end has been counted. `notice` is why it will soon have to stop, while it still runs. `pool` is where
    its machine was requested, such as `spot` or `spot/zone-a`; "" for a job with neither a goal nor an order of pools.
    `moves_to` is a better pool where a replacement has been requested; the worker leaves once that is ready.
    """

    name: str = ""
    uid: str = ""
    index: int = 0
    phase: str = ""
    node: str = ""
    started_at: Timestamp | None = None
    removal: str = ""
    notice: str = ""
    cause: Cause | None = None
    ended_at: Timestamp | None = None
    pool: str = ""
    moves_to: str = ""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank failed. The launcher writes it as JSON to the worker's termination message.

    `verdict` is the kind of failure as far as the launcher knows: "application", "collateral", "stuck", "killed" or
    "preempted". `permanent`: another try cannot help (a SyntaxError, a missing module, a wrong argument).
    """

    verdict: str = ""
    worker: str = ""
    rank: int | None = None
    exit_code: int | None = None
    signal: str = ""
    error: str = ""
    last_lines: tuple[str, ...] = ()
    generation: int = 0
    at: Timestamp | None = None
    permanent: bool = False

    @property
    def is_hang(self) -> bool:
        """True if no rank ended by itself, but the group was stuck."""
        return self.error.startswith(GROUP_HANGS)


@dataclass(frozen=True, slots=True)
class Interruption:
    """One loss of a worker and its cost. Without a `uid`, the worker stayed, and its ranks failed and were restarted.

    `recovered_at` is when the next group made its first optimizer step or, if the script never reported a step, when
    it had formed; `recovery_s` is counted up to then. `steps_redone` is the number of optimizer steps that had to be
    repeated; None: unknown.
    """

    at: Timestamp | None = None
    worker: str = ""
    uid: str = ""
    cause: Cause | None = None
    message: str = ""
    exit_code: int | None = None
    generation: int = 0
    recovered_at: Timestamp | None = None
    recovery_s: float | None = None
    steps_redone: int | None = None


class ScalingPhase(StrEnum):
    """The state of a scaling: under way, done, or overtaken by the next one."""

    IN_PROGRESS = "InProgress"
    DONE = "Done"
    SUPERSEDED = "Superseded"


@dataclass(frozen=True, slots=True)
class Scaling:
    """One change of the wanted number of workers, who asked for it, and why (`message`).

    `done_at` is when that many were training or, if the script has never reported a step, had formed a group.
    """

    at: Timestamp | None = None
    from_workers: int = 0
    to_workers: int = 0
    by: str = ""
    phase: ScalingPhase | None = None
    message: str = ""
    done_at: Timestamp | None = None
    recovery_s: float | None = None
    steps_redone: int | None = None


@dataclass(frozen=True, slots=True)
class GroupGeneration:
    """One incarnation of the training group, as the rendezvous saw it.

    `opened_at`: the old group was asked to stop; `formed_at`: every member knew its rank; `first_step_at`: the first
    optimizer step was reported. `resumed_step` is the step restored from, `last_step` the highest step reported.
    `failure`: it ended because ranks failed, and the same workers restarted them; ranks that hung made their last
    step at `last_step_at`.

    `resumed_from` is where that state was: the `memory` of ranks whose processes stayed, `copies` in the memory of
    launchers, or `storage`; `resumed_because` is why no faster source could be used. A loss costs about
    `copied_every_steps`, with what is known of the time between two such copies; `copies_lack` is why they would not
    survive the loss of a worker, or are not made. `stays`: the ranks' processes will survive the end of the group
    (None: unknown); if not, `restarts_because` is why.
    """

    generation: int = 0
    workers: tuple[str, ...] = field(default=(), metadata=written_as(pack_names, unpack_names))
    reason: str = ""
    opened_at: Timestamp | None = None
    formed_at: Timestamp | None = None
    first_step_at: Timestamp | None = None
    resumed_step: int | None = None
    resumed_from: str = ""
    resumed_because: str = ""
    stays: bool | None = None
    restarts_because: str = ""
    copied_every_steps: int | None = None
    copies_lack: str = ""
    last_step: int | None = None
    last_step_at: Timestamp | None = None
    failure: RankFailure | None = None


@dataclass(frozen=True, slots=True)
class NotFiniteMetric:
    """A metric that is no longer finite: its value ("NaN", "inf" or "-inf"), and since which step."""

    value: str = ""
    step: int = 0
    at: Timestamp | None = None


NOT_FINITE_VALUES = ("NaN", "inf", "-inf")


@dataclass(frozen=True, slots=True)
class ProgressStatus:
    """Where training is. `samples_per_s` is over the whole group; `metrics` are the user's own numbers.

    A metric is in `metrics` or, while it is not finite, in `not_finite`.
    """

    at: Timestamp | None = None
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    total_epochs: int | None = None
    samples_per_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    not_finite: Mapping[str, NotFiniteMetric] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """The newest committed checkpoint, and the number that this job has committed."""

    step: int | None = None
    at: Timestamp | None = None
    committed: int = 0
    url: str = ""
    size_bytes: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """The pause before failed workers are replaced; its length depends on the `failures` in a row."""

    failures: int = 0
    until: Timestamp | None = None


@dataclass(frozen=True, slots=True)
class ShareStatus:
    """What sharing allows the job: how many workers, and how many of them are lent by other projects.

    Each worker takes `slots_per_worker` of the pool, which has `pool_slots` in all (set for jobs with workers only; 0:
    unknown). `reason` is one word, `message` a sentence without a subject, and `change` the reason for the last change;
    the number was decided at `since`.
    """

    workers: int = 0
    borrowed: int = 0
    pool: str = ""
    slots_per_worker: int = 1
    pool_slots: int = 0
    reason: str = ""
    message: str = ""
    change: str = ""
    since: Timestamp | None = None


@dataclass(frozen=True, slots=True)
class TokenStatus:
    """Which of the job's tokens for the rendezvous service is current: the `number`-th, since `since`.

    The previous one is valid until `former_until`; None: the workers do not have the current one yet.
    """

    number: int = 0
    since: Timestamp | None = None
    former_until: Timestamp | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """What the group of a job's workers is doing, as its launchers report it, and since when.

    `doing` is a word or two: "waiting", "preparing", "starting", "running" (nothing more is known), "loading",
    "first step", "training", "draining", "stopping", "exporting", "finishing" or "hung". `detail`
    completes it ("step 657" after "loading", "for 2 GPUs" after "waiting"; for "hung", a sentence) and contains no
    duration: readers count from `since`.
    """

    doing: str = ""
    since: Timestamp | None = None
    detail: str = ""


def pack_workers(workers: Sequence[WorkerStatus]) -> list[Any]:
    """The roster as JSON. If it is long, each worker that just runs is one line `NAME INDEX UID STARTED NODE`."""
    if len(workers) <= MANY:
        return [to_json(worker) for worker in workers]
    return [_worker_line(worker) or to_json(worker) for worker in workers]


def unpack_workers(items: Any) -> tuple[WorkerStatus, ...] | None:
    """Read the roster that `pack_workers` has written; None for a value that is not a list."""
    if not isinstance(items, list | tuple):
        return None
    found = (_of_worker_line(item) if isinstance(item, str) else _worker_of(item) for item in items)
    return tuple(worker for worker in found if worker is not None)


def _worker_line(worker: WorkerStatus) -> str:
    at = "-" if worker.started_at is None else f"{worker.started_at:.6f}".rstrip("0").rstrip(".")
    line = f"{worker.name} {worker.index} {worker.uid} {at} {worker.node}"
    return line if _of_worker_line(line) == worker else ""


def _of_worker_line(line: str) -> WorkerStatus | None:
    try:
        name, index, uid, at, node = line.split(" ")
        started_at = None if at == "-" else from_rfc3339(to_rfc3339(float(at)))
        return WorkerStatus(name, uid, int(index), _RUNNING, node, started_at)
    except ValueError:
        return None


def _worker_of(item: Any) -> WorkerStatus | None:
    return from_json(WorkerStatus, item) if isinstance(item, Mapping) else None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job.

    `restarts` counts all ended workers of the job's life by cause; `interruptions`, `scalings` and
    `generations` keep the last few entries only. `failures` counts those that count towards the backoff limit over the
    job's life, and `failures_since_commit` those since the last new checkpoint, to which the limit applies (None:
    unknown, as in the status of an older controller). `activity` is None while nothing is known of the group. `growth`
    is why workers that are ready are not in the group yet. `usage` is None while nothing runs (`usage_history` stays),
    `steps_redone` for a script that has reported no steps.
    `worker_seconds` is how long the ended workers ran, by capacity
    (`spot`, `onDemand`, or `unknown`). `token` is None for a job whose workers were created by an older controller.
    """

    phase: Phase = Phase.PENDING
    reason: str = ""
    message: str = ""
    activity: Activity | None = None
    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    replica_statuses: Mapping[str, ReplicaStatus] = field(default_factory=dict)
    replicas: int = 0
    desired: int = 0
    min: int = 0
    max: int = 0
    active: int = 0
    placed: int = 0
    starting: int = 0
    training: int = 0
    share: ShareStatus | None = None
    plan: PlanStatus | None = None
    pools: PoolsStatus | None = None
    growth: str = ""
    token: TokenStatus | None = None
    selector: str = ""
    start_time: Timestamp | None = None
    completion_time: Timestamp | None = None
    last_reconcile_time: Timestamp | None = None
    workers: tuple[WorkerStatus, ...] = field(default=(), metadata=written_as(pack_workers, unpack_workers))
    restarts: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    failures_since_commit: int | None = None
    steps_redone: int | None = None
    worker_seconds: Mapping[str, float] = field(default_factory=dict)
    backoff: RestartBackoff = RestartBackoff()
    interruptions: tuple[Interruption, ...] = ()
    scalings: tuple[Scaling, ...] = ()
    generation: int = 0
    generations: tuple[GroupGeneration, ...] = ()
    progress: ProgressStatus = ProgressStatus()
    curve: Curve = Curve()
    checkpoint: CheckpointStatus = CheckpointStatus()
    usage: JobUsage | None = None
    usage_history: UsageHistory = UsageHistory()
    first_failure: RankFailure | None = None
    last_failure: RankFailure | None = None

    @property
    def newest_failure(self) -> RankFailure | None:
        """The last failure that was counted, or the first one if the controller kept no other."""
        return self.last_failure or self.first_failure

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of this type; None if it has never been set."""
        return next((item for item in self.conditions if item.type == kind), None)
