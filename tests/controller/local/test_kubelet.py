"""The kubelet's loop: what one pod does to it is no other pod's trouble."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.errors import ClusterError
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl_controller.core.manifests import build_pod
from elasticctl_controller.local import kubelet as module
from elasticctl_controller.local.kubelet import RETRY_S, LocalKubelet
from elasticctl_controller.local.lifecycle import KubeletState
from elasticctl_controller.local.store import LocalStore
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    LocalPaths(tmp_path / "state", tmp_path / "run").create()
    store = LocalStore(LocalPaths(tmp_path / "state", tmp_path / "run").database)
    yield store
    store.close()


@pytest.fixture
def kubelet(store: LocalStore, tmp_path: Path) -> LocalKubelet:
    return LocalKubelet(
        store, LocalPaths(tmp_path / "state", tmp_path / "run"), files_for=lambda pod: {"token": "token"}
    )


@pytest.mark.parametrize("error", [KeyError("a field"), ClusterError("the disk is full"), OSError("no more processes")])
def test_a_pod_that_cannot_be_managed_delays_no_other(
    store: LocalStore,
    kubelet: LocalKubelet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    job = ElasticJob.from_manifest(store.create_job(shell_job("job", "true", 2)))
    for index in range(2):
        store.create_pod(build_pod(job, index, "unix:///nowhere"), job.uid)
    looked_after: list[str] = []

    def sync_pod(pod: Manifest, now: float) -> float:
        looked_after.append(pod["metadata"]["name"])
        if len(looked_after) == 1:
            raise error
        return 60.0

    monkeypatch.setattr(kubelet, "_sync_pod", sync_pod)
    assert kubelet._sync() == RETRY_S
    assert looked_after == ["job-worker-0", "job-worker-1"]
    assert "job-worker-0" in caplog.text
    kubelet._exits.close()


def test_a_store_that_cannot_be_read_is_asked_now_and_then(
    kubelet: LocalKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.2)
    asked: list[float] = []

    def sync() -> float:
        asked.append(time.monotonic())
        raise ClusterError("the disk is broken")

    monkeypatch.setattr(kubelet, "_sync", sync)
    with subprocess.Popen(["true"]) as ended:
        kubelet._exits.add(ended.pid)  # whose end is not handled, so that there is always news
        kubelet.start()
        wait_until(lambda: len(asked) >= 3)
        kubelet.stop()
    assert asked[2] - asked[0] >= 0.4


def test_a_running_workers_token_changes_and_is_whole_at_any_time(store: LocalStore, tmp_path: Path) -> None:
    paths, texts = LocalPaths(tmp_path / "state", tmp_path / "run"), ["1" * 64]
    kubelet = LocalKubelet(store, paths, files_for=lambda pod: {"token": texts[-1], "peers": "p"})
    job = ElasticJob.from_manifest(store.create_job(shell_job("job", "sleep 60", 1)))
    pod = store.create_pod(build_pod(job, 0, "unix:///nowhere"), job.uid)
    file = paths.pod_dir(pod["metadata"]["uid"]) / "token"
    kubelet.start()
    try:
        wait_until(lambda: store.list_pods()[0]["status"]["phase"] == "Running")
        seen = {file.read_text()}
        texts.append("2" * 64)
        store.patch_job("default", "job", {"metadata": {"labels": {"a": "b"}}}, check=lambda *_: None)
        wait_until(lambda: seen.add(file.read_text()) or len(seen) > 1)  # type: ignore[func-returns-value]
        assert seen == set(texts)
        assert file.stat().st_mode & 0o077 == 0
    finally:
        assert kubelet.drain().wait(600)
        kubelet.stop()


def test_a_workers_files_are_the_users_and_not_private_as_the_supervisors(store: LocalStore, tmp_path: Path) -> None:
    paths, result = LocalPaths(tmp_path / "state", tmp_path / "run"), tmp_path / "result"
    kubelet = LocalKubelet(store, paths, files_for=lambda pod: {"token": "token"}, umask=0o027)
    job = ElasticJob.from_manifest(store.create_job(shell_job("job", f"touch '{result}'", 1)))
    pod = store.create_pod(build_pod(job, 0, "unix:///nowhere"), job.uid)
    kubelet.start()
    try:
        wait_until(lambda: store.list_pods()[0]["status"]["phase"] == "Succeeded")
        assert result.stat().st_mode & 0o777 == 0o640
        assert paths.pod_dir(pod["metadata"]["uid"]).stat().st_mode & 0o077 == 0
    finally:
        kubelet.stop()


def test_a_worker_is_stopped_though_the_disk_is_full(
    store: LocalStore, kubelet: LocalKubelet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = ElasticJob.from_manifest(store.create_job(shell_job("job", "sleep 60", 1)))
    store.create_pod(build_pod(job, 0, "unix:///nowhere"), job.uid)
    kubelet.start()
    wait_until(lambda: store.list_pods()[0]["status"]["phase"] == "Running")
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise ClusterError("the disk is full")

        full.setattr(store, "update_pod", refuse)
        drained = kubelet.drain()
        wait_until(lambda: "the disk is full" in caplog.text)
    assert drained.wait(600)
    wait_until(lambda: store.list_pods()[0]["status"]["phase"] == "Failed")  # it is stored once there is room
    kubelet.stop()


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_that_is_set_changes_no_grace_period_and_delays_no_start(
    store: LocalStore, kubelet: LocalKubelet, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    real, state = time.time, kubelet._paths
    job = ElasticJob.from_manifest(
        store.create_job(shell_job("job", "trap '' TERM; echo up; while :; do sleep 1; done", 2))
    )
    monkeypatch.setattr(kubelet, "_cpu_slots", lambda: 1)
    for index in range(2):
        pod = dict(build_pod(job, index, "unix:///nowhere"))
        store.create_pod({**pod, "spec": {**pod["spec"], "terminationGracePeriodSeconds": 2}}, job.uid)
    kubelet.start()

    def uids(phase: str) -> list[str]:
        return [pod["metadata"]["uid"] for pod in store.list_pods() if pod["status"]["phase"] == phase]

    wait_until(lambda: len(uids("Running")) == len(uids("Pending")) == 1)
    (first,), (second,) = uids("Running"), uids("Pending")
    wait_until(lambda: "up" in state.log_file(first).read_text())
    began = time.monotonic()
    store.delete_pod(first)
    wait_until(lambda: kubelet._workers[first].state is KubeletState.STOPPING)
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600.0)
    kubelet._exits.wake()  # as any change does
    wait_until(lambda: uids("Running") == [second])
    assert time.monotonic() - began > 1.5
    assert kubelet.drain().wait(600)
    kubelet.stop()
