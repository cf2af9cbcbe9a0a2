"""The controller's process against a small API server: two replicas, one that leads, and how each of them ends."""

from __future__ import annotations

import base64
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.errors import ClusterError
from elasticctl.api.notifications import SECRET
from elasticctl.api.spec import ANNOTATION_NOTIFY
from elasticctl_controller.kube.election import LEADER_LABEL, LeaderLabel
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.manager import LogFormatter, read_key
from tests.support.control import ControlApi
from tests.support.controller.replica import Replica
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until
from tests.support.webhooks import Hook, serving

JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/default/elasticjobs"
PODS = "/api/v1/namespaces/default/pods"
SYSTEM_PODS = "/api/v1/namespaces/system/pods"


@pytest.fixture
def replicas(control: ControlApi, tmp_path: Path) -> Iterator[list[Replica]]:
    """One that leads and one that waits."""
    hooks_here = "--webhook-to=127.0.0.1"
    with Replica(control, tmp_path, "first", hooks_here) as first:
        wait_until(first.leads)
        with Replica(control, tmp_path, "second", hooks_here) as second:
            wait_until(second.ready)
            yield [first, second]


def test_notifications_go_to_the_webhook_of_the_jobs_own_namespace(
    control: ControlApi, replicas: list[Replica]
) -> None:
    """Sent once, though two replicas watch; what cannot be delivered becomes an event, without the URL."""
    with serving(Hook()) as hook:
        secret = {"metadata": {"name": SECRET}, "data": {"slack": base64.b64encode(hook.url.encode()).decode()}}
        control.put(f"/api/v1/namespaces/default/secrets/{SECRET}", secret)
        for name, key in (("told", "slack"), ("untold", "teams")):
            job = shell_job(name, "true", cancel=True)
            job["metadata"]["annotations"] = {ANNOTATION_NOTIFY: key}
            control.put(f"{JOBS}/{name}", job)

        untold = wait_until(lambda: control.told("NotifyFailed"))
        wait_until(lambda: hook.texts)
        assert hook.texts == ["*told* (default) cancelled"]
        assert "no secret elasticctl-notify with the key teams" in untold[0]
        assert all(replica.end() == 0 for replica in reversed(replicas))
        said = "".join(replica.log.read_text() for replica in replicas)
        assert "planted-secret" not in said + str(control.told("NotifyFailed"))
        assert len(hook.got) == 1


def test_one_replica_acts_and_the_next_takes_over(control: ControlApi, replicas: list[Replica]) -> None:
    first, second = replicas
    control.put(f"{JOBS}/job", shell_job("job", "true", 2))
    wait_until(lambda: control.names(PODS) == ["job-worker-0", "job-worker-1"])
    assert (first.meets(), second.meets()) == (True, False)
    assert [replica.get(replica.health_port, "/healthz")[0] for replica in replicas] == [200, 200]
    assert 'elasticctl_jobs{phase="Pending"} 1' in first.get(first.metrics_port, "/metrics")[1]
    for port in (first.metrics_port, first.health_port):  # which every pod can reach: no client keeps a connection
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connected, connected.makefile("rb") as said:
            connected.sendall(b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n")
            assert said.read().startswith(b"HTTP/1.1 404 ")
    assert first.end() == 0
    wait_until(second.leads)  # the lease was released: no replica had to wait for its end
    assert control.asked("GET", "kueue") == 0, "no job has named a queue"
    control.remove(f"{PODS}/job-worker-1")
    wait_until(lambda: control.names(PODS) == ["job-worker-0", "job-worker-1"])
    wait_until(second.meets)
    assert second.end() == 0
    lines = [json.loads(line) for replica in replicas for line in replica.log.read_text().splitlines()]
    assert {"info"} == {line["level"] for line in lines if "reason" not in line}, lines  # events aside
    assert sum("leads" in line["message"] for line in lines) == 2


def test_a_replica_that_loses_the_lease_ends_immediately(control: ControlApi, replicas: list[Replica]) -> None:
    first, second = replicas
    path, lease = next((path, item) for path, item in control.objects.items() if "/leases/" in path)
    spec = {**lease["spec"], "holderIdentity": "other", "leaseDurationSeconds": 60}
    control.put(path, {**lease, "metadata": dict(lease["metadata"]), "spec": spec})
    assert first.process.wait() == 1
    assert "no longer holds the lease" in first.log.read_text()
    assert not second.leads()


def test_a_new_leader_waits_for_its_port(control: ControlApi, tmp_path: Path) -> None:
    """On a host's own network: the leader before it may hold the port for a moment yet."""
    before = socket.create_server(("127.0.0.1", 0))
    with before, Replica(control, tmp_path, "first", rendezvous_port=before.getsockname()[1]) as replica:
        wait_until(lambda: "cannot listen on port" in replica.log.read_text())
        assert replica.leads()
        before.close()
        wait_until(replica.meets)
        assert replica.end() == 0


def test_a_restart_makes_nothing_twice(control: ControlApi, replicas: list[Replica], tmp_path: Path) -> None:
    first, second = replicas
    control.put(f"{JOBS}/job", shell_job("job", "true", 4))
    wait_until(lambda: len(control.names(PODS)) >= 2)
    first.end(signal.SIGKILL)
    control.remove(next(path for path in control.objects if "/leases/" in path))  # it would last for minutes
    wait_until(second.leads)
    wait_until(lambda: len(control.names(PODS)) == 4)
    uids = {control.objects[path]["metadata"]["uid"] for path in list(control.objects) if path.startswith(PODS)}
    wait_until(lambda: {w["uid"] for w in control.objects[f"{JOBS}/job"]["status"].get("workers", [])} == uids)
    assert control.objects[f"{JOBS}/job"]["status"].get("restarts", {}) == {}


def test_the_leaders_label_moves() -> None:
    control = ControlApi()
    try:
        for name, labels in (("old", {LEADER_LABEL: "true"}), ("new", {}), ("other", {"app": "x"})):
            control.put(f"{SYSTEM_PODS}/{name}", {"metadata": {"name": name, "labels": labels}})
        label = LeaderLabel(LimitedApi(control.connection(), TokenBucket(100, 100)), "system", "new")
        label._move()
        labelled = [
            name
            for name in ("old", "new", "other")
            if LEADER_LABEL in control.objects[f"{SYSTEM_PODS}/{name}"]["metadata"]["labels"]
        ]
        assert labelled == ["new"]
        label.remove()
        assert LEADER_LABEL not in control.objects[f"{SYSTEM_PODS}/new"]["metadata"]["labels"]
    finally:
        control.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read"), ("no hex", "not hexadecimal"), ("abcd", "2 bytes"), ("é", "not hexadecimal")],
)
def test_a_key_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content, "utf-8")
    with pytest.raises(ClusterError, match=said):
        read_key(path)


def test_a_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("ab" * 32 + "\n")
    assert read_key(tmp_path / "key") == b"\xab" * 32


def test_the_log_is_json_with_the_documented_fields() -> None:
    record = logging.LogRecord("elasticctl", logging.WARNING, "", 0, "%s: größer", ("job",), None)
    record.created = 1.5
    line = json.loads(LogFormatter().format(record))
    assert list(line.items()) == [
        ("time", "1970-01-01T00:00:01.500000Z"),
        ("level", "warning"),
        ("logger", "elasticctl"),
        ("message", "job: größer"),
    ]
    assert "größer" in LogFormatter().format(record)


def test_an_errors_traceback_is_a_field_of_its_log_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("elasticctl", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    line = LogFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["error"].endswith("ValueError: no")
