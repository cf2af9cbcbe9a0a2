"""mpirun over the workers of a job, from one node to the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elasticctl.api.spec import API_VERSION, KIND, PLURAL, WORKER_CONTAINER
from elasticctl.api.status import Phase
from elasticctl.kubeapi.connection import Connection, resource_path
from tests.on_cluster.commands import kubectl
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.trainer import IMAGE, NAMESPACE, Trainer
from tests.on_cluster.waiting import wait_until
from tests.support.mpi import SUM_OF_RANKS

MPIRUN = "mpirun.openmpi"
"""By the name that needs nothing of /etc, which a container of the lab has for itself."""
PROGRAM = (
    'echo "folder $PWD"; until [ "$(wc -l < "$ELASTICCTL_HOSTFILE")" = 3 ]; do sleep 0.2; done;'
    f' exec {MPIRUN} "$0" -c "$1"'
)


@pytest.mark.needs("mpirun")
def test_mpirun_reaches_workers_on_all_nodes_one_that_has_come_later_among_them(
    api: Connection, replicas: Replicas
) -> None:
    job = Trainer(api, "mpi")
    job.delete()
    launch = str(Path(sys.executable).parent / "elasticctl-launch")
    worker = {
        "name": WORKER_CONTAINER,
        "image": IMAGE,
        "command": [launch, "--nproc-per-node", "2", "--launcher", "--"],
        "args": ["sh", "-c", PROGRAM, sys.executable, SUM_OF_RANKS],
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"job-name": "mpi"}},
    }
    template = {"spec": {"containers": [worker], "topologySpreadConstraints": [spread]}}
    spec = {
        "minReplicas": 1,
        "maxReplicas": 4,
        "cleanPodPolicy": "None",
        "replicaSpecs": {"Worker": {"replicas": 2, "template": template}},
    }
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "mpi", "namespace": NAMESPACE}}
    try:
        api.request("POST", resource_path(API_VERSION, NAMESPACE, PLURAL), manifest | {"spec": spec})
        wait_until(lambda: [pod["status"]["phase"] for pod in job.pods()] == ["Running", "Running"])
        wait_until(lambda: "folder " in logs())
        nodes = api.request("GET", "/api/v1/nodes")["items"]
        assert len({pod["spec"]["nodeName"] for pod in job.pods()}) == min(2, len(nodes))
        job.scale(3)
        wait_until(lambda: job.job().status.phase.terminal)
        assert job.job().status.phase is Phase.SUCCEEDED, logs()
        said = sorted(line for line in logs().splitlines() if line.startswith("rank "))
        assert said == [f"rank {rank} on mpi-worker-{rank // 2}: 15" for rank in range(6)]
        assert logs().count("runs the launcher program") == 1
    finally:
        job.delete()


def logs() -> str:
    return kubectl("logs", "mpi-worker-0")
