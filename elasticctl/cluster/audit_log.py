"""A record of changes: each change by this client goes into the object's annotations and a file on this machine.

<state>/audit.jsonl     a line of JSON for each change, of all contexts; only ever appended to, mode 0600
<state>/audit.jsonl.1   the lines before those, once there are MAX_AUDIT_BYTES of them; what was there before is gone

The user is the one that the API server authenticates, or the login name on this machine. A change is made even if it
cannot be recorded, and a message says so: a full disk must not keep anyone from cancelling a job.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import elasticctl
from elasticctl.api.codec import Timestamp, to_json
from elasticctl.api.errors import ClusterError, UnreachableError
from elasticctl.api.objects import as_mapping, as_text, at
from elasticctl.api.observed.changes import (
    Change,
    FieldChange,
    differences,
    patch_with_change,
    verb_of,
    verb_of_new,
    with_change,
)
from elasticctl.cluster.base import Cluster, Manifest, SecretInfo, SecretStore, say_on_stderr

if TYPE_CHECKING:
    from elasticctl.cluster.local.paths import LocalPaths

COMMAND_LINE = "elasticctl"
MAX_AUDIT_BYTES = 8 << 20
"""Some 25,000 changes. Twice as much is kept at most, and half of that at least once there was as much."""

Publish = Callable[[Manifest, str, str], None]
"""Publishes a change as an event: the job, a reason, a message."""


class AuditLog:
    """The records of one context. `who` is asked for the user's name once, and only when something changes."""

    def __init__(
        self,
        context: str,
        who: Callable[[], str],
        client: str = COMMAND_LINE,
        *,
        paths: LocalPaths | None = None,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = say_on_stderr,
        write: Callable[[str], None] | None = None,
    ) -> None:
        """`write` takes each line of the record; by default it goes into the file of this machine."""
        self._context, self._who, self._clock, self._say = context, who, clock, say
        self._write = write or (lambda line: append_line(audit_file(paths), line))
        self._name = ""
        self.client = client

    def change(self, verb: str, fields: tuple[FieldChange, ...] = ()) -> Change:
        """A change by this user, with this client, now."""
        self._name = self._name or self._who()
        return Change(Timestamp(self._clock()), self._name, f"{self.client} {elasticctl.__version__}", verb, fields)

    @contextmanager
    def recording(self, change: Change, kind: str, namespace: str, name: str) -> Iterator[None]:
        """Record a change once it is made, or as `unknown` if it is uncertain whether it was made."""
        about = {"context": self._context, "namespace": namespace, "kind": kind, "name": name}
        try:
            yield
        except UnreachableError:
            self._append(change, about, "unknown")
            raise
        except Exception:
            raise  # it was refused
        except BaseException:
            self._append(change, about, "unknown")
            raise
        self._append(change, about, "done")

    def _append(self, change: Change, about: Mapping[str, str], outcome: str) -> None:
        line = json.dumps({**to_json(change), **about, "outcome": outcome}, ensure_ascii=False) + "\n"
        try:
            self._write(line)
        except (OSError, ClusterError) as e:
            self._say(f"this {change.verb} could not be recorded on this machine: {e}")


def audit_file(paths: LocalPaths | None = None) -> Path:
    """The file that records this user's changes."""
    from elasticctl.cluster.local.paths import local_paths

    return (paths or local_paths()).state / "audit.jsonl"


def append_line(path: Path, line: str) -> None:
    """Append a line in one write, so that lines of several processes do not mix. Raises OSError, ClusterError."""
    from elasticctl.cluster.local.private_paths import make_private

    make_private(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, line.encode(errors="replace"))
        if os.fstat(descriptor).st_size >= MAX_AUDIT_BYTES:
            rotate(path, descriptor)
    finally:
        os.close(descriptor)


def rotate(path: Path, descriptor: int) -> None:
    """Rename a full file, once: if another process has done so already, its successor is left alone."""
    with suppress(OSError):  # the line is written; the next process tries again
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            path.rename(_rotated(path))


def _rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def read_audit(path: Path) -> list[dict[str, Any]]:
    """The changes made from this machine, oldest first; lines that cannot be read are left out."""
    found = []
    lines = []
    for file in (_rotated(path), path):
        with suppress(FileNotFoundError):
            lines += file.read_bytes().splitlines()
    for line in lines:
        with suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                found.append(entry)
    return found


class Recorded:
    """A `Cluster` whose changes go into an audit log; what only reads is the other's own."""

    def __init__(self, inner: Cluster, log: AuditLog, publish_event: Publish | None = None) -> None:
        self._inner, self.log, self._publish_event = inner, log, publish_event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_job(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """See Cluster.create_job."""
        metadata = manifest.get("metadata")
        if dry_run or not isinstance(metadata, dict):
            return self._inner.create_job(manifest, dry_run=dry_run)
        change = self.log.change(verb_of_new(manifest))
        namespace, name = as_text(metadata.get("namespace")) or "default", as_text(metadata.get("name"))
        with self.log.recording(change, "job", namespace, name):
            return self._inner.create_job(with_change(manifest, change, _mark()))

    def patch_job(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """See Cluster.patch_job."""
        before = self._inner.get_job(namespace, name)
        fields = differences(before, patch)
        if not fields:
            return self._inner.patch_job(namespace, name, patch)
        change = self.log.change(verb_of(patch, fields), fields)
        with self.log.recording(change, "job", namespace, name):
            after = self._inner.patch_job(namespace, name, patch_with_change(before, patch, change, _mark()))
        self._publish(after, change)
        return after

    def delete_job(self, namespace: str, name: str) -> None:
        """See Cluster.delete_job."""
        before = self._inner.get_job(namespace, name)
        phase = FieldChange("status.phase", as_text(at(before, "status", "phase")))
        change = self.log.change("delete", (phase,))
        with self.log.recording(change, "job", namespace, name):
            self._inner.delete_job(namespace, name)
        self._publish(before, change)

    def evict_pod(self, namespace: str, name: str, *, grace_s: float) -> None:
        """See Cluster.evict_pod."""
        change = self.log.change("preempt", (FieldChange("worker", name),))
        with self.log.recording(change, "worker", namespace, name):
            self._inner.evict_pod(namespace, name, grace_s=grace_s)
        self._write_to_job(namespace, name.rpartition("-worker-")[0], change)

    def put_quota(self, manifest: Manifest) -> Manifest:
        """See Cluster.put_quota."""
        name = as_text(at(manifest, "metadata", "name"))
        before = next((quota for quota in self._inner.list_quotas() if at(quota, "metadata", "name") == name), {})
        change = self.log.change("set quota", differences(before, {"spec": as_mapping(manifest.get("spec"))}))
        with self.log.recording(change, "quota", "", name):
            return self._inner.put_quota(manifest)

    def delete_quota(self, project: str) -> None:
        """See Cluster.delete_quota."""
        with self.log.recording(self.log.change("delete quota"), "quota", "", project):
            self._inner.delete_quota(project)

    def record_change(self, namespace: str, job: str, change: Change) -> None:
        """Record what was done to a job elsewhere, such as in its storage."""
        with self.log.recording(change, "job", namespace, job):
            pass
        self._write_to_job(namespace, job, change)

    def _write_to_job(self, namespace: str, job: str, change: Change) -> None:
        """Write a record to a job, unless it is gone or may not be written to."""
        with suppress(ClusterError):
            before = self._inner.get_job(namespace, job)
            after = self._inner.patch_job(namespace, job, patch_with_change(before, {}, change, _mark()))
            self._publish(after, change)

    def _publish(self, job: Manifest, change: Change) -> None:
        if self._publish_event is not None:
            said = f": {change.words}" if change.words else ""
            with suppress(ClusterError):  # the right to change jobs does not include that to write events
                self._publish_event(job, "Changed", f"{change.verb} by {change.by} with {change.client}{said}")


class RecordedSecrets:
    """A `SecretStore` whose changes go into an audit log: names of keys, no values."""

    def __init__(self, inner: SecretStore, log: AuditLog) -> None:
        self._inner, self._log = inner, log

    def merge(self, namespace: str, name: str, values: Mapping[str, str]) -> None:
        """See SecretStore.merge."""
        change = self._log.change("set secret", (FieldChange("keys", after=", ".join(sorted(values))),))
        with self._log.recording(change, "secret", namespace, name):
            self._inner.merge(namespace, name, values)

    def delete(self, namespace: str, name: str) -> None:
        """See SecretStore.delete."""
        with self._log.recording(self._log.change("delete secret"), "secret", namespace, name):
            self._inner.delete(namespace, name)

    def list(self, namespace: str) -> list[SecretInfo]:
        """See SecretStore.list."""
        return self._inner.list(namespace)


def recorded(inner: Cluster, log: AuditLog, publish_event: Publish | None = None) -> Cluster:
    """The cluster with a record of all its changes."""
    return cast(Cluster, Recorded(inner, log, publish_event))


def name_client(cluster: Cluster, client: str) -> None:
    """Set the program that makes the changes from now on."""
    if isinstance(cluster, Recorded):
        cluster.log.client = client


def record_deleted_checkpoints(cluster: Cluster, namespace: str, job: str, deleted: str) -> None:
    """Record that checkpoints of a job were deleted."""
    if isinstance(cluster, Recorded):
        change = cluster.log.change("delete checkpoints", (FieldChange("checkpoints", deleted),))
        cluster.record_change(namespace, job, change)


def record_locally(verb: str, kind: str, name: str, was: str = "", now: str = "") -> None:
    """Record, only on this machine, a change to something that is not an object in a cluster."""
    log = AuditLog("", login_name)
    fields = (FieldChange(kind, was, now),) if was or now else ()
    with log.recording(log.change(verb, fields), kind, "", name):
        pass


def login_name() -> str:
    """The name of the user that this process runs as."""
    from elasticctl.cluster.local.private_paths import owner_name

    return f"{owner_name(os.getuid())} (login)"


def _mark() -> str:
    return secrets.token_hex(3)
