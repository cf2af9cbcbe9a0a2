"""A supervisor that is killed loses nothing: workers run on, ends are collected, and half-done work is finished."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elasticctl.api.errors import UnreachableError
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.supervisor_client import shut_down, supervisor_info
from tests.support.cluster_contract import phase, running, scale
from tests.support.jobs import FOREVER, shell_job
from tests.support.processes import has_ended, kill_supervisor, processes_of
from tests.support.waiting import wait_until


def insist(call: Callable[[], object]) -> None:
    """Call until it is answered: in a storm even a new supervisor may be killed before it can."""

    def answered() -> bool:
        try:
            call()
        except UnreachableError:
            return False
        return True

    wait_until(answered)


def command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):  # a short-lived child of a worker
        return process.cmdline()
    return []


def uids(cluster: LocalCluster, job: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in running(cluster, job)}


def test_workers_run_on_and_are_adopted(local_cluster: LocalCluster) -> None:
    local_cluster.create_job(shell_job("steady", FOREVER, workers=2))
    wait_until(lambda: len(running(local_cluster, "steady")) == 2)
    before = uids(local_cluster, "steady")
    kill_supervisor(local_cluster)
    assert uids(local_cluster, "steady") == before  # the next call starts another supervisor
    local_cluster.patch_job("default", "steady", {"spec": {"suspend": True}})
    wait_until(lambda: not local_cluster.list_pods("default", "steady"))
    assert "interruptions" not in local_cluster.get_job("default", "steady")["status"]


def test_an_end_while_no_supervisor_was_there_is_collected(local_cluster: LocalCluster, home: Path) -> None:
    go = home / "go"
    local_cluster.create_job(shell_job("alone", f"until [ -e '{go}' ]; do sleep 0.05; done; echo done"))
    wait_until(lambda: running(local_cluster, "alone"))
    pod_dir = local_cluster.paths.pod_dir(running(local_cluster, "alone")[0]["metadata"]["uid"])
    kill_supervisor(local_cluster)
    go.touch()
    wait_until((pod_dir / "exit.json").exists)
    wait_until(lambda: phase(local_cluster, "alone") == "Succeeded")
    assert [line.text for line in local_cluster.logs("default", "alone", LogQuery())] == ["done"]


def test_after_a_reboot_the_workers_are_made_again(local_cluster: LocalCluster, home: Path) -> None:
    local_cluster.create_job(shell_job("rebooted", FOREVER, workers=2))
    wait_until(lambda: len(running(local_cluster, "rebooted")) == 2)
    before = uids(local_cluster, "rebooted")
    for process in processes_of(home):
        with suppress(psutil.NoSuchProcess):  # it has died with another
            process.kill()
    wait_until(lambda: not processes_of(home))
    wait_until(lambda: len(uids(local_cluster, "rebooted") - before) == 2)
    status = local_cluster.get_job("default", "rebooted")["status"]
    assert status["restarts"] == {"Killed": 2}
    assert status["failures"] == 0


def test_down_keeps_the_jobs_which_continue_afterwards(local_cluster: LocalCluster, home: Path) -> None:
    # The worker ends well when asked to: that must not pass for success.
    script = "trap 'echo saved; exit 0' TERM; echo begun; while :; do sleep 0.05; done"
    local_cluster.create_job(shell_job("paused", script))
    wait_until(lambda: "begun" in [line.text for line in local_cluster.logs("default", "paused", LogQuery())])
    assert shut_down(local_cluster.paths, keep_jobs=True, say=print)
    assert processes_of(home) == []
    assert supervisor_info(local_cluster.paths) is None
    wait_until(lambda: running(local_cluster, "paused") and phase(local_cluster, "paused") == "Running")
    assert local_cluster.get_job("default", "paused")["status"]["restarts"] == {"Preempted": 1}
    previous = local_cluster.logs("default", "paused", LogQuery(previous=True))
    assert [line.text for line in previous] == ["begun", "saved"]


def test_down_ends_what_a_killed_supervisor_left_behind(local_cluster: LocalCluster, home: Path) -> None:
    local_cluster.create_job(shell_job("left", FOREVER))
    wait_until(lambda: running(local_cluster, "left"))
    kill_supervisor(local_cluster)
    assert processes_of(home)
    assert shut_down(local_cluster.paths, keep_jobs=True, say=print)
    assert processes_of(home) == []


def test_down_of_a_cluster_that_never_was_starts_nothing(local_cluster: LocalCluster, home: Path) -> None:
    assert not shut_down(local_cluster.paths, keep_jobs=True, say=print)
    assert list(home.iterdir()) == []


def test_workers_of_a_store_that_was_moved_away_are_ended(local_cluster: LocalCluster, home: Path) -> None:
    local_cluster.create_job(shell_job("orphaned", FOREVER))
    wait_until(lambda: running(local_cluster, "orphaned"))
    worker = psutil.Process(
        int(running(local_cluster, "orphaned")[0]["metadata"]["annotations"]["local.elasticctl/pid"])
    )
    kill_supervisor(local_cluster)
    for file in local_cluster.paths.state.glob("state.db*"):
        file.unlink()
    assert local_cluster.list_jobs(None) == []
    wait_until(lambda: has_ended(worker))


@pytest.mark.seeds(1, search=5)
def test_killed_at_any_moment_it_carries_on(local_cluster: LocalCluster, home: Path, seed: int) -> None:
    """Kill the supervisor ten times while workers start and stop; the job must end up as it was last asked for."""
    moments = random.Random(seed)
    local_cluster.create_job(shell_job("stormy", FOREVER, workers=2, minReplicas=1, maxReplicas=4, grace_s=1))
    done = threading.Event()

    def kill_now_and_then() -> None:
        for _ in range(10):
            time.sleep(moments.uniform(0.0, 0.5))
            info = supervisor_info(local_cluster.paths)
            if info is not None:
                with suppress(ProcessLookupError):
                    os.kill(info.pid, signal.SIGKILL)
        done.set()

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    wanted = 2
    while not done.is_set():
        wanted = moments.randint(1, 4)
        insist(lambda: local_cluster.patch_job("default", "stormy", scale(wanted)))  # noqa: B023  called here
        time.sleep(moments.uniform(0.0, 0.3))
    killer.join()
    insist(lambda: local_cluster.patch_job("default", "stormy", scale(wanted)))
    wait_until(
        lambda: len(running(local_cluster, "stormy")) == len(local_cluster.list_pods("default", "stormy")) == wanted
    )
    status = wait_until(lambda: local_cluster.get_job("default", "stormy")["status"])
    assert status["failures"] == 0
    assert set(status.get("restarts", {})) <= {"ScaledIn"}
    # One worker for each pod, and none besides.
    scripts = [process for process in processes_of(home) if FOREVER in command_line(process)]
    assert len(scripts) == wanted
