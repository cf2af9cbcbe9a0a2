"""The ranks of a job: which worker has which, and how its lines begin."""

from __future__ import annotations

from elasticctl.api.errors import NotFoundError
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob


def rank_count(job: ElasticJob) -> int:
    """How many ranks the group has that trains, or trained last."""
    workers = job.status.generations[-1].workers if job.status.generations else ()
    return len(workers) * hardware(job).ranks_per_worker


def worker_of_rank(job: ElasticJob, rank: int) -> str:
    """The worker of a rank of the group that trains, or trained last; NotFoundError where it has no such rank.

    Each worker has the same number of ranks, in the group's order.
    """
    known = rank_count(job)
    if not 0 <= rank < known:
        ranks = f"its ranks are 0 to {known - 1}" if known else "it is not training yet"
        raise NotFoundError(f"{job.name} has no rank {rank}: {ranks}")
    return job.status.generations[-1].workers[rank // hardware(job).ranks_per_worker]


def rank_prefix(job: ElasticJob, rank: int) -> str:
    """How the lines of a rank begin in the log of its worker; empty where it is the only one."""
    return f"[rank{rank}] " if hardware(job).ranks_per_worker > 1 else ""
