"""Every value of the metrics that a job has reported, from its storage, as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticctl.api.errors import JobStorageError
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob

if TYPE_CHECKING:
    from elasticctl_store.storage import Storage

QUIET_S = 600.0
"""A worker whose newest row is so much older than another's speaks for the job no more: its objects are complete."""

Row = dict[str, Any]
"""`step`, `at` (seconds since the epoch) and metrics: numbers, or "NaN", "Infinity" or "-Infinity"."""


class StoredMetrics:
    """The stored metrics of one job. Not for two threads at once."""

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
