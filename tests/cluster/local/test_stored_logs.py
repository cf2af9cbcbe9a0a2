"""A worker that is killed, and its files with it, as a node that vanishes: its lines come from the storage."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import LogLine, LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.logs import LogFile, LogFiles, read_logs
from elasticctl.cluster.stored_logs import StoredLogs
from elasticctl_protocol import variables
from elasticctl_store import stored_logs
from elasticctl_store.storage.local import LocalStorage
from elasticctl_store.stored_logs import Incarnation
from tests.support.cluster_contract import phase, running
from tests.support.jobs import shell_job
from tests.support.local_pods import write
from tests.support.processes import processes_of
from tests.support.stored import launched, store
from tests.support.waiting import wait_until

COUNTS = """
import os, sys, time
number, life = 0, f"{os.environ['ELASTICCTL_POD_UID']}/{os.environ['ELASTICCTL_GENERATION']}"
while not os.path.exists(sys.argv[1]):
    print(f"line {number} of {life}", flush=True)
    number += 1
    time.sleep(0.01)
"""


def job_at(folder: Path, stop: Path) -> dict[str, Any]:
    command = ["elasticctl-launch", "--preload", "none", "--", sys.executable, "-c", COUNTS, str(stop)]
    env = [
        {"name": "ELASTICCTL_STORAGE", "value": folder.as_uri()},
        {"name": "ELASTICCTL_LOG_UPLOAD", "value": "on"},
    ]
    return shell_job("job", "", 2, container={"command": command, "env": env}, minReplicas=1)


def kill(home: Path, uid: str) -> None:
    """SIGKILL to every process of a worker at once, its shim too."""
    mine = [process for process in processes_of(home) if _is_of(process, uid)]
    for process in mine:
        with suppress(psutil.NoSuchProcess):  # one of those that come and go
            process.kill()
    psutil.wait_procs(mine)


def _is_of(process: psutil.Process, uid: str) -> bool:
    try:
        return process.environ().get(variables.POD_UID) == uid or any(uid in word for word in process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_workers")
def test_the_output_of_a_vanished_worker_is_read_from_the_storage(
    local_cluster: LocalCluster, home: Path, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    manifest = local_cluster.create_job(job_at(tmp_path / "storage", stop))
    heard: list[LogLine] = []
    follower = threading.Thread(
        target=lambda: heard.extend(local_cluster.logs("default", "job", LogQuery(follow=True))), daemon=True
    )
    follower.start()
    storage = LocalStorage(tmp_path / "storage")

    def stored(uid: str) -> list[str]:
        logs = stored_logs.find(storage, manifest["metadata"]["uid"])
        return [line.text for log in logs if log.incarnation.uid == uid for line in log.lines()]

    wait_until(lambda: len(running(local_cluster, "job")) == 2)
    victim = running(local_cluster, "job")[0]["metadata"]["uid"]
    wait_until(lambda: len(stored(victim)) > 100)
    kill(home, victim)
    wait_until(lambda: victim not in [pod["metadata"]["uid"] for pod in running(local_cluster, "job")])
    shutil.rmtree(local_cluster.paths.pod_dir(victim))
    wait_until(lambda: len(running(local_cluster, "job")) == 2)
    successor = next(
        pod["metadata"]["uid"] for pod in running(local_cluster, "job") if pod["metadata"]["name"] == "job-worker-0"
    )
    wait_until(lambda: len(stored(successor)) > 100)
    stop.touch()
    wait_until(lambda: phase(local_cluster, "job") == "Succeeded")
    follower.join()

    def numbers(lines: list[LogLine]) -> dict[str, list[int]]:
        """The numbers that the ranks of each incarnation's generations have printed, in order."""
        found: dict[str, list[int]] = {}
        for match in filter(None, (re.fullmatch(r"line (\d+) of (.*)", line.text) for line in lines)):
            found.setdefault(match[2], []).append(int(match[1]))
        return found

    read = list(local_cluster.logs("default", "job", LogQuery(everything=True)))
    assert [line.at for line in read] == sorted(line.at for line in read)
    got, followed = numbers(read), numbers(heard)
    assert {life.partition("/")[0] for life in got} >= {victim, successor}
    for life, said in got.items():
        assert said == list(range(len(said))), "each once, in order, from the first on"
        assert followed[life][: len(said)] == said, "who followed has them too"
    before = list(local_cluster.logs("default", "job", LogQuery(previous=True, workers=("job-worker-0",))))
    lives = [life for life in got if life.startswith(victim)]
    assert {life: numbers(before)[life] for life in lives} == {life: got[life] for life in lives}
    tail = local_cluster.logs("default", "job", LogQuery(previous=True, workers=("job-worker-0",), tail=7))
    assert list(tail) == before[-7:]


def test_a_file_that_goes_while_it_is_followed_is_read_on_in_the_storage(tmp_path: Path) -> None:
    url = (tmp_path / "storage").as_uri()
    manifest = shell_job("j", "true", container=launched(url))
    manifest["metadata"]["uid"] = "job-uid"
    stored = StoredLogs(ElasticJob.from_manifest(manifest), pytest.fail)
    said = [(100.0 + n, f"{n}") for n in range(10)]
    write(tmp_path, "u0", *((at + 0.01, text) for at, text in said[:4]))
    store(url, Incarnation("job-uid", "w0", 1.0, "u0"), *said)
    over = threading.Event()

    def files() -> LogFiles:
        return LogFiles(over.is_set(), (LogFile("w0", "u0", over.is_set()),))

    lines = read_logs(files(), files, lambda uid: tmp_path / uid, LogQuery(follow=True), stored)
    got = [next(lines).text for _ in range(4)]
    (tmp_path / "u0").unlink()
    over.set()
    assert got + [line.text for line in lines] == [text for _, text in said]
