"""The worker that a command is run in, or a port is forwarded to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.observed.ranks import worker_of_rank
from elasticctl.api.observed.workers import known_workers, runs
from elasticctl.api.text import join_and
from elasticctl.cli.framework import options
from elasticctl.cli.framework.target import Target, full_worker_name
from elasticctl.cli.verbs.inspect.logs import workers_line

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.base import Manifest


@dataclass(frozen=True, slots=True)
class WhichWorker:
    """The selected worker; without either, the one that runs rank 0."""

    worker: Annotated[str, options.worker("The worker, by name or number; by default that of rank 0.")] = ""
    rank: Annotated[int | None, options.count("The worker that runs rank N.", low=0)] = None

    def check(self) -> None:
        """Raise UsageError for contradicting options."""
        if self.worker and self.rank is not None:
            raise UsageError("--worker and --rank cannot be used together. FIX: give one of them")


def find_worker(target: Target, name: str, which: WhichWorker) -> Manifest:
    """The pod of the selected worker, which runs; the job may be named by a prefix.

    Raises NotFoundError for a worker or rank that the job does not have, ConflictError for one that does not run.
    """
    from elasticctl.api.spec import ElasticJob

    which.check()
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
