"""Every change through a cluster's client is recorded: who, when, with what, from what to what."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, NotFoundError, UnreachableError
from elasticctl.api.objects import merge_patch
from elasticctl.api.observed.changes import changes_of
from elasticctl.cluster import audit_log
from elasticctl.cluster.audit_log import (
    AuditLog,
    RecordedSecrets,
    append_line,
    audit_file,
    name_client,
    read_audit,
    record_deleted_checkpoints,
    recorded,
)
from elasticctl.cluster.base import Cluster
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.secrets import Secrets
from tests.support.job_samples import AT, job


class OneJob:
    """A cluster with the job that was created last; its next write meets `trouble`."""

    def __init__(self) -> None:
        self.job: Manifest = {}
        self.trouble: BaseException | None = None
        self.quota: Manifest = {}

    def _write(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def create_job(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        self._write()
        if not dry_run:
            self.job = manifest
        return manifest

    def get_job(self, namespace: str, name: str) -> Manifest:
        if name != "digits":
            raise NotFoundError(name)
        return self.job

    def patch_job(self, namespace: str, name: str, patch: Any) -> Manifest:
        self._write()
        self.job = merge_patch(self.job, patch)
        return self.job

    def delete_job(self, namespace: str, name: str) -> None:
        self._write()

    def evict_pod(self, namespace: str, name: str, *, grace_s: float) -> None:
        self._write()

    def list_quotas(self) -> list[Manifest]:
        return [self.quota] if self.quota else []

    def put_quota(self, manifest: Manifest) -> Manifest:
        self.quota = manifest
        return manifest

    def delete_quota(self, project: str) -> None:
        self.quota = {}


@pytest.fixture
def paths(tmp_path: Path) -> LocalPaths:
    return LocalPaths(tmp_path / "state", tmp_path / "run")


@pytest.fixture
def inner() -> OneJob:
    return OneJob()


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def cluster(inner: Any, paths: LocalPaths, events: list[str]) -> Cluster:
    log = AuditLog("lab", lambda: "maria", paths=paths, clock=lambda: AT)
    return recorded(inner, log, lambda job, reason, message: events.append(message))


def lines(paths: LocalPaths) -> list[tuple[str, str, str]]:
    return [(line["verb"], line["name"], line["outcome"]) for line in read_audit(audit_file(paths))]


PRIORITY = {"spec": {"sharing": {"priority": 10}}}


def test_every_change_is_in_the_file_and_those_of_a_job_on_it(
    cluster: Cluster, inner: OneJob, paths: LocalPaths, events: list[str]
) -> None:
    cluster.create_job(job())
    cluster.patch_job("default", "digits", PRIORITY)
    cluster.evict_pod("default", "digits-worker-1", grace_s=0)
    record_deleted_checkpoints(cluster, "default", "digits", "step 10")
    name_client(cluster, "dashboard")
    cluster.patch_job("default", "digits", {"spec": {"cancel": True}})
    on_job = [(change.verb, change.by, change.client.split()[0]) for change in changes_of(inner.job)]
    assert sorted(on_job) == [
        ("cancel", "maria", "dashboard"),
        *((verb, "maria", "elasticctl") for verb in ("change", "delete checkpoints", "preempt", "submit")),
    ]
    cluster.delete_job("default", "digits")
    cluster.put_quota({"metadata": {"name": "vision"}, "spec": {"weight": 2}})
    cluster.put_quota({"metadata": {"name": "vision"}, "spec": {"weight": 3}})
    cluster.delete_quota("vision")
    assert [verb for verb, _, _ in lines(paths)] == [
        "submit", "change", "preempt", "delete checkpoints", "cancel", "delete", "set quota", "set quota",
        "delete quota",
    ]  # fmt: skip
    written = read_audit(audit_file(paths))
    assert written[1]["fields"] == [{"field": "spec.sharing.priority", "before": "", "after": "10"}]
    assert written[7]["fields"] == [{"field": "spec.weight", "before": "2", "after": "3"}]
    assert {(line["by"], line["context"], line["at"]) for line in written} == {("maria", "lab", written[0]["at"])}
    assert events[0].startswith("change by maria with elasticctl ")
    assert "priority - -> 10" in events[0]
    assert events[-1].startswith("delete by maria with dashboard ")


def test_refused_changes_are_not_recorded_and_uncertain_ones_are_unknown(
    cluster: Cluster, inner: OneJob, paths: LocalPaths
) -> None:
    cluster.create_job(job(), dry_run=True)
    for trouble in (ConflictError("no"), UnreachableError("gone"), KeyboardInterrupt()):
        inner.trouble = trouble
        with pytest.raises(type(trouble)):
            cluster.create_job(job())
    assert lines(paths) == [("submit", "digits", "unknown"), ("submit", "digits", "unknown")]


def test_a_change_that_changes_nothing_is_not_recorded(cluster: Cluster, inner: OneJob, paths: LocalPaths) -> None:
    inner.job = job()
    cluster.patch_job("default", "digits", {"metadata": {"resourceVersion": "1"}, "spec": {}})
    assert lines(paths) == []


def test_names_of_secrets_and_keys_are_recorded_and_no_values(paths: LocalPaths) -> None:
    secrets = RecordedSecrets(Secrets(paths), AuditLog("local", lambda: "maria", paths=paths))
    secrets.merge("default", "hub", {"TOKEN": "swordfish"})
    secrets.delete("default", "hub")
    text = audit_file(paths).read_text()
    assert [json.loads(line)["verb"] for line in text.splitlines()] == ["set secret", "delete secret"]
    assert "TOKEN" in text
    assert "swordfish" not in text


def test_the_file_is_private_and_may_be_damaged(paths: LocalPaths) -> None:
    path = audit_file(paths)
    append_line(path, '{"verb": "first"}\n')
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("ab") as file:
        file.write(b'\xff\n[]\n{"verb": "cut\n' + b"[" * 100_000 + b"\n")
    append_line(path, '{"verb": "last"}\n')
    assert [line["verb"] for line in read_audit(path)] == ["first", "last"]


def test_the_file_does_not_grow_forever(paths: LocalPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "MAX_AUDIT_BYTES", 100)
    path = audit_file(paths)
    for number in range(20):
        append_line(path, json.dumps({"number": number}) + "\n")
    numbers = [line["number"] for line in read_audit(path)]
    assert numbers == list(range(numbers[0], 20))
    assert 6 < len(numbers) < 20
    assert sum(file.stat().st_size for file in path.parent.glob("audit*")) < 250


def test_a_full_file_is_rotated_once(paths: LocalPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may find the same file full; the second one must not rename its successor."""
    path = audit_file(paths)
    append_line(path, '{"number": 1}\n')
    descriptor = os.open(path, os.O_RDONLY)
    audit_log.rotate(path, descriptor)
    append_line(path, '{"number": 2}\n')
    audit_log.rotate(path, descriptor)
    os.close(descriptor)
    assert [line["number"] for line in read_audit(path)] == [1, 2]


def test_a_record_that_cannot_be_written_is_reported_and_stops_nothing(inner: Any, paths: LocalPaths) -> None:
    said: list[str] = []
    paths.state.parent.mkdir(exist_ok=True)
    paths.state.write_text("no folder")
    cluster = recorded(inner, AuditLog("lab", lambda: "maria", paths=paths, say=said.append))
    cluster.create_job(job())
    assert inner.job
    assert len(said) == 1
    assert "this submit could not be recorded on this machine" in said[0]
