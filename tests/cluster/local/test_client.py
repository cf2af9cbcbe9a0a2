"""Bad input and failures: one clear line, the right kind of error, nothing half-done."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import ClusterError, NotFoundError, SpecError, UnreachableError
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl.cluster.local.supervisor_client import request
from elasticctl_controller.local.objects import gpus_of
from tests.support.cluster_contract import phase, running, scale
from tests.support.jobs import FOREVER, shell_job
from tests.support.processes import processes_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_supervisor")

ONE_GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}


def test_garbage_is_refused_by_field_and_what_is_no_json_as_a_whole(local_cluster: LocalCluster) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "apiVersion"),
        ({**shell_job("job", "true"), "spec": None}, "spec"),
        ({**shell_job("job", "true"), "metadata": {"name": "Not A Name"}}, "metadata.name"),
    ]
    for manifest, path in refused:
        with pytest.raises(SpecError) as error:
            local_cluster.create_job(manifest)
        assert error.value.path == path
    assert local_cluster.list_jobs(None) == []
    for body in (b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000):
        head = f"POST /v1/namespaces/default/jobs HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(str(local_cluster.paths.api_socket))
            plain.sendall(head.encode() + body)
            answer = plain.makefile("rb").read()
        assert b" 400 " in answer.splitlines()[0]
        assert b'"error": "invalid"' in answer


def test_a_missing_object_is_an_error_too(local_cluster: LocalCluster) -> None:
    local_cluster.list_jobs(None)
    with pytest.raises(ClusterError, match="404"):
        request(local_cluster.paths.api_socket, "GET", "/v2/other")
    for name in ("../x", "..", "a/b", "a?b", "ä ö", "%2e%2e", "a\nb"):
        with pytest.raises(NotFoundError):
            local_cluster.get_job("default", name)


def test_more_gpus_than_the_machine_has_are_refused(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SpecError, match="3 workers x 1 GPUs are requested, and this machine has 2"):
        local_cluster.create_job(shell_job("big", "true", 3, container=ONE_GPU))
    local_cluster.create_job(shell_job("fits", FOREVER, 2, container=ONE_GPU, maxReplicas=3))
    with pytest.raises(SpecError, match="this machine has 2"):
        local_cluster.patch_job("default", "fits", scale(3))
    assert len(local_cluster.list_jobs(None)) == 1


def test_gpus_are_handed_out_exclusively_and_waited_for(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    script = "echo $CUDA_VISIBLE_DEVICES; " + FOREVER
    local_cluster.create_job(shell_job("first", script, 2, container=ONE_GPU))
    pods = wait_until(lambda: len(running(local_cluster, "first")) == 2 and running(local_cluster, "first"))
    assert isinstance(pods, list)
    assert sorted(gpus_of(pod) for pod in pods) == [("GPU-a",), ("GPU-b",)]
    local_cluster.create_job(shell_job("second", script, container=ONE_GPU))
    waiting = wait_until(lambda: [p for p in local_cluster.list_pods("default", "second") if p["status"].get("reason")])
    assert waiting[0]["status"]["message"] == "waits for 1 GPU: 0 of 2 on this machine are free"
    local_cluster.delete_job("default", "first")
    wait_until(lambda: running(local_cluster, "second"))


def test_a_command_that_cannot_start_fails_the_job_and_says_why(local_cluster: LocalCluster) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"command": ["no-such-program"]}, "no such program"),
        ({"workingDir": "/no/such/folder"}, "/no/such/folder does not exist"),
        ({"command": []}, "give the container a command"),
    ]
    for number, (container, _) in enumerate(wrong):
        local_cluster.create_job(shell_job(f"wrong-{number}", "true", container=container, backoffLimit=0))
    for number, (_, said) in enumerate(wrong):
        wait_until(lambda name=f"wrong-{number}": phase(local_cluster, name) == "Failed")
        events = local_cluster.list_events("default", f"wrong-{number}")
        assert any(event["reason"] == "StartError" and said in event["message"] for event in events)


def test_a_worker_that_ignores_sigterm_is_killed_after_its_grace(local_cluster: LocalCluster) -> None:
    script = f"trap '' TERM; echo deaf; {FOREVER}"
    local_cluster.create_job(shell_job("deaf", script, 2, minReplicas=1, maxReplicas=2, grace_s=1))
    wait_until(lambda: len(running(local_cluster, "deaf")) == 2)
    local_cluster.patch_job("default", "deaf", scale(1))
    wait_until(lambda: len(local_cluster.list_pods("default", "deaf")) == 1)


def test_the_environment_is_the_jobs_and_not_the_shells(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of the GPUs, CUDA sees none where none was asked for."""
    monkeypatch.setenv("SECRET_OF_THE_SHELL", "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    env = [{"name": "MINE", "value": "m"}, {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    python = f'[ "$(command -v python)" = "{sys.executable}" ]'
    gpus = '[ "${CUDA_VISIBLE_DEVICES-unset}" = "" ]'
    check = f'[ -z "$SECRET_OF_THE_SHELL" ] && [ "$MINE-$IP" = m-127.0.0.1 ] && {python} && {gpus}'
    local_cluster.create_job(shell_job("env", check, container={"env": env}, backoffLimit=0))
    wait_until(lambda: phase(local_cluster, "env") in ("Succeeded", "Failed"))
    assert phase(local_cluster, "env") == "Succeeded"


def test_importing_the_client_is_cheap() -> None:
    code = "import sys; import elasticctl.cluster.local.client; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"aiohttp", "asyncio", "psutil", "sqlite3", "http.client", "subprocess", "elasticctl_controller"} & set(
        loaded
    )


def test_reading_starts_nothing(home: Path, local_cluster: LocalCluster) -> None:
    watcher = LocalCluster(local_paths(), starts=False)
    with pytest.raises(UnreachableError, match="is not running"):
        watcher.list_jobs(None)
    assert processes_of(home) == []
    local_cluster.list_jobs(None)
    assert watcher.list_jobs(None) == []
