"""The ranks of a job: which worker runs which, and the prefix of its lines in a log."""

from __future__ import annotations

from elasticctl.api.errors import NotFoundError
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob


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
