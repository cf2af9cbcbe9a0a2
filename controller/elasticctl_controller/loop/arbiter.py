"""The arbiter: sees all jobs, nodes and quotas, has `sharing` decide, and remembers what each job was given.

A thread of its own, woken by changes and when the last decision said to look again. It only decides; `reconcile`
carries it out job by job. What it remembers is in the jobs' statuses too, so that a restarted one goes on from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from elasticctl.api.codec import Manifest, Timestamp, from_rfc3339, to_rfc3339
from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import ShareStatus
from elasticctl_controller.core.actions import Allotment
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
from elasticctl_controller.core.sharing.decide import decide
from elasticctl_controller.core.workers import is_active

GATHER_S = 0.05
"""How long changes may gather before a decision: they come in crowds."""
REST_FACTOR = 4.0
"""A decision that takes long is not made again before so many times as long: the loops need the processor too."""
REWORD_S = 30.0
"""The words of a share that stays as it is change no more often: they name others, of whom there may be thousands.

So does the size of its pool, which changes with every node.
"""
RETRY_S = 2.0
LONGEST_SLEEP_S = 60.0
UNDECIDED = "Undecided"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """How a place shares: whether at all, by which rules, and up to how many slots of a pool nodes will come."""

    on: bool = False
    rules: SharingRules = SharingRules()
    capacity: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Decided:
    """What was decided about the job `key`; None: it takes nothing of what is shared."""

    key: str
    allotment: Allotment | None = None
    worded_at: float = 0.0


class SharedCluster(Protocol):
    """The place whose slots are shared; thread-safe, and all methods may raise ElasticctlError."""

    def all_jobs(self) -> list[Manifest]:
        """Return every job."""

    def healthy_nodes(self) -> list[Manifest]:
        """Return the nodes that workers can be on: labels, and what is allocatable there."""

    def quotas(self) -> list[Manifest]:
        """Return every ElasticQuota."""


class Arbiter:
    """Decides for all jobs of one `Floor`; `on_change(key)` hears of each job that is given something else."""

    def __init__(
        self,
        floor: SharedCluster,
        terms: Callable[[], SharingSettings],
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._floor, self._terms, self._on_change, self._clock = floor, terms, on_change, clock
        self._verdicts: dict[str, _Decided] = {}
        self._read: dict[str, ElasticJob] = {}
        self._lock, self._news, self._stopping = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="arbiter", daemon=True)

    def start(self) -> None:
        """Decide once, then whenever something changes, in a thread."""
        self._news.set()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._news.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """True from `start` to `stop`, unless the thread has died, which is an error."""
        return self._thread.is_alive()

    def changed(self) -> None:
        """A job, a node, a quota or the terms have changed; from any thread."""
        self._news.set()

    def allotment(self, job: ElasticJob) -> Allotment | None:
        """What the job may have; None where it is not ours to say.

        A job that is new has nothing until it has been decided about; one that this process has not met yet keeps what
        it was given before.
        """
        if not self._terms().on or not is_shared(job):
            return None
        with self._lock:
            found = self._verdicts.get(job.uid)
        if found is not None:
            return found.allotment
        if job.status.share is not None:
            return Allotment(job.status.share)
        if any(map(is_active, job.status.workers)):
            return None  # it ran before sharing was switched on: it goes on until something is decided
        return Allotment(ShareStatus(0, reason=UNDECIDED, message="is about to be given its workers"))

    def decide_now(self) -> float | None:
        """Decide about all jobs once; returns when to look again (seconds since the epoch), None: no need."""
        terms, now = self._terms(), self._clock()
        jobs = self._jobs() if terms.on else []
        verdicts, wake_at = self._decided(jobs, terms, now) if jobs else ({}, None)
        with self._lock:
            before, self._verdicts = self._verdicts, verdicts
        for uid, verdict in (before | verdicts).items():
            after = verdicts.get(uid)
            if uid not in before or after is None or before[uid].allotment != after.allotment:
                self._on_change(verdict.key)
        return wake_at

    def _jobs(self) -> list[ElasticJob]:
        """All jobs; those that have not changed since are not read again: there may be thousands."""
        jobs = []
        for manifest in self._floor.all_jobs():
            metadata = manifest["metadata"]
            job = self._read.get(metadata.get("uid", ""))
            if job is None or not job.resource_version or job.resource_version != metadata.get("resourceVersion"):
                job = ElasticJob.from_manifest(manifest)
            jobs.append(job)
        self._read = {job.uid: job for job in jobs}
        return jobs

    def _decided(
        self, jobs: list[ElasticJob], terms: SharingSettings, now: float
    ) -> tuple[dict[str, _Decided], float | None]:
        shared = {job.key: job for job in jobs if is_shared(job)}
        others = [job for job in jobs if job.key not in shared]
        pools = build_pools(self._floor.healthy_nodes(), shared.values(), others, terms.capacity)
        sizes = {pool.name: pool.slots for pool in pools}
        claims = {
            key: build_claim(job, pool, self._last(job)) for key, job in shared.items() if (pool := pool_of(job, sizes))
        }
        decision = decide(pools, build_projects(self._floor.quotas()), tuple(claims.values()), now, terms.rules)
        now = from_rfc3339(to_rfc3339(now)) or now  # as it will be read back, lest a share be written again for ever
        verdicts = {job.uid: _Decided(key) for key, job in shared.items()}
        for key, grant in decision.grants.items():
            # Those who wait are not told: they may be many, and each time it would be a status to write.
            size = sizes.get(claims[key].pool, 0) if grant.workers else 0
            verdicts[shared[key].uid] = self._verdict(shared[key], claims[key], grant, size, now)
        return verdicts, decision.wake_at

    def _share(self, job: ElasticJob) -> ShareStatus | None:
        """What the job was given last, by this process or by the one before."""
        found = self._verdicts.get(job.uid)
        return found.allotment.share if found is not None and found.allotment is not None else job.status.share

    def _last(self, job: ElasticJob) -> LastGrant:
        share = self._share(job)
        return undecided_grant(job) if share is None else LastGrant(share.workers, share.since or 0.0)

    def _verdict(self, job: ElasticJob, claim: Claim, grant: Grant, pool_slots: int, now: float) -> _Decided:
        known, last = self._verdicts.get(job.uid), self._share(job)
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
        moved = len(leave) > max(0, len(claim.workers) - grant.workers)  # more go than are too many
        nodes = tuple("" if node == TO_COME else node for node in grant.nodes)
        return _Decided(job.key, Allotment(share, leave, leave if moved else frozenset(), nodes), worded_at)

    def _run(self) -> None:
        wake_at: float | None = None
        took_s = 0.0
        while not self._stopping.is_set():
            pause_s = LONGEST_SLEEP_S if wake_at is None else min(LONGEST_SLEEP_S, max(0.0, wake_at - self._clock()))
            self._news.wait(pause_s)
            self._stopping.wait(max(GATHER_S, took_s * REST_FACTOR))
            self._news.clear()
            began = time.monotonic()
            try:
                wake_at = None if self._stopping.is_set() else self.decide_now()
            except ElasticctlError as e:
                log.warning("sharing: %s; trying again", e)
                wake_at = self._clock() + RETRY_S
            except Exception:  # the edge of the thread: log, back off, look again
                log.exception("sharing: deciding failed; trying again")
                wake_at = self._clock() + RETRY_S
            took_s = time.monotonic() - began
