"""Change the number of workers of a running job, or its goal, and wait until as many run."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from elasticctl.api.codec import to_json
from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.observed.cost import prices_of
from elasticctl.api.observed.history import unkept_s
from elasticctl.api.observed.plan_text import goal_words
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ANNOTATION_SCALED_BY, MAX_WORKERS, ElasticJob, Manifest, PodPhase
from elasticctl.api.status import WorkerStatus
from elasticctl.api.text import plural_are
from elasticctl.operations.option_values import whole
from elasticctl.operations.submit.goals import SIMULATED
from elasticctl.operations.submit.job_flags import ChangedGoal
from elasticctl.operations.target import PATIENCE_S, Poller, Target, full_worker_name
from elasticctl.settings.contexts import LOCAL

BY_USER, BY_ROLLBACK = "user", "rollback"
_POLL_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class ScaleRequest(ChangedGoal):
    """A goal, or exactly one of the other fields: N workers or GPUs in total, K more or fewer, named ones to remove."""

    to: Annotated[int | None, whole(1)] = None
    gpus: Annotated[int | None, whole(1)] = None
    add: Annotated[int | None, whole(1)] = None
    remove: Annotated[int | None, whole(1)] = None
    remove_worker: tuple[str, ...] = ()
    auto: bool = False

    @property
    def sizes(self) -> int:
        """The number of sizes that were requested, of which there may only be one."""
        return sum(map(bool, (self.auto, self.to, self.gpus, self.add, self.remove, self.remove_worker)))

    @property
    def is_goal(self) -> bool:
        """True if a goal is changed or set."""
        return bool(self.finish_by or self.budget or self.prefer)


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """The result of a request: the wanted numbers of workers before and after, and whether they are automatic."""

    before: int
    after: int
    was_automatic: bool = False
    is_automatic: bool = False
    goal: str = ""

    @property
    def words(self) -> str:
        """`2 -> 4 workers`."""
        if self.goal:
            return self.goal
        if self.is_automatic:
            return f"as many workers as fit, {self.after} at most"
        return f"{self.before} -> {self.after} workers"


def scale(target: Target, found: Manifest, request: ScaleRequest) -> ScaleChange:
    """Change the job's size or its goal; scalings apply one after another.

    Raises UsageError for a size out of bounds, NotFoundError for a worker that is not there, ConflictError once the job
    has ended.
    """
    return _change_between(*target.change(found, lambda manifest: _patch_for(target, manifest, request)))


def preview(target: Target, found: Manifest, request: ScaleRequest) -> ScaleChange:
    """What `scale` would do now, without doing it; raises the same errors."""
    from elasticctl.api.objects import merge_patch

    manifest = target.reread(found)
    patch = _patch_for(target, manifest, request)
    return _change_between(manifest, {**manifest, "spec": merge_patch(manifest["spec"], patch["spec"])})


def redone_s(found: Manifest, change: ScaleChange, now: float) -> float | None:
    """How long the ranks of a script without checkpoints have trained, and repeat because of the change, in seconds."""
    job = ElasticJob.from_manifest(found)
    if change.before == change.after or hardware(job).in_launcher_role:
        return None
    return unkept_s(job.status, now)


def scale_patch(manifest: Manifest, pods: list[Manifest], request: ScaleRequest) -> dict[str, Any]:
    """The merge patch for a request; a number of workers ends an automatic size. Pure.

    Raises UsageError if the request is out of bounds, NotFoundError for a worker that is not there, ConflictError when
    the job has ended.
    """
    job = ElasticJob.from_manifest(manifest)
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}) and cannot be scaled")
    metadata = {"annotations": {ANNOTATION_SCALED_BY: BY_USER}}
    without_goal: dict[str, Any] = {"goal": None} if job.goal is not None else {}
    if request.auto:
        return {"metadata": metadata, "spec": {**without_goal, "sharing": {"automatic": True}}}
    leaving = _workers_to_remove(job, pods, request.remove_worker)
    workers = _workers(job, request) - len(leaving)
    _check_bounds(job, manifest["spec"], workers)
    spec: dict[str, Any] = {**without_goal, "replicaSpecs": {"Worker": {"replicas": workers}}}
    if job.sharing.automatic:
        spec["sharing"] = {"automatic": False}
    if leaving:
        # Earlier requests stay as long as their workers are there.
        present = {pod["metadata"].get("uid") for pod in pods}
        named = {ref.uid: ref.name for ref in job.remove_workers if ref.uid in present} | leaving
        spec["removeWorkers"] = [{"name": name, "uid": uid} for uid, name in named.items()]
    return {"metadata": metadata, "spec": spec}


def goal_patch(manifest: Manifest, request: ChangedGoal, *, local: bool) -> dict[str, Any]:
    """The merge patch that changes a goal, or sets one, with known prices. Pure.

    Raises UsageError for an invalid goal, ConflictError if the job has ended.
    """
    job = ElasticJob.from_manifest(manifest)
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}): its goal cannot be changed")
    goal = request.as_spec()
    if job.goal is None:
        if not goal.keys() & {"finishBy", "budget"}:
            raise UsageError(f"{job.name} has no goal. FIX: add --finish-by TIME or --budget USD")
        prices = prices_of(job)
        if prices is not None:
            goal["prices"] = to_json(prices)
        elif local:
            goal["prices"] = dict(SIMULATED)
        elif "budget" in goal:
            raise UsageError("--budget: no price of the machines of this job is known")
    metadata = {"annotations": {ANNOTATION_SCALED_BY: BY_USER}}
    return {"metadata": metadata, "spec": {"goal": goal}}


def _patch_for(target: Target, manifest: Manifest, request: ScaleRequest) -> dict[str, Any]:
    """The patch for a request."""
    if request.is_goal:
        return goal_patch(manifest, request, local=target.context.provider == LOCAL)
    job = ElasticJob.from_manifest(manifest)
    return scale_patch(manifest, target.cluster.pods_of([job])[job.uid] if request.remove_worker else [], request)


def _change_between(manifest: Manifest, patched: Manifest) -> ScaleChange:
    """The change that a patch makes, or would make."""
    before, after = ElasticJob.from_manifest(manifest), ElasticJob.from_manifest(patched)
    goal = goal_words(patched["spec"]["goal"]) if after.goal is not None else ""
    return ScaleChange(_size(before), after.desired, before.sharing.automatic, after.sharing.automatic, goal)


def roll_back(target: Target, found: Manifest, change: ScaleChange) -> bool:
    """Restore the previous size; False if another one has been requested since, or the job has ended."""
    before, after = target.change(found, lambda manifest: _rollback_patch(manifest, change))
    return after is not before


def _rollback_patch(manifest: Manifest, change: ScaleChange) -> dict[str, Any] | None:
    """The patch that reverts a change; None if that is no longer the newest, or the job has ended."""
    job = ElasticJob.from_manifest(manifest)
    if job.status.phase.terminal or job.desired != change.after or job.sharing.automatic:
        return None
    metadata = {"annotations": {ANNOTATION_SCALED_BY: BY_ROLLBACK}}
    spec: dict[str, Any] = {"replicaSpecs": {"Worker": {"replicas": change.before}}}
    if change.was_automatic:
        spec["sharing"] = {"automatic": True}
    return {"metadata": metadata, "spec": spec}


def _size(job: ElasticJob) -> int:
    """The wanted number of workers; for a job of automatic size, the number that it was given."""
    return job.status.desired if job.sharing.automatic and job.status.share is not None else job.desired


def _workers_to_remove(job: ElasticJob, pods: list[Manifest], names: tuple[str, ...]) -> dict[str, str]:
    """UID -> name of the workers to remove."""
    present = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}
    leaving = {}
    for name in (full_worker_name(job.name, wanted) for wanted in names):
        if name not in present:
            raise NotFoundError(f"{job.name} has no worker {name}. It has {', '.join(sorted(present)) or 'none now'}")
        leaving[present[name]] = name
    return leaving


def _workers(job: ElasticJob, request: ScaleRequest) -> int:
    if request.gpus is not None:
        each = hardware(job).gpus_per_worker
        if each == 0:
            raise UsageError(f"{job.name} runs on CPUs. FIX: give the number of workers with --to N")
        if request.gpus % each:
            raise UsageError(
                f"--gpus {request.gpus}: a worker of {job.name} has {each} GPUs, so it must be a multiple of {each}"
            )
        return request.gpus // each
    if request.to is not None:
        return request.to
    return _size(job) + (request.add or 0) - (request.remove or 0)


def _check_bounds(job: ElasticJob, spec: Any, workers: int) -> None:
    low = spec.get("minReplicas") or 1
    high = spec.get("maxReplicas") or MAX_WORKERS
    if workers < low:
        raise UsageError(f"{plural_are(workers, 'worker')} fewer than the minimum of {job.name}, {low}")
    if workers > high:
        raise UsageError(f"{plural_are(workers, 'worker')} more than the maximum of {job.name}, {high}")


class Awaited(Enum):
    """How waiting for workers ended."""

    RUNNING = "as many workers run"
    ENDED = "the job has ended"
    SUSPENDED = "the job is suspended"
    TIMED_OUT = "the time is over"


def await_workers(
    target: Target, found: Manifest, workers: int, timeout_s: float | None
) -> tuple[Awaited, ElasticJob, int]:
    """Wait until this many workers run, or never will; returns how that ended, the job and how many workers run."""
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    answers = Poller(lambda: target.reread(found), _POLL_EVERY_S, deadline, PATIENCE_S, target.observer)
    for manifest in answers.each():
        job = ElasticJob.from_manifest(manifest)
        status, running = job.status, sum(map(_is_running, job.status.workers))
        if running == status.active == status.desired == workers:
            return Awaited.RUNNING, job, running
        if status.phase.terminal:
            return Awaited.ENDED, job, running
        if job.suspend:
            return Awaited.SUSPENDED, job, running
        if time.monotonic() >= deadline:
            return Awaited.TIMED_OUT, job, running
    raise AssertionError("unreachable")


def _is_running(worker: WorkerStatus) -> bool:
    """True for a worker that runs and is not being removed."""
    return worker.phase == PodPhase.RUNNING and worker.cause is None and not worker.removal
