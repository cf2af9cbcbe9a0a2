"""The local cluster's objects on disk, as Kubernetes has an API server and etcd.

A write that has returned survives a killed process; a write that fails changes nothing. Every change gets the next
number of one counter (`resourceVersion`). Thread-safe; listeners are called after the commit, on the thread that wrote.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.spec import LABEL_JOB
from elasticctl.cluster.base import Manifest
from elasticctl_controller.local import database
from elasticctl_controller.local.database import Database
from elasticctl_controller.local.objects import admit_object, apply_patch, grace_s_of, mark_deleted, mark_disrupted

FORMAT_VERSION = 1

_SCHEMA = """
CREATE TABLE objects (
    kind TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, uid TEXT NOT NULL UNIQUE,
    job TEXT NOT NULL, resource_version INTEGER NOT NULL, json TEXT NOT NULL,
    PRIMARY KEY (kind, namespace, name)
);
CREATE INDEX objects_of_job ON objects (kind, namespace, job);
CREATE TABLE incarnations (uid TEXT PRIMARY KEY, job_uid TEXT NOT NULL, worker TEXT NOT NULL);
CREATE INDEX incarnations_of_job ON incarnations (job_uid);
CREATE TABLE revision (value INTEGER NOT NULL);
INSERT INTO revision VALUES (0);
"""


@dataclass(frozen=True, slots=True)
class StoreChange:
    """A write: to a job (kind ElasticJob), to one of its pods (kind Pod), or to an object that belongs to no job."""

    kind: str
    namespace: str
    job: str


@dataclass(frozen=True, slots=True)
class PodIncarnation:
    """A pod that a job has or had, under a worker's name; `pod` is None once its object is gone."""

    uid: str
    job_uid: str
    worker: str
    pod: Manifest | None


class LocalStore:
    """Jobs, pods and events in one SQLite file; see the module's docstring.

    Raises ClusterError when the file cannot be read, StorageFullError when the disk is full.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._database = Database(path, _SCHEMA + database.EVENTS_SCHEMA, FORMAT_VERSION)
        self._clock = clock
        self._lock = threading.RLock()
        self._listeners: list[Callable[[StoreChange], None]] = []
        self._changes: list[StoreChange] = []

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        self._database.close()

    def subscribe(self, listener: Callable[[StoreChange], None]) -> None:
        """Call `listener` after every change of an object."""
        self._listeners.append(listener)

    # Jobs

    def create_job(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Manifest:
        """Store a new job and return it as stored; ConflictError when its name is taken."""
        with self._transaction() as db:
            job = admit_object(manifest, uid=str(uuid.uuid4()), now=self._clock())
            namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
            if self._find(db, "ElasticJob", namespace, name):
                raise ConflictError(
                    f"job {namespace}/{name} already exists. FIX: choose another name, or delete it first"
                    f" (elasticctl delete {name})"
                )
            if not dry_run:
                self._insert(db, "ElasticJob", job, name)
            return job

    def get_job(self, namespace: str, name: str) -> Manifest:
        """Return one job; NotFoundError when there is none."""
        with self._database.reading() as db:
            return self._job(db, namespace, name)

    def list_jobs(self, namespace: str | None = None) -> list[Manifest]:
        """Return the jobs of a namespace (None: of all), oldest first."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT json FROM objects WHERE kind = 'ElasticJob' AND (? IS NULL OR namespace = ?) ORDER BY rowid",
                (namespace, namespace),
            )
            return [json.loads(row[0]) for row in rows]

    def patch_job(
        self, namespace: str, name: str, patch: Mapping[str, Any], check: Callable[[Manifest, Manifest], object]
    ) -> Manifest:
        """Merge `patch` into metadata and spec; when `check(stored, result)` raises an error, nothing is changed.

        ConflictError when the patch names a `metadata.resourceVersion` other than the job's.
        """
        with self._transaction() as db:
            stored = self._job(db, namespace, name)
            metadata = patch.get("metadata")
            expected = metadata.get("resourceVersion") if isinstance(metadata, Mapping) else None
            _check_version(stored, expected)
            result = apply_patch(stored, patch)
            check(stored, result)
            if result != stored:
                self._update(db, "ElasticJob", result, name)
            return result

    def write_job_status(self, namespace: str, name: str, status: Manifest, resource_version: str) -> Manifest:
        """Replace the status only; ConflictError when the job has changed since `resource_version`."""
        with self._transaction() as db:
            job = self._job(db, namespace, name)
            _check_version(job, resource_version)
            job["status"] = status
            self._update(db, "ElasticJob", job, name)
            return job

    def delete_job(self, namespace: str, name: str, *, uid: str | None = None) -> None:
        """Delete a job and its events, and request the deletion of its pods; NotFoundError when there is none.

        `uid`: only if it is still this very job. Its pods and their logs are deleted as their processes end.
        """
        with self._transaction() as db:
            job = self._job(db, namespace, name)
            job_uid = job["metadata"]["uid"]
            if uid not in (None, job_uid):
                raise NotFoundError(f"job {namespace}/{name} has been deleted and created again")
            db.execute("DELETE FROM objects WHERE uid = ?", (job_uid,))
            database.delete_events(db, job_uid)
            owned = "SELECT json FROM objects WHERE uid IN (SELECT uid FROM incarnations WHERE job_uid = ?)"
            for (text,) in db.execute(owned, (job_uid,)).fetchall():
                pod = json.loads(text)
                self._update(db, "Pod", mark_deleted(pod, grace_s=grace_s_of(pod), now=self._clock()), name)
            self._changes.append(StoreChange("ElasticJob", namespace, name))

    # Pods

    def create_pod(self, manifest: Mapping[str, Any], job_uid: str) -> Manifest:
        """Store a new pod of the job `job_uid`; ConflictError when its name is taken, NotFoundError without the job."""
        with self._transaction() as db:
            pod = admit_object(manifest, uid=str(uuid.uuid4()), now=self._clock())
            pod["status"] = {"phase": "Pending"}
            metadata = pod["metadata"]
            if not db.execute("SELECT 1 FROM objects WHERE uid = ?", (job_uid,)).fetchone():
                raise NotFoundError(f"the job of pod {metadata['name']} is gone")
            if self._find(db, "Pod", metadata["namespace"], metadata["name"]):
                raise ConflictError(f"pod {metadata['namespace']}/{metadata['name']} already exists")
            db.execute("INSERT INTO incarnations VALUES (?, ?, ?)", (metadata["uid"], job_uid, metadata["name"]))
            self._insert(db, "Pod", pod, metadata.get("labels", {}).get(LABEL_JOB, ""))
            return pod

    def get_pod(self, namespace: str, name: str) -> Manifest:
        """Return one pod; NotFoundError when there is none."""
        with self._database.reading() as db:
            pod = self._find(db, "Pod", namespace, name)
        if pod is None:
            raise NotFoundError(f"there is no worker {name!r} in namespace {namespace!r}")
        return pod

    def list_pods(self, namespace: str | None = None, job: str | None = None) -> list[Manifest]:
        """Return the pods with a job's label (None: all pods of all jobs), oldest first."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT json FROM objects WHERE kind = 'Pod' AND (? IS NULL OR (namespace = ? AND job = ?))"
                " ORDER BY rowid",
                (job, namespace, job),
            )
            return [json.loads(row[0]) for row in rows]

    def update_pod(self, uid: str, change: Callable[[Manifest], Manifest]) -> Manifest | None:
        """Replace a pod by `change(pod)` in one step and return it; None when it is gone."""
        with self._transaction() as db:
            pod = self._by_uid(db, uid)
            if pod is None:
                return None
            changed = change(pod)
            if changed != pod:
                self._update(db, "Pod", changed, changed["metadata"].get("labels", {}).get(LABEL_JOB, ""))
            return changed

    def delete_pod(self, uid: str, *, grace_s: float | None = None) -> None:
        """Request a pod's deletion, after its own grace period unless `grace_s` is given; a pod may be gone."""

        def mark(pod: Manifest) -> Manifest:
            wanted_s = grace_s_of(pod) if grace_s is None else grace_s
            return mark_deleted(pod, grace_s=wanted_s, now=self._clock())

        self.update_pod(uid, mark)

    def evict_pod(self, uid: str, *, grace_s: float) -> None:
        """Like `delete_pod`, but marked as a disruption, as the eviction API of Kubernetes does."""

        def mark(pod: Manifest) -> Manifest:
            target = mark_disrupted(pod, "the eviction of this worker was requested")
            return mark_deleted(target, grace_s=grace_s, now=self._clock())

        self.update_pod(uid, mark)

    def remove_pod(self, uid: str) -> None:
        """Delete the object of a pod whose process is gone. Its incarnation stays as long as its job, for its log."""
        with self._transaction() as db:
            pod = self._by_uid(db, uid)
            if pod is not None:
                db.execute("DELETE FROM objects WHERE uid = ?", (uid,))
                self._add_change("Pod", pod, pod["metadata"].get("labels", {}).get(LABEL_JOB, ""))

    # Incarnations: which logs belong to which worker of which job.

    def incarnations(self, job_uid: str) -> list[PodIncarnation]:
        """Return every pod that a job has had, oldest first."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT i.uid, i.job_uid, i.worker, o.json FROM incarnations i LEFT JOIN objects o ON o.uid = i.uid"
                " WHERE i.job_uid = ? ORDER BY i.rowid",
                (job_uid,),
            )
            return [
                PodIncarnation(uid, job, worker, json.loads(pod) if pod else None) for uid, job, worker, pod in rows
            ]

    def list_abandoned(self) -> list[str]:
        """Return the uids of incarnations whose job and pod are both gone, so that their files can be deleted."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT uid FROM incarnations WHERE job_uid NOT IN (SELECT uid FROM objects)"
                " AND uid NOT IN (SELECT uid FROM objects)"
            )
            return [row[0] for row in rows]

    def delete_incarnation(self, uid: str) -> None:
        """Delete an incarnation whose files have been deleted."""
        with self._transaction() as db:
            db.execute("DELETE FROM incarnations WHERE uid = ?", (uid,))

    # Events

    def record_event(self, job_uid: str, about: Mapping[str, Any], type_: str, reason: str, message: str) -> None:
        """Record an event about an object (a job or one of its pods); a repeated event is only counted.

        The newest `EVENTS_PER_JOB` of a job are kept. An event of a job that is gone is dropped.
        """
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM objects WHERE uid = ?", (job_uid,)).fetchone():
                database.add_event(db, job_uid, database.new_event(about, type_, reason, message, self._now()))

    def list_events(self, job_uid: str) -> list[Manifest]:
        """Return a job's events and its pods', oldest first."""
        with self._database.reading() as db:
            return database.events_of_job(db, job_uid)

    # Objects that belong to no job and no namespace

    def put_object(self, manifest: Mapping[str, Any]) -> Manifest:
        """Store an object in place of the one of its kind and name, if there is one, and return it as stored."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        with self._transaction() as db:
            found = self._find(db, kind, "", name)
            known = found["metadata"] if found else {"uid": str(uuid.uuid4()), "creationTimestamp": self._now()}
            stored = {**manifest, "metadata": {**known, "name": name}}
            version = self._next_version(db, stored)
            row = (kind, "", name, known["uid"], "", version, json.dumps(stored))
            db.execute("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._changes.append(StoreChange(kind, "", ""))
            return stored

    def list_objects(self, kind: str) -> list[Manifest]:
        """Return all of a kind, by name."""
        with self._database.reading() as db:
            rows = db.execute("SELECT json FROM objects WHERE kind = ? AND namespace = '' ORDER BY name", (kind,))
            return [json.loads(row[0]) for row in rows]

    def delete_object(self, kind: str, name: str) -> None:
        """Delete an object; NotFoundError when there is none."""
        with self._transaction() as db:
            key = (kind, name)
            gone = db.execute("DELETE FROM objects WHERE kind = ? AND namespace = '' AND name = ?", key)
            if not gone.rowcount:
                raise NotFoundError(f"there is no {kind} {name!r}")
            self._changes.append(StoreChange(kind, "", ""))

    # Internals

    def _now(self) -> str:
        return to_rfc3339(self._clock())

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction; listeners are called with its changes once it is on disk."""
        with self._lock:
            self._changes = []
            with self._database.writing() as db:
                yield db
            changes, self._changes = self._changes, []
        for change in dict.fromkeys(changes):
            for listener in self._listeners:
                listener(change)

    def _find(self, db: sqlite3.Connection, kind: str, namespace: str, name: str) -> Manifest | None:
        row = db.execute(
            "SELECT json FROM objects WHERE kind = ? AND namespace = ? AND name = ?", (kind, namespace, name)
        ).fetchone()
        return json.loads(row[0]) if row else None

    def _by_uid(self, db: sqlite3.Connection, uid: str) -> Manifest | None:
        row = db.execute("SELECT json FROM objects WHERE uid = ?", (uid,)).fetchone()
        return json.loads(row[0]) if row else None

    def _job(self, db: sqlite3.Connection, namespace: str, name: str) -> Manifest:
        job = self._find(db, "ElasticJob", namespace, name)
        if job is None:
            raise NotFoundError(f"there is no job {name!r} in namespace {namespace!r}. Next: elasticctl list -A")
        return job

    def _insert(self, db: sqlite3.Connection, kind: str, obj: Manifest, job: str) -> None:
        metadata = obj["metadata"]
        version = self._next_version(db, obj)
        row = (kind, metadata["namespace"], metadata["name"], metadata["uid"], job, version, json.dumps(obj))
        db.execute("INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self._add_change(kind, obj, job)

    def _update(self, db: sqlite3.Connection, kind: str, obj: Manifest, job: str) -> None:
        version = self._next_version(db, obj)
        row = (version, json.dumps(obj), obj["metadata"]["uid"])
        db.execute("UPDATE objects SET resource_version = ?, json = ? WHERE uid = ?", row)
        self._add_change(kind, obj, job)

    def _next_version(self, db: sqlite3.Connection, obj: Manifest) -> int:
        with closing(db.execute("UPDATE revision SET value = value + 1 RETURNING value")) as cursor:
            version = int(cursor.fetchone()[0])
        obj["metadata"]["resourceVersion"] = str(version)
        return version

    def _add_change(self, kind: str, obj: Manifest, job: str) -> None:
        self._changes.append(StoreChange(kind, obj["metadata"]["namespace"], job))


def _check_version(stored: Manifest, expected: object) -> None:
    metadata = stored["metadata"]
    if expected is not None and expected != metadata["resourceVersion"]:
        raise ConflictError(
            f"job {metadata['namespace']}/{metadata['name']} has changed since it was read."
            " FIX: read it again and repeat the change"
        )
