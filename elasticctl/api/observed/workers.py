"""A job's workers as the cluster reports them: each worker's pod, what keeps it from starting, and counts by state.

A wanted worker is *placed* once it has a node, which costs money from then on. Placed workers are *starting* until
their group makes steps, and *training* from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import Timestamp, from_rfc3339
from elasticctl.api.errors import NotFoundError
from elasticctl.api.objects import as_list, as_mapping, as_text
from elasticctl.api.observed.history import knows_groups, reports_steps
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import (
    ANNOTATION_POOL,
    ANNOTATION_PREEMPTED,
    LABEL_INDEX,
    WORKER_CONTAINER,
    ElasticJob,
    PodPhase,
    worker_name,
)
from elasticctl.api.status import GroupGeneration, JobStatus, Phase, WorkerStatus

UNSCHEDULABLE, GATED = "Unschedulable", "SchedulingGated"
"""Kubernetes' reasons of a pod without a node."""
INITIALIZING = "Initializing"
"""The reason of a pod whose init containers run: it starts once they have ended."""
DEADLINE_EXCEEDED = "DeadlineExceeded"
"""Kubernetes' reason of a pod that ran for longer than its own `activeDeadlineSeconds`."""
PROBE_FAILED = "ProbeFailed"
"""The controller's own reason of a pod whose worker was killed for its liveness or startup probe: only events say."""
FAILED_CREATE, NAME_TAKEN, NO_SCHEDULER = "FailedCreate", "NameTaken", "NoScheduler"
"""Reasons of the condition WorkersWaiting that the controller finds: the API server refuses a pod, another pod
has its name, the scheduler that it names has not processed it."""
STILL_ENDING = "StillEnding"
"""Another: pods of former workers, whose names are needed, have not ended yet."""
WITHOUT_EVENTS = (FAILED_CREATE, NAME_TAKEN, NO_SCHEDULER)
"""Of these Kubernetes keeps no event about a pod."""
MOUNTS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedMapVolume")
"""Reasons of events, and so of the condition, of which the pod itself says nothing."""
TERMINATING = "Terminating"
"""`WorkerStatus.phase` of a pod that is being deleted."""
_WAITING_IS_NORMAL = frozenset({"", "ContainerCreating", "PodInitializing"})
_BY_EVICTION = "EvictionByEvictionAPI"
"""Kubernetes' reason of a pod that was asked to go through its API, as `kubectl drain` and autoscalers do."""
_BEFORE_STEPS = frozenset({"waiting", "preparing", "starting", "loading", "first step"})
"""What a group does before its steps; see `elasticctl.api.status.Activity`."""


@dataclass(frozen=True, slots=True)
class PodWait:
    """What keeps a pod from starting: Kubernetes' reason in one word, and its message."""

    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Pod:
    """One worker's pod as observed; `index` is None if its labels are invalid.

    `message` is the container's termination message (a `Failure` as JSON when our launcher wrote it). `wait` is None
    unless the cluster reports what keeps it from starting; `considered`: its `scheduler` has looked at it. A pod that
    is being deleted is killed at `deadline`. `disruption_target`: the cluster ends the pod, which did nothing wrong;
    `drained`: because its node is being drained.
    """

    name: str
    uid: str
    index: int | None
    owner_uid: str
    phase: PodPhase
    created_at: Timestamp | None = None
    started_at: Timestamp | None = None
    finished_at: Timestamp | None = None
    deleting: bool = False
    deadline: Timestamp | None = None
    node: str = ""
    scheduler: str = ""
    considered: bool = False
    finalizer: str = ""
    """What keeps its name once it has ended."""
    wait: PodWait | None = None
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    disruption_target: bool = False
    drained: bool = False
    has_stopped: bool = False
    """All its containers have ended. Kubernetes reports this a second before it changes the phase."""
    pool: str = ""

    @property
    def ended(self) -> bool:
        """True once none of its containers will run again."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Pod:
        """Read a Kubernetes Pod object, whatever it contains; never raises."""
        meta, status = as_mapping(manifest.get("metadata")), as_mapping(manifest.get("status"))
        owner = next(
            (as_mapping(ref) for ref in as_list(meta.get("ownerReferences")) if as_mapping(ref).get("controller")), {}
        )
        spec = as_mapping(manifest.get("spec"))
        ended = as_mapping(as_mapping(_worker_status(spec, status).get("state")).get("terminated"))
        ended = ended or _failed_before(spec, status)
        exit_code, reason = ended.get("exitCode"), as_text(status.get("reason")) or as_text(ended.get("reason"))
        said, overall = as_text(ended.get("message")), as_text(status.get("message"))
        disruption = _condition(status, "DisruptionTarget")
        is_target = disruption.get("status") == "True"
        preempted = ANNOTATION_PREEMPTED in as_mapping(meta.get("annotations"))
        return cls(
            name=as_text(meta.get("name")),
            uid=as_text(meta.get("uid")),
            index=_index(as_mapping(meta.get("labels")).get(LABEL_INDEX)),
            owner_uid=as_text(owner.get("uid")),
            phase=_phase(status),
            created_at=from_rfc3339(meta.get("creationTimestamp")),
            started_at=from_rfc3339(status.get("startTime")),
            finished_at=from_rfc3339(ended.get("finishedAt")),
            deleting=meta.get("deletionTimestamp") is not None,
            deadline=from_rfc3339(meta.get("deletionTimestamp")),
            node=as_text(spec.get("nodeName")),
            scheduler=as_text(spec.get("schedulerName")),
            considered=bool(_condition(status, "PodScheduled")),
            finalizer=next((as_text(item) for item in as_list(meta.get("finalizers"))), ""),
            wait=read_wait(manifest),
            exit_code=exit_code if isinstance(exit_code, int) else None,
            reason=reason,
            message=(overall or said) if reason == DEADLINE_EXCEEDED else (said or overall),
            disruption_target=preempted or is_target,
            drained=is_target and not preempted and disruption.get("reason") == _BY_EVICTION,
            has_stopped=_has_stopped(spec, status),
            pool=as_text(as_mapping(meta.get("annotations")).get(ANNOTATION_POOL)),
        )


def read_wait(pod: Mapping[str, Any]) -> PodWait | None:
    """What keeps a pod from starting, according to its object, which may contain anything; None if nothing does."""
    spec, status = as_mapping(pod.get("spec")), as_mapping(pod.get("status"))
    if _phase(status) is not PodPhase.PENDING:
        return None
    placing = _condition(status, "PodScheduled")
    if placing.get("status") == "False":
        reason, message = as_text(placing.get("reason")) or UNSCHEDULABLE, as_text(placing.get("message"))
        gates = [as_text(as_mapping(gate).get("name")) for gate in as_list(spec.get("schedulingGates"))]
        return PodWait(reason, f"{message or 'scheduling gates'}: {', '.join(gates)}" if gates else message)
    for part in ("initContainerStatuses", "containerStatuses"):
        for container in as_list(status.get(part)):
            waiting = as_mapping(as_mapping(as_mapping(container).get("state")).get("waiting"))
            if as_text(waiting.get("reason")) not in _WAITING_IS_NORMAL:
                return PodWait(as_text(waiting.get("reason")), as_text(waiting.get("message")))
    for name, state in _init_states(spec, status):
        if isinstance(state.get("running"), Mapping):
            since = as_text(as_mapping(state["running"]).get("startedAt"))
            words = f"init container {name} has been running"
            return PodWait(INITIALIZING, f"{words} since {since}" if since else words)
    reason = as_text(status.get("reason"))
    return PodWait(reason, as_text(status.get("message"))) if reason else None


@dataclass(frozen=True, slots=True)
class Headcount:
    """How many workers have a node, and of these, how many run, are starting, and train.

    `stopping` are others, which are not wanted any more and have not ended yet.
    """

    placed: int = 0
    running: int = 0
    starting: int = 0
    training: int = 0
    stopping: int = 0


def count_workers(status: JobStatus) -> Headcount:
    """Count the workers of a status that are not being removed, by what the cluster and their group report about each.

    A script that reports no steps counts as training once its ranks run, and a job with its own rendezvous once its
    workers run. The counts of a status without a roster, as other programs write it, are used as they are.
    """
    if not status.workers:
        number = status.active if status.phase is Phase.RUNNING else 0
        members = len(status.generations[-1].workers) if status.generations else number
        training = min(number, members) if _steps(status) else 0
        return Headcount(number, number, number - training, training)
    present = [worker for worker in status.workers if worker.cause is None and not worker.removal]
    running = [worker for worker in present if worker.phase == PodPhase.RUNNING]
    placed = sum(bool(worker.node) or worker.phase == PodPhase.RUNNING for worker in present)
    training = sum(_is_in_group(worker, status) for worker in running) if _steps(status) else 0
    stopping = sum(bool(worker.removal) and worker.phase == TERMINATING for worker in status.workers)
    return Headcount(placed, len(running), placed - training, training, stopping)


def is_member(worker: WorkerStatus, generation: GroupGeneration) -> bool:
    """True for a member of that generation, but not for a later worker of the same name."""
    if worker.started_at is None or generation.formed_at is None:
        return worker.name in generation.workers
    return worker.name in generation.workers and worker.started_at <= generation.formed_at


def _is_in_group(worker: WorkerStatus, status: JobStatus) -> bool:
    return not status.generations or is_member(worker, status.generations[-1])


def _steps(status: JobStatus) -> bool:
    """True while the job's newest group makes steps, as far as is known."""
    if status.phase is not Phase.RUNNING:
        return False
    if not status.generations:
        return not knows_groups(status) or status.progress.step is not None
    if status.activity is not None:
        return status.activity.doing not in _BEFORE_STEPS
    return not reports_steps(status) or status.generations[-1].first_step_at is not None


def _condition(status: Mapping[str, Any], type_: str) -> Mapping[str, Any]:
    found = (as_mapping(item) for item in as_list(status.get("conditions")))
    return next((item for item in found if item.get("type") == type_), {})


def _phase(status: Mapping[str, Any]) -> PodPhase:
    return next((phase for phase in PodPhase if phase.value == status.get("phase")), PodPhase.PENDING)


def _worker_status(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Status of the worker's container; the statuses are not in the order of the spec's containers."""
    names = [as_mapping(item).get("name") for item in as_list(spec.get("containers"))]
    wanted = WORKER_CONTAINER if WORKER_CONTAINER in names or not names else names[0]
    statuses = [as_mapping(item) for item in as_list(status.get("containerStatuses"))]
    return next((item for item in statuses if item.get("name") == wanted), statuses[0] if len(statuses) == 1 else {})


def sidecars_of(spec: Mapping[str, Any]) -> set[str]:
    """The names of the init containers that are sidecars."""
    given = map(as_mapping, as_list(spec.get("initContainers")))
    return {as_text(item.get("name")) for item in given if item.get("restartPolicy") == "Always"}


def _init_states(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The init containers, without sidecars, by name and state."""
    sidecars = sidecars_of(spec)
    for item in map(as_mapping, as_list(status.get("initContainerStatuses"))):
        name = as_text(item.get("name"))
        if name not in sidecars:
            yield name, as_mapping(item.get("state"))


def _failed_before(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The end of the init container that made a pod fail before its worker started, with a message that names it."""
    if _phase(status) is not PodPhase.FAILED:
        return {}
    for name, state in _init_states(spec, status):
        ended = as_mapping(state.get("terminated"))
        if ended and ended.get("exitCode") != 0:
            said = as_text(ended.get("message")).strip()
            words = f"init container {name} exited with code {ended.get('exitCode')}"
            return {**ended, "message": f"{words}: {said}" if said else words}
    return {}


def _has_stopped(spec: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """True if every container has ended; those of workers are never restarted."""
    states = [as_mapping(as_mapping(item).get("state")) for item in as_list(status.get("containerStatuses"))]
    ended = sum(isinstance(state.get("terminated"), Mapping) for state in states)
    return 0 < ended >= max(len(states), len(as_list(spec.get("containers"))))


def _index(value: object) -> int | None:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 6 else None


def runs(pod: Mapping[str, Any]) -> bool:
    """True if this pod, a manifest, runs a worker and is not being deleted."""
    found = Pod.from_manifest(pod)
    return found.phase is PodPhase.RUNNING and not found.deleting and found.exit_code is None


def known_workers(job: ElasticJob) -> list[str]:
    """The workers that the job has or, according to its status, has had, in order of their numbers."""
    status = job.status
    names = {worker_name(job.name, index) for index in range(job.desired)}
    names |= {worker.name for worker in status.workers}
    names |= {name for generation in status.generations for name in generation.workers}
    names |= {interruption.worker for interruption in status.interruptions}
    return sorted(names, key=lambda name: (len(name), name))


def rank_count(job: ElasticJob) -> int:
    """The number of ranks in the group that is training, or that trained last."""
    workers = job.status.generations[-1].workers if job.status.generations else ()
    return len(workers) * hardware(job).ranks_per_worker


def worker_of_rank(job: ElasticJob, rank: int) -> str:
    """The worker that runs a rank, or ran it in the last group. Raises NotFoundError if there is no such rank.

    Every worker has the same number of ranks, in the order of the group.
    """
    known = rank_count(job)
    if not 0 <= rank < known:
        several = f"its ranks are 0 to {known - 1}" if known > 1 else "its only rank is 0"
        ranks = several if known else "it is not training yet"
        raise NotFoundError(f"{job.name} has no rank {rank}: {ranks}")
    return job.status.generations[-1].workers[rank // hardware(job).ranks_per_worker]


def rank_prefix(job: ElasticJob, rank: int) -> str:
    """The prefix of a rank's lines in the log of its worker; empty if that has no other rank."""
    return f"[rank{rank}] " if hardware(job).ranks_per_worker > 1 else ""
