"""The allocator: reads all jobs, nodes and quotas, lets `core.sharing` decide, and keeps what each job was given.

It runs in a thread of its own, woken by changes and at the time that the last decision set. It only decides;
`reconcile` carries the decision out, job by job. The decisions are also stored in the jobs' statuses, so a restarted
allocator continues from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from elasticctl.api.codec import Manifest, Timestamp, from_rfc3339, to_rfc3339
from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import ShareStatus
from elasticctl_controller.core.observation import Allotment
from elasticctl_controller.core.sharing.claims import (
    TO_COME,
    Claim,
    Grant,
    LastGrant,
    SharingRules,
    build_claim,
    build_pools,
    build_projects,
    is_shared,
    pool_of,
    undecided_grant,
)
from elasticctl_controller.core.sharing.grant_workers import decide
from elasticctl_controller.core.workers import is_active

GATHER_S = 0.05
"""How long to collect changes before a decision: they come in bursts."""
REST_FACTOR = 4.0
"""After a decision, pause for this many times as long as it took: the controller's loop needs the processor too."""
REWORD_S = 30.0
"""How often the message and the pool size of an unchanged share may change in a job's status.

The message mentions other jobs, and there may be thousands of them; the size of the pool changes with every node.
"""
RETRY_S = 2.0
MAX_SLEEP_S = 60.0
UNDECIDED = "Undecided"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """Whether a cluster is shared, by which rules, and up to how many slots an autoscaler extends each pool."""

    on: bool = False
    rules: SharingRules = SharingRules()
    capacity: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Decided:
    """What was decided about the job `key`; `allotment` None: it takes no shared slots."""

    key: str
    allotment: Allotment | None = None
    worded_at: float = 0.0


class SharedCluster(Protocol):
    """The cluster whose slots are shared. Thread-safe; all methods may raise ElasticctlError."""

    def all_jobs(self) -> Iterable[Manifest]:
        """Return every job."""

    def healthy_nodes(self) -> list[Manifest]:
        """Return the nodes that can run workers, with their labels and allocatable resources."""

    def quotas(self) -> list[Manifest]:
        """Return every ElasticQuota."""


class Allocator:
    """Decides for all jobs of a cluster; `on_change(key)` is called for each job whose allotment changes.

    `restrict` applies the limits of its project to a job.
    """

    def __init__(
        self,
        cluster: SharedCluster,
        settings: Callable[[], SharingSettings],
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        restrict: Callable[[ElasticJob], ElasticJob] = lambda job: job,
    ) -> None:
        self._restrict = restrict
        self._cluster, self._settings, self._on_change, self._clock = cluster, settings, on_change, clock
        self._decided: dict[str, _Decided] = {}
        self._parsed: dict[str, ElasticJob] = {}
        self._lock, self._woken, self._stopping = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="allocator", daemon=True)

    def start(self) -> None:
        """Decide once, then whenever something changes, in a thread."""
        self._woken.set()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """True between `start` and `stop`; False if the thread has died, which is an error."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Decide again soon: a job, a node, a quota or the settings have changed. Thread-safe."""
        self._woken.set()

    def allotment(self, job: ElasticJob) -> Allotment | None:
        """What the job may have; None if sharing does not decide about it.

        A new job has nothing until the first decision; a job that this process has not decided about yet keeps what it
        was given before.
        """
        if not self._settings().on or not is_shared(job):
            return None
        with self._lock:
            found = self._decided.get(job.uid)
        if found is not None:
            return found.allotment
        if job.status.share is not None:
            return Allotment(job.status.share)
        if any(map(is_active, job.status.workers)):
            return None  # it ran before sharing was switched on: it continues until the first decision
        return Allotment(ShareStatus(0, reason=UNDECIDED, message="is about to get its workers"))

    def decide_now(self) -> float | None:
        """Decide about all jobs once; returns when to decide again (seconds since the epoch; None: no need)."""
        settings, now = self._settings(), self._clock()
        jobs = self._jobs() if settings.on else []
        decided, wake_at = self._decide(jobs, settings, now) if jobs else ({}, None)
        with self._lock:
            before, self._decided = self._decided, decided
        for uid, one in (before | decided).items():
            after = decided.get(uid)
            if uid not in before or after is None or before[uid].allotment != after.allotment:
                self._on_change(one.key)
        return wake_at

    def _jobs(self) -> list[ElasticJob]:
        """All jobs; unchanged ones are not parsed again, as there may be thousands."""
        jobs = []
        for manifest in self._cluster.all_jobs():
            metadata = manifest["metadata"]
            job = self._parsed.get(metadata.get("uid", ""))
            if job is None or not job.resource_version or job.resource_version != metadata.get("resourceVersion"):
                job = ElasticJob.from_manifest(manifest)
            jobs.append(job)
        self._parsed = {job.uid: job for job in jobs}
        return list(map(self._restrict, jobs))

    def _decide(
        self, jobs: list[ElasticJob], settings: SharingSettings, now: float
    ) -> tuple[dict[str, _Decided], float | None]:
        shared = {job.key: job for job in jobs if is_shared(job)}
        others = [job for job in jobs if job.key not in shared]
        pools = build_pools(self._cluster.healthy_nodes(), shared.values(), others, settings.capacity)
        sizes = {pool.name: pool.slots for pool in pools}
        claims = {
            key: build_claim(job, pool, self._last(job)) for key, job in shared.items() if (pool := pool_of(job, sizes))
        }
        decision = decide(pools, build_projects(self._cluster.quotas()), tuple(claims.values()), now, settings.rules)
        now = from_rfc3339(to_rfc3339(now)) or now  # as it will be read back: otherwise every share would seem changed
        decided = {job.uid: _Decided(key) for key, job in shared.items()}
        for key, grant in decision.grants.items():
            # Not for waiting jobs: there may be many, and each change would be a status to write.
            size = sizes.get(claims[key].pool, 0) if grant.workers else 0
            decided[shared[key].uid] = self._build_decided(shared[key], claims[key], grant, size, now)
        return decided, decision.wake_at

    def _share(self, job: ElasticJob) -> ShareStatus | None:
        """What the job was given last, by this process or the one before."""
        found = self._decided.get(job.uid)
        return found.allotment.share if found is not None and found.allotment is not None else job.status.share

    def _last(self, job: ElasticJob) -> LastGrant:
        share = self._share(job)
        return undecided_grant(job) if share is None else LastGrant(share.workers, share.since or 0.0)

    def _build_decided(self, job: ElasticJob, claim: Claim, grant: Grant, pool_slots: int, now: float) -> _Decided:
        known, last = self._decided.get(job.uid), self._share(job)
        share = ShareStatus(
            workers=grant.workers,
            borrowed=grant.borrowed,
            pool=claim.pool,
            slots_per_worker=claim.slots_per_worker,
            pool_slots=pool_slots,
            reason=grant.reason.value,
            message=grant.words,
            change=grant.change,
            since=Timestamp(now),
        )
        if last is not None and last.workers == share.workers:
            share = replace(share, since=last.since, change=last.change)
        worded_at = now
        if known is not None and last is not None and now < known.worded_at + REWORD_S:
            reworded = replace(share, message=last.message, pool_slots=last.pool_slots)
            if reworded == last:
                share, worded_at = reworded, known.worded_at
        leave = frozenset(grant.leave)
        relocated = len(leave) > max(0, len(claim.workers) - grant.workers)  # beyond the surplus
        nodes = tuple("" if node == TO_COME else node for node in grant.nodes)
        return _Decided(job.key, Allotment(share, leave, leave if relocated else frozenset(), nodes), worded_at)

    def _run(self) -> None:
        wake_at: float | None = None
        took_s = 0.0
        while not self._stopping.is_set():
            pause_s = MAX_SLEEP_S if wake_at is None else min(MAX_SLEEP_S, max(0.0, wake_at - self._clock()))
            self._woken.wait(pause_s)
            self._stopping.wait(max(GATHER_S, took_s * REST_FACTOR))
            self._woken.clear()
            began = time.monotonic()
            try:
                wake_at = None if self._stopping.is_set() else self.decide_now()
            except ElasticctlError as e:
                log.warning("sharing: %s; retrying", e)
                wake_at = self._clock() + RETRY_S
            except Exception:  # the edge of the thread: log, back off, retry
                log.exception("sharing: the decision failed; retrying")
                wake_at = self._clock() + RETRY_S
            took_s = time.monotonic() - began
