"""What happened to jobs, as Kubernetes' Events in a table of their own: counted rather than repeated, the newest kept.

Each function runs within the caller's transaction.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Mapping
from typing import Any

from elasticctl.cluster.base import Manifest

PER_JOB = 200
SCHEMA = """
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, job_uid TEXT NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL,
    about_uid TEXT NOT NULL, json TEXT NOT NULL
);
CREATE INDEX events_of_job ON events (job_uid);
"""


def first(about: Mapping[str, Any], type_: str, reason: str, message: str, now: str) -> Manifest:
    """An event about an object that has happened once, at `now` (RFC 3339)."""
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


def add(db: sqlite3.Connection, job_uid: str, event: Manifest) -> None:
    """Keep an event that has happened once as the newest of a job; the same one as before only counts up."""
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
        (job_uid, job_uid, PER_JOB),
    )


def of_job(db: sqlite3.Connection, job_uid: str) -> list[Manifest]:
    """A job's events and its pods', oldest first."""
    rows = db.execute("SELECT json FROM events WHERE job_uid = ? ORDER BY id", (job_uid,))
    return [json.loads(row[0]) for row in rows]


def drop(db: sqlite3.Connection, job_uid: str) -> None:
    """Remove all of a job's."""
    db.execute("DELETE FROM events WHERE job_uid = ?", (job_uid,))
