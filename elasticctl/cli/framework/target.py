"""From `--context`, `--namespace` and a job's name, perhaps shortened, to a cluster and a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticctl.api.errors import NotFoundError, UsageError
from elasticctl.api.text import did_you_mean, shown
from elasticctl.cli.framework.options import Where
from elasticctl.cluster import connect
from elasticctl.cluster.base import Cluster, Manifest
from elasticctl.settings import contexts as config
from elasticctl.settings.contexts import Config, Context

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob


@dataclass(frozen=True, slots=True)
class Target:
    """The place itself."""

    context: Context
    namespace: str
    cluster: Cluster

    def find(self, name: str) -> Manifest:
        """The job called `name`, or the only one whose name begins so; NotFoundError otherwise."""
        try:
            return self.cluster.get_job(self.namespace, name)
        except NotFoundError:
            names = [job["metadata"]["name"] for job in self.cluster.list_jobs(self.namespace)]
        fitting = [known for known in names if known.startswith(name)]
        if len(fitting) == 1:
            return self.cluster.get_job(self.namespace, fitting[0])
        place = f"in context {self.context.name}, namespace {self.namespace}"
        if fitting:
            raise NotFoundError(f"{shown(name)} is the beginning of several jobs {place}: {', '.join(fitting)}")
        raise NotFoundError(f"no job {shown(name)} {place}{did_you_mean(name, names)}; `elasticctl list` shows all")


def contexts_file() -> Path:
    """The contexts file of this user."""
    return config.config_folder() / "config.yaml"


def templates_folder() -> Path:
    """Where this user's own job templates are."""
    return config.config_folder() / "templates"


def contexts() -> Config:
    """The contexts of this user."""
    return config.load_config(contexts_file())


def locate(where: Where) -> tuple[Context, str]:
    """The context and the namespace that `where` means."""
    context = contexts().context(where.context)
    return context, config.check_namespace(where.namespace or context.namespace)


def reach(where: Where) -> Target:
    """The cluster that `where` means; does not talk to it yet."""
    context, namespace = locate(where)
    return Target(context, namespace, connect(context))


def full_worker_name(job: str, wanted: str) -> str:
    """`job-worker-2` for itself, `worker-2` or `2`; UsageError for anything that no worker could be called."""
    from elasticctl.api.spec import worker_name  # not for --help and completion

    index = wanted.removeprefix(f"{job}-").removeprefix("worker-")
    if not (index.isascii() and index.isdigit()):
        raise UsageError(f"{shown(wanted)} names no worker; they are called {worker_name(job, 0)} (or 0) and so on")
    return worker_name(job, int(index))


def worker_of_rank(job: ElasticJob, rank: int) -> str:
    """The worker of a rank of the group that trains, or trained last; NotFoundError where it has no such rank.

    Each worker has the same number of ranks, in the group's order.
    """
    from elasticctl.api.podtemplate import hardware

    workers = job.status.generations[-1].workers if job.status.generations else ()
    each = hardware(job).ranks_per_worker
    if rank >= len(workers) * each:
        ranks = f"its ranks are 0 to {len(workers) * each - 1}" if workers else "it does not train yet"
        raise NotFoundError(f"{job.name} has no rank {rank}: {ranks}")
    return workers[rank // each]


def job_names(where: Where) -> list[tuple[str, str]]:
    """Names and phases of the jobs there are, for completion: starts no local cluster."""
    target = reach(where)
    if target.context.provider == config.LOCAL:
        from elasticctl.cluster.local.paths import local_paths
        from elasticctl.cluster.local.supervisor import supervisor_info

        if supervisor_info(local_paths()) is None:
            return []
    jobs = target.cluster.list_jobs(target.namespace)
    return [(job["metadata"]["name"], job.get("status", {}).get("phase", "")) for job in jobs]
