"""The controller's Prometheus metrics; docs/operations.md says how to read them and what to alert on."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from elasticctl.api.codec import Manifest
from elasticctl.api.observed.history import redone_after
from elasticctl.api.status import JobStatus, Phase

CONTENT_TYPE = CONTENT_TYPE_LATEST

PASS_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
REPLACEMENT_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 120.0)
RECOVERY_BUCKETS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

REST_FACTOR = 4.0
"""For how many times as long as it took to render a page is served: rendering counts all jobs, on the thread that
serves workers."""


class ControllerMetrics:
    """Every metric of one controller, in a registry of its own; thread-safe. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._page, self._fresh_until = clock, b"", float("-inf")
        # A `_created` series for each counter would double what every scrape stores.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._passes = Histogram(
            "elasticctl_reconcile_seconds",
            "Duration of a pass over one job.",
            buckets=PASS_BUCKETS_S,
            registry=self._registry,
        )
        self._errors = Counter(
            "elasticctl_reconcile_errors_total", "Passes that failed.", ["kind"], registry=self._registry
        )
        self._requests = Counter(
            "elasticctl_api_requests_total",
            "Requests to the API server by HTTP verb and outcome.",
            ["verb", "outcome"],
            registry=self._registry,
        )
        self._replacements = Histogram(
            "elasticctl_replacement_seconds",
            "Time from noticing that a worker is lost to the creation of its replacement.",
            buckets=REPLACEMENT_BUCKETS_S,
            registry=self._registry,
        )
        self._losses = Counter(
            "elasticctl_worker_losses_total", "Workers that were lost, by cause.", ["cause"], registry=self._registry
        )
        self._recoveries = Histogram(
            "elasticctl_recovery_seconds",
            "Time from the loss of a worker to the next step of its group.",
            buckets=RECOVERY_BUCKETS_S,
            registry=self._registry,
        )
        self._redone = Counter(
            "elasticctl_steps_redone_total",
            "Optimizer steps that had to be done again.",
            registry=self._registry,
        )

    def observe_pass(self, seconds: float, outcome: str) -> None:
        """Record a pass over one job; `outcome` is "ok", "conflict" or "error"."""
        self._passes.observe(seconds)
        if outcome != "ok":
            self._errors.labels(outcome).inc()

    def count_request(self, verb: str, outcome: str) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb, outcome).inc()

    def observe_replacement(self, seconds: float) -> None:
        """Record how long a lost worker took to be replaced."""
        self._replacements.observe(seconds)

    def observe_status(self, before: JobStatus, after: JobStatus) -> None:
        """Count what is new in a job's status: losses, and what it cost to recover from earlier ones."""
        fresh = sum(after.restarts.values()) - sum(before.restarts.values())  # a cause that is corrected is no new loss
        for cause, number in after.restarts.items():
            if (more := min(number - before.restarts.get(cause, 0), fresh)) > 0:
                self._losses.labels(cause).inc(more)
                fresh -= more
        known = {(item.uid, item.at) for item in before.interruptions if item.recovery_s is not None}
        recovered = [i for i in after.interruptions if i.recovery_s is not None and (i.uid, i.at) not in known]
        for item in recovered:
            self._recoveries.observe(item.recovery_s or 0.0)
        self._redone.inc(redone_after(recovered) or 0)

    def register_gauges(
        self, jobs: Callable[[], Iterable[Manifest]], depth: Callable[[], int], leads: Callable[[], bool]
    ) -> None:
        """Add the gauges, which call these at each scrape: the jobs, the length of the queue, and whether we lead."""
        self._registry.register(_Gauges(jobs, depth, leads))

    def render(self) -> bytes:
        """Return the page that Prometheus scrapes; its content type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def render_at_rest(self) -> bytes:
        """The same, or the last page for `REST_FACTOR` times as long as it took: anyone may request it."""
        began = self._clock()
        if began >= self._fresh_until:
            self._page = self.render()
            now = self._clock()
            self._fresh_until = now + REST_FACTOR * (now - began)
        return self._page


@dataclass(frozen=True, slots=True)
class _Gauges(Collector):
    """Gauges whose values are computed at each scrape."""

    jobs: Callable[[], Iterable[Manifest]]
    depth: Callable[[], int]
    leads: Callable[[], bool]

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: registering must not read the jobs."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield each gauge with its current values."""
        jobs = list(self.jobs())
        yield _labelled_gauge("elasticctl_jobs", "Jobs by phase.", "phase", jobs_by_phase(jobs))
        yield _labelled_gauge(
            "elasticctl_workers",
            "Workers wanted, and how many of them have a pod (active), have a node (placed), and train.",
            "state",
            workers_by_state(jobs),
        )
        yield GaugeMetricFamily("elasticctl_workqueue_depth", "Jobs that wait for a pass.", value=self.depth())
        yield GaugeMetricFamily("elasticctl_leader", "Whether this replica leads.", value=float(self.leads()))


def _labelled_gauge(name: str, help_: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, help_, labels=[label])
    for value, number in values.items():
        gauge.add_metric([value], number)
    return gauge


def jobs_by_phase(jobs: Iterable[Manifest]) -> Mapping[str, float]:
    """Return the number of jobs in each phase, 0 for a phase without any."""
    tally = Tally(str(_status(job).get("phase") or Phase.PENDING.value) for job in jobs)
    return {phase.value: float(tally[phase.value]) for phase in Phase}


def workers_by_state(jobs: Iterable[Manifest]) -> Mapping[str, float]:
    """Return how many workers are wanted, and how many of them are in each state, over the jobs that have not ended."""
    running = [s for s in map(_status, jobs) if s.get("phase") not in [p.value for p in Phase if p.terminal]]
    states = ("desired", "active", "placed", "starting", "training")
    return {state: sum(_number(status.get(state)) for status in running) for state in states}


def _number(value: object) -> float:
    """A number of a status, in which anything may have been written."""
    return float(value) if isinstance(value, int) and abs(value) < 1 << 53 else 0.0


def _status(job: Manifest) -> Mapping[str, Any]:
    status = job.get("status")
    return status if isinstance(status, dict) else {}
