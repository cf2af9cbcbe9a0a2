"""What jobs have seen of the machines that they ask for: a new job of their namespace begins with it.

That is how often pools came and went, and what starts and other changes cost.

Kept in memory: after a restart of the controller it is there again with the first pass over each job that has seen any.
"""

from __future__ import annotations

from dataclasses import replace

from elasticctl.api.goal import PoolStatus
from elasticctl.api.podtemplate import hardware, node_labels
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus

MOST_KINDS = 1024
"""Of machines, over all namespaces; of more the ones that were told of longest ago are forgotten."""
_Kind = tuple[str, tuple[tuple[str, tuple[str, ...]], ...], int]


class PoolEvidence:
    """The newest evidence about each pool, by namespace and kind of machine. Thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[_Kind, dict[str, PoolStatus]] = {}
        self._costs: dict[_Kind, tuple[float, ...]] = {}

    def note(self, job: ElasticJob, status: JobStatus) -> None:
        """Take what a job has seen, if that is newer than what is known."""
        if job.goal is None or status.plan is None or not status.plan.pools:
            return
        kind = _kind_of(job)
        known = self._seen.pop(kind, {})
        newer = {pool.name: pool for pool in status.plan.pools if (pool.at or 0.0) >= (_at(known, pool.name))}
        self._seen[kind] = {**known, **newer}
        if newer and status.plan.measured:
            self._costs[kind] = status.plan.costs
        for oldest in list(self._seen)[: max(0, len(self._seen) - MOST_KINDS)]:
            self._seen.pop(oldest, None)
            self._costs.pop(oldest, None)

    def of(self, job: ElasticJob) -> tuple[PoolStatus, ...]:
        """What jobs like this one have seen: how often pools came and went, not what they have now."""
        if job.goal is None:
            return ()
        known = self._seen.get(_kind_of(job), {})
        return tuple(
            replace(pool, up=True, age_hours=0.0, short=0, short_since=None)
            for name, pool in known.items()
            if name in job.goal.spot_pools
        )

    def costs(self, job: ElasticJob) -> tuple[float, ...]:
        """What changes cost the job like this one that was heard of last, as its plan keeps it; () if none was."""
        return () if job.goal is None else self._costs.get(_kind_of(job), ())


def _at(known: dict[str, PoolStatus], name: str) -> float:
    return known[name].at or 0.0 if name in known else 0.0


def _kind_of(job: ElasticJob) -> _Kind:
    """Machines of one zone are told apart by their pool; what else a job asks for makes other machines of them."""
    return job.namespace, tuple(sorted(node_labels(job.template).items())), hardware(job).gpus_per_worker
