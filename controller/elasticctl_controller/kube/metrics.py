"""What the controller on Kubernetes counts and measures; docs/operations.md says what to make of it."""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.status import Phase
from elasticctl_controller.kube.prometheus import Counter, Gauge, Histogram, render

PASS_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
REPLACED_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 120.0)


class Metrics:
    """All of them; the attributes that are callables are given to the parts that report."""

    def __init__(self) -> None:
        self._passes = Histogram("elasticctl_reconcile_seconds", "Duration of a pass over one job.", PASS_BUCKETS_S)
        self._errors = Counter("elasticctl_reconcile_errors_total", "Passes that did not come to their end.", "kind")
        self._requests = Counter(
            "elasticctl_api_requests_total", "Requests to the API server by HTTP verb and outcome.", "verb", "outcome"
        )
        self._replaced = Histogram(
            "elasticctl_replacement_seconds",
            "Time from noticing that a worker is lost to the creation of its replacement.",
            REPLACED_BUCKETS_S,
        )
        self._gauges: tuple[Gauge, ...] = ()

    def note_pass(self, seconds: float, outcome: str) -> None:
        """A pass has ended: "ok", "conflict" or "error"."""
        self._passes.observe(seconds)
        if outcome != "ok":
            self._errors.add(outcome)

    def note_request(self, verb: str, outcome: str) -> None:
        """The API server has answered, or not."""
        self._requests.add(verb, outcome)

    def note_replaced(self, seconds: float) -> None:
        """A lost worker has been created again."""
        self._replaced.observe(seconds)

    def watch(
        self, jobs: Callable[[], Iterable[Manifest]], depth: Callable[[], int], leads: Callable[[], bool]
    ) -> None:
        """Say where the gauges read: the jobs there are, the keys that wait, whether this replica leads."""
        self._gauges = (
            Gauge("elasticctl_jobs", "Jobs by phase.", "phase", lambda: jobs_by_phase(jobs())),
            Gauge("elasticctl_workers", "Workers wanted and active.", "state", lambda: workers_by_state(jobs())),
            Gauge("elasticctl_workqueue_depth", "Jobs that wait to be looked at.", "", lambda: {"": depth()}),
            Gauge("elasticctl_leader", "Whether this replica leads.", "", lambda: {"": float(leads())}),
        )

    def page(self) -> str:
        """What Prometheus reads."""
        return render((self._passes, self._errors, self._requests, self._replaced, *self._gauges))


def jobs_by_phase(jobs: Iterable[Manifest]) -> Mapping[str, float]:
    """How many jobs are in each phase; phases without any are there with 0."""
    tally = Tally(str(_status(job).get("phase") or Phase.PENDING.value) for job in jobs)
    return {phase.value: float(tally[phase.value]) for phase in Phase}


def workers_by_state(jobs: Iterable[Manifest]) -> Mapping[str, float]:
    """Over the jobs that have not ended: how many workers are wanted, and how many there are."""
    running = [s for s in map(_status, jobs) if s.get("phase") not in [p.value for p in Phase if p.terminal]]
    return {
        "desired": sum(float(status.get("desired") or 0) for status in running),
        "active": sum(float(status.get("active") or 0) for status in running),
    }


def _status(job: Manifest) -> Mapping[str, Any]:
    status = job.get("status")
    return status if isinstance(status, dict) else {}


FORGET_S = 600.0
"""Whoever is not replaced by then has been removed on purpose, or waits for something else than the controller."""
MAX_KEPT = 10_000


class Losses:
    """Losses that wait for their replacement, by `job's uid/pod`; thread-safe. `clock` is monotonic seconds."""

    def __init__(self, on_replaced: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_replaced, self._clock = on_replaced, clock
        self._lock = threading.Lock()
        self._lost_at: dict[str, float] = {}
        self._unwanted: dict[str, float] = {}

    def removing(self, uid: str) -> None:
        """This pod is about to be removed on purpose: its end is no loss."""
        with self._lock:
            self._unwanted[uid] = self._clock()
            self._tidy(self._unwanted)

    def lost(self, key: str, uid: str) -> None:
        """This pod has just been found lost; the first word of it counts."""
        with self._lock:
            if uid not in self._unwanted:
                self._lost_at.setdefault(key, self._clock())
                self._tidy(self._lost_at)

    def settled(self, key: str) -> None:
        """There is nothing to replace any more: another replica has made the pod again."""
        with self._lock:
            self._lost_at.pop(key, None)

    @contextmanager
    def replacing(self, key: str) -> Iterator[None]:
        """A pod of this name is being created: measure it, unless that fails. A watch may tell of it even before."""
        with self._lock:
            at = self._lost_at.pop(key, None)
        try:
            yield
        except BaseException:
            if at is not None:
                with self._lock:
                    self._lost_at[key] = at
            raise
        if at is not None:
            self._on_replaced(self._clock() - at)

    def _tidy(self, times: dict[str, float]) -> None:
        """Forget the oldest: an entry is added behind all others."""
        oldest_kept = self._clock() - FORGET_S
        while times and (len(times) > MAX_KEPT or next(iter(times.values())) < oldest_kept):
            del times[next(iter(times))]
