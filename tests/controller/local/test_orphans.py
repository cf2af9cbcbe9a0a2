"""However a worker ends, nothing that it started is left: not even what left its session and is deaf to SIGTERM."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.supervisor_client import shut_down
from elasticctl_controller.local.objects import ANNOTATION_PID
from tests.support import stubborn_worker
from tests.support.cluster_contract import phase, running
from tests.support.jobs import shell_job
from tests.support.processes import has_ended
from tests.support.waiting import wait_until


def stubborn_job(home: Path, *words: str) -> tuple[Manifest, Path]:
    """A job of one stubborn worker, and the folder its strays leave their pids in."""
    folder = home / "strays"
    folder.mkdir()
    command = [sys.executable, stubborn_worker.__file__, str(folder), *words]
    return shell_job("stubborn", "", container={"command": command}, grace_s=1, backoffLimit=0), folder


def strays(folder: Path) -> list[psutil.Process]:
    """The strays once they are all there."""
    wait_until(lambda: len(list(folder.iterdir())) == stubborn_worker.STRAYS)
    found = [psutil.Process(int(file.name)) for file in folder.iterdir()]
    wait_until(lambda: all(process.name() == "sleep" for process in found))
    return found


def assert_end(processes: list[psutil.Process]) -> None:
    wait_until(lambda: all(has_ended(process) for process in processes))


def test_when_it_ends_by_itself(local_cluster: LocalCluster, home: Path) -> None:
    job, folder = stubborn_job(home, "0")
    local_cluster.create_job(job)
    wait_until(lambda: phase(local_cluster, "stubborn") == "Succeeded")
    # Nothing may be left by the time the end is reported, or its GPUs would be given away too early.
    assert [pid for pid in (int(file.name) for file in folder.iterdir()) if psutil.pid_exists(pid)] == []


def test_when_its_job_is_deleted(local_cluster: LocalCluster, home: Path) -> None:
    job, folder = stubborn_job(home)
    local_cluster.create_job(job)
    left = strays(folder)
    local_cluster.delete_job("default", "stubborn")
    assert_end(left)
    wait_until(lambda: not list(local_cluster.paths.pods.iterdir()))


def test_when_the_cluster_is_shut_down(local_cluster: LocalCluster, home: Path) -> None:
    job, folder = stubborn_job(home)
    local_cluster.create_job(job)
    left = strays(folder)
    shut_down(local_cluster.paths, keep_jobs=True, say=print)
    assert_end(left)


def test_when_only_its_own_process_is_killed(local_cluster: LocalCluster, home: Path) -> None:
    job, folder = stubborn_job(home)
    local_cluster.create_job(job)
    left = strays(folder)
    pod = wait_until(lambda: running(local_cluster, "stubborn"))[0]
    psutil.Process(int(pod["metadata"]["annotations"][ANNOTATION_PID])).kill()
    assert_end(left)
    status = wait_until(lambda: local_cluster.get_job("default", "stubborn")["status"].get("interruptions"))
    assert status[0]["exitCode"] == 137


def test_when_the_shim_is_killed_with_it(local_cluster: LocalCluster, home: Path) -> None:
    """The stray that kept the worker's environment is found by it; only one that hid from both is beyond reach."""
    job, folder = stubborn_job(home)
    local_cluster.create_job(job)
    left = strays(folder)
    pod = wait_until(lambda: running(local_cluster, "stubborn"))[0]
    worker = psutil.Process(int(pod["metadata"]["annotations"][ANNOTATION_PID]))
    hidden = [process for process in left if not process.environ()]
    shim = worker.parent()
    assert shim is not None
    shim.kill()
    for process in hidden:
        process.kill()
    assert_end([worker, *left])
    status = wait_until(lambda: local_cluster.get_job("default", "stubborn")["status"].get("interruptions"))
    assert (status[0]["exitCode"], status[0]["cause"]) == (137, "Killed")
