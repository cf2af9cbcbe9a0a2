"""Another process fills the local cluster's disk: what happens in the meantime is known once there is room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.errors import StorageFullError
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl.cluster.local.supervisor_client import shut_down
from tests.support.cluster_contract import phase, running
from tests.support.jobs import shell_job
from tests.support.processes import kill_supervisor
from tests.support.storage_soak.places import small_disk
from tests.support.waiting import wait_until

SHIM_FAILS_BYTES = 130_000
"""Room for a change of the store, and not for what a worker reserves."""


@pytest.fixture
def filler(home: Path) -> Iterator[Path]:
    """A file on the disk that the local cluster has; what is written to it takes the cluster's room."""
    paths = local_paths()
    with small_disk(paths.state, 3_000_000):
        try:
            yield paths.state / "of-another-process"
        finally:
            (paths.state / "of-another-process").unlink(missing_ok=True)
            shut_down(paths, keep_jobs=False, say=print)
            assert "Traceback" not in paths.supervisor_log.read_text()


def fill(filler: Path, leave_bytes: int = 0) -> None:
    found = os.statvfs(filler.parent)
    with filler.open("wb", buffering=0) as file:
        file.write(bytes(found.f_bavail * found.f_frsize - leave_bytes))


def test_an_end_while_the_disk_is_full_is_known_afterwards(
    filler: Path, local_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Though the supervisor is killed as well, and another one starts while there is no room."""
    go = tmp_path / "go"
    until = f"while [ ! -e '{go}' ]; do sleep 0.05; done"
    local_cluster.create_job(shell_job("ends", f"{until}; exit 0"))
    local_cluster.create_job(shell_job("fails", f"[ -e '{go}' ] && {{ echo again; exit 0; }}; {until}; exit 3"))
    wait_until(lambda: running(local_cluster, "ends") and running(local_cluster, "fails"))
    fill(filler)
    go.touch()
    folders = list(local_paths().pods.iterdir())
    wait_until(lambda: all((folder / "exit.json").exists() for folder in folders))
    kill_supervisor(local_cluster)
    with pytest.raises(StorageFullError):
        local_cluster.patch_job("default", "ends", {"metadata": {"labels": {"a": "b" * 60}}})
    assert phase(local_cluster, "ends") == "Running"
    filler.unlink()
    wait_until(lambda: phase(local_cluster, "ends") == phase(local_cluster, "fails") == "Succeeded")
    (interruption,) = local_cluster.get_job("default", "fails")["status"]["interruptions"]
    assert (interruption["cause"], interruption["exitCode"]) == ("ApplicationError", 3)
    assert [line.text for line in local_cluster.logs("default", "fails", LogQuery())] == ["again"]


def test_a_worker_that_finds_no_room_starts_later_and_costs_nothing(filler: Path, local_cluster: LocalCluster) -> None:
    local_cluster.create_job(shell_job("first", "true"))
    wait_until(lambda: phase(local_cluster, "first") == "Succeeded")
    fill(filler, SHIM_FAILS_BYTES)
    local_cluster.create_job(shell_job("late", "echo here"))
    wait_until(lambda: "no room for the worker's reports" in local_paths().supervisor_log.read_text())
    filler.unlink()
    wait_until(lambda: phase(local_cluster, "late") == "Succeeded")
    assert "interruptions" not in local_cluster.get_job("default", "late")["status"]
