"""The metrics of runs: read from their storages as they come, and shown in part."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from elasticctl.api.errors import JobStorageError, UsageError
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.operations.curves import RATE, SAMPLES, STEP, TIME, Curves, curves_of_status

if TYPE_CHECKING:
    from elasticctl_store.storage import Storage

READ_EVERY_S = 2.0
AGAIN_AFTER_S = 60.0
"""When a storage that could not be read is tried again."""
SETTLED_S = 60.0
"""This long after its end, a job writes nothing more."""
MAX_RUNS = 32
POINTS, MAX_POINTS = 600, 4000
MAX_CHOSEN = 24
MAX_COMMAND = 500
QUIET_S = 600.0
"""A worker whose newest row is this much older than that of another has stopped reporting: its objects are complete."""

Row = dict[str, Any]
"""`step`, `at` (seconds since the epoch) and metrics: numbers, or "NaN", "Infinity" or "-Infinity"."""


class StoredMetrics:
    """The stored metrics of one job. Not thread-safe."""

    def __init__(self, job: ElasticJob) -> None:
        found = hardware(job)
        self._job_uid, self._url = job.uid, found.storage if found.launched else ""
        self._storage: Storage | None = None
        self._rows_read: dict[str, int] = {}
        self._newest: dict[str, float] = {}
        self._complete: set[str] = set()

    def read_new(self) -> list[Row]:
        """The rows that have come since the last call, in order of time. Raises JobStorageError."""
        if not self._url or not self._job_uid:
            return []
        from elasticctl.cluster.job_storages import open_storage_here
        from elasticctl_store import stored_metrics
        from elasticctl_store.errors import TrainError

        try:
            if self._storage is None:
                self._storage = open_storage_here(self._url)
            folders: dict[str, list[str]] = {}
            for folder, key in stored_metrics.keys_of(self._storage, self._job_uid):
                folders.setdefault(folder, []).append(key)
            rows = [row for folder, keys in folders.items() for row in self._read(self._storage, folder, keys)]
        except TrainError as e:
            raise JobStorageError(str(e)) from e
        return sorted(rows, key=lambda row: float(row["at"]))

    def _read(self, storage: Storage, folder: str, keys: list[str]) -> list[Row]:
        """New rows of one life of a worker: of its last object, which grows, and of those that were not read yet."""
        from elasticctl_store import stored_metrics
        from elasticctl_store.errors import MissingError

        if folder in self._newest and self._newest[folder] < max(self._newest.values()) - QUIET_S:
            return []
        new: list[Row] = []
        for key in keys:
            if key in self._complete:
                continue
            try:
                rows = stored_metrics.decode(storage.get(key))
            except MissingError:
                continue  # deleted since it was listed
            new += rows[self._rows_read.get(key, 0) :]
            self._rows_read[key] = len(rows)
            if key != keys[-1]:
                self._complete.add(key)
        if new:
            self._newest[folder] = float(new[-1]["at"])
        return new


@dataclass(frozen=True, slots=True)
class View:
    """The visible part: metrics over STEP, TIME or SAMPLES from `low` to `high`, in about this many points."""

    names: tuple[str, ...]
    over: str = TIME
    low: float = -math.inf
    high: float = math.inf
    points: int = POINTS

    @classmethod
    def parse(cls, query: Mapping[str, str], names: Sequence[str]) -> View:
        """Parse the query of a URL. Raises UsageError."""
        over = query.get("x", TIME)
        try:
            low, high = float(query.get("from", "-inf")), float(query.get("to", "inf"))
            points = int(query.get("points", POINTS))
        except ValueError as e:
            raise UsageError(f"not a part of a curve: {e}") from e
        if over not in (STEP, TIME, SAMPLES) or not low <= high or not 1 <= points <= MAX_POINTS:
            raise UsageError("not a part of a curve")
        return cls(tuple(names[:MAX_CHOSEN]), over, low, high, points)


Results = Mapping[str, Mapping[str, Any]]
"""By metric: `last`, `min` and `max`, None where there is no finite value, and `lost`: ("NaN", since step) or None."""


class Source(Protocol):
    """A source of rows, in chronological order."""

    def read_new(self) -> list[Row]:
        """The new rows. Raises JobStorageError."""


@dataclass(slots=True)
class _Run:
    source: Source
    curves: Curves = field(default_factory=Curves)
    lock: threading.Lock = field(default_factory=threading.Lock)
    due_at: float = 0.0
    trouble: str = ""


class RunMetrics:
    """The metrics of some runs; thread-safe."""

    def __init__(self, open_source: Callable[[ElasticJob], Source] = StoredMetrics) -> None:
        self._open = open_source
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, job: ElasticJob, view: View) -> dict[str, Any]:
        """The visible curves, and the names of all; blocks while the storage is read."""
        run, reported = self._run(job), curves_of_status(job.status)
        with run.lock:
            self._read(run, job)
            names = list(dict.fromkeys([*run.curves.names, *reported.names]))
            series = (_seen(name, run.curves if name in run.curves.names else reported, view) for name in view.names)
            return {
                "names": names,
                "series": {
                    name: {**seen, **_lost_now(name, job)}
                    for name, seen in zip(view.names, series, strict=True)
                    if seen is not None
                },
                "stored": bool(run.curves.names),
                "samples": run.curves.has_samples,
                "trouble": run.trouble,
                "command": " ".join(hardware(job).command)[:MAX_COMMAND],
            }

    def results(self, job: ElasticJob) -> tuple[Results, str]:
        """A summary of a run's metrics: of all that is stored, or else of its status, with the reason."""
        run = self._run(job)
        with run.lock:
            self._read(run, job)
            reported = run.curves if run.curves.names else curves_of_status(job.status)
            found: dict[str, dict[str, Any]] = {}
            for name in reported.names:
                series = reported.series(name, STEP)
                if series is not None and name != RATE:
                    summary = series.summary()
                    found[name] = {**{key: summary[key] for key in ("last", "min", "max")}, "lost": summary["lostNow"]}
            return found, run.trouble

    def table(self, job: ElasticJob) -> Iterable[str]:
        """All stored metrics as lines of CSV, or those in the status of a run without a storage."""
        run = self._run(job)
        with run.lock:
            self._read(run, job)
            curves = run.curves if run.curves.names else curves_of_status(job.status)
            return list(curves.table())

    def _run(self, job: ElasticJob) -> _Run:
        with self._lock:
            run = self._runs.setdefault(job.uid, _Run(self._open(job)))
            self._runs.move_to_end(job.uid)
            while len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)
            return run

    def _read(self, run: _Run, job: ElasticJob) -> None:
        now = time.monotonic()
        if now < run.due_at:
            return
        ended = job.status.completion_time
        settled = job.status.phase.terminal and ended is not None and time.time() - ended > SETTLED_S
        try:
            run.curves.add(run.source.read_new())
            run.trouble = ""
            run.due_at = math.inf if settled else time.monotonic() + READ_EVERY_S
        except JobStorageError as e:
            run.trouble = str(e)[:MAX_COMMAND]
            run.due_at = time.monotonic() + AGAIN_AFTER_S


def _seen(name: str, curves: Curves, view: View) -> dict[str, Any] | None:
    seen, by_step = curves.picture(name, view.over, view.low, view.high, view.points), curves.series(name, STEP)
    return None if seen is None or by_step is None else {**seen, **by_step.summary()}


def _lost_now(name: str, job: ElasticJob) -> dict[str, Any]:
    """The job's own status of metrics that are not finite, which is more exact than a curve of few points."""
    lost = job.status.progress.not_finite.get(name)
    return {} if lost is None else {"lostNow": (lost.step, lost.value)}
