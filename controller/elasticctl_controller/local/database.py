"""The supervisor's SQLite file, and its table of events.

A write that has returned survives a killed process and a power failure. Transactions may come from several threads, and
are carried out completely or not at all. SQLite's errors become ours, one line each.

Events are Kubernetes' Events about jobs. A repeated event is counted rather than stored again, and the newest are kept.
Functions on events run within the caller's transaction.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elasticctl.api.errors import ClusterError, StorageFullError
from elasticctl.cluster.base import Manifest


class Database:
    """The file and its lock. `schema` creates an empty one; `version` is that of its format.

    Raises ClusterError when the file cannot be read, is damaged, or was written by a newer elasticctl, and
    StorageFullError when the disk is full. The file is never removed or overwritten.
    """

    def __init__(self, path: Path, schema: str, version: int) -> None:
        self._path = path
        self._lock = threading.RLock()
        with self._translate_errors():
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(schema, version)
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for reading."""
        with self._lock, self._translate_errors():
            yield self._connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for one transaction: on disk when the block has ended, or without any effect."""
        with self._lock, self._translate_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _prepare(self, schema: str, version: int) -> None:
        connection = self._connection
        connection.execute("PRAGMA busy_timeout = 5000")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > version:
            raise ClusterError(
                f"{self._path} was written by a newer elasticctl (format {found}). FIX: use that version"
            )
        if found == 0:
            connection.executescript(f"BEGIN IMMEDIATE; {schema} PRAGMA user_version = {version}; COMMIT;")

    def _is_full(self, error: sqlite3.Error) -> bool:
        """True for SQLite's own code, and for the I/O errors that a full disk causes in a mapped file."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        io_error = code & 0xFF == sqlite3.SQLITE_IOERR
        return code == sqlite3.SQLITE_FULL or (io_error and shutil.disk_usage(self._path.parent).free == 0)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as e:
            if self._is_full(e):
                raise StorageFullError(
                    f"cannot write {self._path}: the disk is full. Nothing was changed."
                    " FIX: free some space and try again"
                ) from e
            if isinstance(e, sqlite3.OperationalError):
                raise ClusterError(
                    f"cannot use {self._path}: {e}. FIX: check the disk and the file's permissions"
                ) from e
            raise ClusterError(
                f"{self._path} is damaged ({e}) and was not changed. FIX: restore it from a backup, or move it away to"
                " start without its jobs"
            ) from e


EVENTS_PER_JOB = 200
EVENTS_SCHEMA = """
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, job_uid TEXT NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL,
    about_uid TEXT NOT NULL, json TEXT NOT NULL
);
CREATE INDEX events_of_job ON events (job_uid);
"""


def new_event(about: Mapping[str, Any], type_: str, reason: str, message: str, now: str) -> Manifest:
    """Return an event about an object that has happened once, at `now` (RFC 3339)."""
    metadata = about["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": metadata["namespace"], "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}"},
        "involvedObject": {"kind": about.get("kind", "Pod"), "name": metadata["name"], "uid": metadata["uid"]},
        "type": type_,
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
    }


def add_event(db: sqlite3.Connection, job_uid: str, event: Manifest) -> None:
    """Store an event as the newest of a job; a repeated event raises the count of the first one."""
    key = (job_uid, event["involvedObject"]["uid"], event["reason"], event["message"])
    same = db.execute(
        "SELECT id, json FROM events WHERE job_uid = ? AND about_uid = ? AND reason = ? AND message = ?", key
    ).fetchone()
    if same:
        before = json.loads(same[1])
        event = {**before, "count": before["count"] + 1, "lastTimestamp": event["lastTimestamp"]}
        db.execute("DELETE FROM events WHERE id = ?", (same[0],))
    db.execute(
        "INSERT INTO events (job_uid, about_uid, reason, message, json) VALUES (?, ?, ?, ?, ?)",
        (*key, json.dumps(event)),
    )
    db.execute(
        "DELETE FROM events WHERE job_uid = ? AND id NOT IN"
        " (SELECT id FROM events WHERE job_uid = ? ORDER BY id DESC LIMIT ?)",
        (job_uid, job_uid, EVENTS_PER_JOB),
    )


def events_of_job(db: sqlite3.Connection, job_uid: str) -> list[Manifest]:
    """Return the events of a job and its pods, oldest first."""
    rows = db.execute("SELECT json FROM events WHERE job_uid = ? ORDER BY id", (job_uid,))
    return [json.loads(row[0]) for row in rows]


def delete_events(db: sqlite3.Connection, job_uid: str) -> None:
    """Delete all events of a job."""
    db.execute("DELETE FROM events WHERE job_uid = ?", (job_uid,))
