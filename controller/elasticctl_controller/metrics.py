"""What the controller on Kubernetes counts and measures; docs/operations.md says what to make of it."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elasticctl.codec import Manifest
from elasticctl.status import Phase
from elasticctl_controller.prometheus import Counter, Gauge, Histogram, render

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
