"""What jobs have seen of the machines that they ask for; a new job of the same namespace starts with that.

It is how often pools came and went, and what starts and other changes cost. It is kept in memory: after a restart of
the controller, it comes back with the first pass over each job that has seen something.
"""

from __future__ import annotations

from dataclasses import replace

from elasticctl.api.goal import PoolStatus
from elasticctl.api.podtemplate import hardware, node_labels
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.observation import SeenPools

MOST_KINDS = 1024
"""The most kinds of machines, over all namespaces; beyond that, those that were reported longest ago are forgotten."""
_Kind = tuple[str, tuple[tuple[str, tuple[str, ...]], ...], int]


class PoolEvidence:
    """The newest evidence about each pool, by namespace and kind of machine. Thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[_Kind, dict[str, PoolStatus]] = {}
        self._costs: dict[_Kind, tuple[float, ...]] = {}

    def record(self, job: ElasticJob, status: JobStatus) -> None:
        """Record what a job has seen, if that is newer than what is known."""
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

    def of(self, job: ElasticJob) -> SeenPools:
        """What similar jobs have seen: how often pools came and went, but not what they have now; and what changes have
        cost the one that reported last."""
        if job.goal is None:
            return SeenPools()
        kind = _kind_of(job)
        pools = (pool for name, pool in self._seen.get(kind, {}).items() if name in job.goal.spot_pools)
        return SeenPools(
            tuple(replace(pool, up=True, age_hours=0.0, short=0, short_since=None) for pool in pools),
            self._costs.get(kind, ()),
        )


def _at(known: dict[str, PoolStatus], name: str) -> float:
    return known[name].at or 0.0 if name in known else 0.0


def _kind_of(job: ElasticJob) -> _Kind:
    """The kind of machine that a job asks for. Its zones are not part of that: each pool has its own."""
    return job.namespace, tuple(sorted(node_labels(job.template).items())), hardware(job).gpus_per_worker
