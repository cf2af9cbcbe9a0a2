"""What a worker said whose pod is gone, read from the job's storage, on a real cluster."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.replicas import Replicas
from elasticctl.api.errors import NotFoundError
from elasticctl.cluster.base import LogLine, LogQuery
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import Connection
from elasticctl_store import stored_logs
from elasticctl_store.storage.local import LocalStorage
from tests.on_cluster.trainer import HOST_FOLDER, IMAGE
from tests.on_cluster.waiting import wait_until
from tests.support.cluster_contract import phase, running
from tests.support.jobs import shell_job

NAME = "talks"
FOLDER = HOST_FOLDER / NAME
COUNTS = """
import os, time
number, life = 0, f"{os.environ['ELASTICCTL_POD_UID']}/{os.environ['ELASTICCTL_GENERATION']}"
while True:
    print(f"line {number} of {life}", flush=True)
    number += 1
    time.sleep(0.02)
"""


@pytest.fixture
def cluster(api: Connection, replicas: Replicas) -> Iterator[KubeCluster]:
    """The cluster, without the job before and after."""
    found = KubeCluster(api)
    delete(found)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    FOLDER.chmod(0o777)  # workers are nobody in particular
    yield found
    delete(found)


def delete(cluster: KubeCluster) -> None:
    try:
        cluster.delete_job("default", NAME)
    except NotFoundError:
        return
    wait_until(lambda: NAME not in [job["metadata"]["name"] for job in cluster.list_jobs("default")])


def lines_of(lines: Sequence[LogLine]) -> dict[str, list[int]]:
    """The numbers that ranks have printed, in order, by pod and generation."""
    found: dict[str, list[int]] = {}
    for match in filter(None, (re.fullmatch(r"line (\d+) of (.*)", line.text) for line in lines)):
        found.setdefault(match[2], []).append(int(match[1]))
    return found


def test_a_worker_that_is_gone_is_still_heard(cluster: KubeCluster) -> None:
    """The folder is at the same path here and in the pods, as a bucket would be."""
    container = {
        "image": IMAGE,
        "command": [str(Path(sys.executable).parent / "elasticctl-launch"), "--preload", "none", "--"],
        "args": [sys.executable, "-c", COUNTS],
        "env": [{"name": "ELASTICCTL_STORAGE", "value": FOLDER.as_uri()}],
        "volumeMounts": [{"name": "state", "mountPath": str(FOLDER)}],
    }
    manifest = shell_job(NAME, "", 2, container=container, minReplicas=1, cleanPodPolicy="All")
    pod = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    pod["volumes"] = [{"name": "state", "hostPath": {"path": str(FOLDER), "type": "Directory"}}]
    job_uid = cluster.create_job(manifest)["metadata"]["uid"]

    def stored(uid: str) -> int:
        logs = stored_logs.find(LocalStorage(FOLDER), job_uid)
        return sum(1 for log in logs if log.incarnation.uid == uid for _ in log.lines())

    heard: list[LogLine] = []
    follower = threading.Thread(
        target=lambda: heard.extend(cluster.logs("default", NAME, LogQuery(follow=True))), daemon=True
    )
    follower.start()
    wait_until(lambda: len(running(cluster, NAME)) == 2)
    victim = running(cluster, NAME)[0]["metadata"]["uid"]
    wait_until(lambda: stored(victim) > 200)
    cluster.evict_pod("default", f"{NAME}-worker-0", grace_s=0.0)
    wait_until(lambda: victim not in [pod["metadata"]["uid"] for pod in running(cluster, NAME)])
    wait_until(lambda: len(running(cluster, NAME)) == 2)
    successor = running(cluster, NAME)[0]["metadata"]["uid"]
    wait_until(lambda: stored(successor) > 200)
    before = lines_of(list(cluster.logs("default", NAME, LogQuery(previous=True))))
    assert {life.partition("/")[0] for life in before} == {victim}
    cluster.patch_job("default", NAME, {"spec": {"cancel": True}})
    wait_until(lambda: phase(cluster, NAME) == "Cancelled" and not cluster.list_pods("default", NAME))
    follower.join(240)
    assert not follower.is_alive()
    read, followed = lines_of(list(cluster.logs("default", NAME, LogQuery(everything=True)))), lines_of(heard)
    assert {life.partition("/")[0] for life in read} >= {victim, successor}
    for life, numbers in read.items():
        assert numbers == list(range(len(numbers))), "each once, in order, from the first on"
        assert followed[life][: len(numbers)] == numbers, "who followed has them too"
