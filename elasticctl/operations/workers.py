"""The workers of a job: find one that runs, and remove one as a cloud would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.observed.workers import known_workers, runs, worker_of_rank
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import join_and
from elasticctl.cluster.base import Manifest
from elasticctl.operations.logs import workers_line
from elasticctl.operations.option_values import whole
from elasticctl.operations.target import Target, full_worker_name


@dataclass(frozen=True, slots=True)
class WhichWorker:
    """A worker by its name or number, or by a rank that it runs; at most one of them."""

    worker: str = ""
    rank: Annotated[int | None, whole(0)] = None

    def __post_init__(self) -> None:
        if self.worker and self.rank is not None:
            raise UsageError("--worker and --rank cannot be used together. FIX: give one of them")


def find_worker(target: Target, name: str, which: WhichWorker) -> Manifest:
    """The pod of the selected worker, which runs; by default that of rank 0. The job may be named by a prefix.

    Raises NotFoundError for a worker or rank that the job does not have, ConflictError for one that does not run.
    """
    job = ElasticJob.from_manifest(target.find(name))
    return choose_running(job, running_workers(target, job), which)


def running_workers(target: Target, job: ElasticJob) -> list[Manifest]:
    """The pods of the workers that run, in order of index. Raises ConflictError if there are none."""
    phase = job.status.phase
    if phase.terminal:
        raise ConflictError(f"{job.name} has ended ({phase.value}). Next: see its output: elasticctl logs {job.name}")
    running = [pod for pod in target.cluster.pods_of([job])[job.uid] if runs(pod)]
    if not running:
        raise ConflictError(
            f"no worker of {job.name} is running ({phase.value}). Next: see why: elasticctl explain {job.name}"
        )
    return running


def choose_running(job: ElasticJob, running: list[Manifest], which: WhichWorker) -> Manifest:
    """Choose the selected worker among those that run; raises what `find_worker` raises. Pure."""
    pods = {str(pod["metadata"]["name"]): pod for pod in running}
    if which.worker:
        name = full_worker_name(job.name, which.worker)
        if name not in pods and name not in known_workers(job):
            raise NotFoundError(f"{job.name} has no worker {name}: {workers_line(job)}")
    elif which.rank is not None:
        name = worker_of_rank(job, which.rank)
    else:
        groups = job.status.generations
        name = next((member for member in (groups[-1].workers if groups else ()) if member in pods), next(iter(pods)))
    if name not in pods:
        raise ConflictError(f"{name} is not running. Running: {join_and(pods)}")
    return pods[name]


def preempt(target: Target, found: Manifest, which: WhichWorker, notice_s: float) -> str:
    """Remove a worker in the way that a cloud reclaims a spot machine; returns its name.

    Raises what `choose_to_preempt` raises.
    """
    job = ElasticJob.from_manifest(found)
    name = choose_to_preempt(job, target.cluster.pods_of([job])[job.uid], which)
    target.cluster.evict_pod(target.namespace, name, grace_s=notice_s)
    return name


def choose_to_preempt(job: ElasticJob, pods: list[Manifest], which: WhichWorker) -> str:
    """The selected worker, or else the last one that runs. Pure.

    Raises ConflictError if no worker runs, NotFoundError for a worker or a rank that does not exist.
    """
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}) and has no workers to lose")
    running: list[str] = [pod["metadata"]["name"] for pod in pods if runs(pod)]
    if not running:
        raise ConflictError(f"no worker of {job.name} is running. FIX: see why with `elasticctl status {job.name}`")
    name = running[-1]
    if which.worker:
        name = full_worker_name(job.name, which.worker)
    elif which.rank is not None:
        name = worker_of_rank(job, which.rank)
    if name not in running:
        raise NotFoundError(f"{name} is not running. These workers of {job.name} are: {', '.join(running)}")
    return name
