"""A job as TorchElastic's users have it, with an etcd of theirs, works as it did; no line of it is changed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from elasticctl.kubeapi.connection import MERGE_PATCH, Connection
from tests.on_cluster.commands import kubectl, lab, start_node
from tests.on_cluster.replicas import ADDRESS, Replicas
from tests.on_cluster.trainer import HOST_FOLDER, IMAGE
from tests.on_cluster.waiting import wait_until
from tests.support.ports import free_port
from tests.support.torchelastic import NAME, NAMESPACE, torchelastic_job

SCRIPT = Path(__file__).with_name("torchelastic_train.py")
FOLDER = HOST_FOLDER / NAME
IN = ("-n", NAMESPACE)
GPU = "nvidia.com/gpu"
# As in its two samples: torch's launcher is the image's entry point, so the container has arguments alone. The lab's
# images have no entry point, so it stands there as the command.
POD = f"""
containers:
  - name: elasticjob-worker
    image: {IMAGE}
    imagePullPolicy: IfNotPresent
    command: ["{sys.executable}", "-m", "torch.distributed.run"]
    args:
      - "--nproc_per_node=1"
      - "--max_restarts=100"
      - "--rdzv_conf=last_call_timeout=2"
      - "{SCRIPT}"
      - "/state"
    env:
      - name: OMP_NUM_THREADS
        value: "1"
    resources:
      limits:
        nvidia.com/gpu: 1
    volumeMounts:
      - name: state
        mountPath: /state
volumes:
  - name: state
    hostPath:
      path: {FOLDER}
      type: Directory
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that the script has written down."""

    number: int
    world: int


def steps() -> list[Step]:
    """All so far."""
    with suppress(FileNotFoundError):
        return [Step(*map(int, line.split())) for line in (FOLDER / "steps").read_text().splitlines()]
    return []


def wait_world(world: int) -> None:
    """Wait until that many train together, for ten steps from now on."""
    since = len(steps())
    wait_until(lambda: [s.world for s in steps()[since:]][-10:] == [world] * 10, every_s=0.2)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """An etcd that speaks version 2 of its API, as TorchElastic needs it; yields HOST:PORT."""
    client, peer = (f"http://{ADDRESS}:{free_port(ADDRESS)}" for _ in range(2))
    argv = ["etcd", "--enable-v2", f"--data-dir={tmp_path / 'etcd'}", "--log-level=warn", "--name=etcd"]
    argv += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}"]
    argv += [f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=etcd={peer}"]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:

        def healthy() -> bool:
            assert process.poll() is None
            with suppress(OSError), urllib.request.urlopen(f"{client}/health", timeout=2) as page:
                return json.load(page)["health"] == "true"
            return False

        try:
            wait_until(healthy)
            yield client.removeprefix("http://")
        finally:
            process.terminate()


@pytest.fixture
def gpus(api: Connection) -> Iterator[None]:
    """Nodes that say they have GPUs, as with NVIDIA's device plugin."""
    paths = [f"/api/v1/nodes/{node['metadata']['name']}" for node in api.request("GET", "/api/v1/nodes")["items"]]

    def say(count: str | None) -> None:
        for path in paths:
            capacity = {"status": {"capacity": {GPU: count}}}
            api.request("PATCH", f"{path}/status", capacity, content_type=MERGE_PATCH)

    say("4")
    wait_until(lambda: all(GPU in api.request("GET", path)["status"]["allocatable"] for path in paths))
    yield
    say(None)


@pytest.fixture
def described(etcd: str, gpus: None, replicas: Replicas) -> Iterator[Callable[[], str]]:
    """The job, as `kubectl apply` takes it; yields `kubectl describe`, with single spaces."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    kubectl("apply", "-f", "-", given=json.dumps(namespace))
    kubectl("apply", "-f", "-", given=torchelastic_job(POD, endpoint=etcd, most=3))
    yield lambda: re.sub(r"\s+", " ", kubectl("describe", "elasticjob", NAME, *IN))
    kubectl("delete", "elasticjob", NAME, *IN, "--timeout=4m", timeout_s=300)
    kubectl("delete", "namespace", NAMESPACE, "--timeout=4m", timeout_s=300)


def nodes() -> dict[str, str]:
    """Which worker is on which node."""
    columns = "jsonpath={range .items[*]}{.metadata.name} {.spec.nodeName}{'\\n'}{end}"
    lines = kubectl("get", "pods", "-l", f"job-name={NAME},replica-type=worker", "-o", columns, *IN).splitlines()
    return {name: node for name, _, node in (line.partition(" ") for line in lines)}


def test_a_job_of_torchelastic_runs_unchanged(
    described: Callable[[], str], api: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_world(2)
    for said in ("Type: Created", "Reason: ElasticJobRunning Status: True Type: Running", "Worker: Active: 2"):
        wait_until(lambda said=said: said in described(), every_s=0.5)  # type: ignore[misc]
    workers = [f"{NAME}-worker-0", f"{NAME}-worker-1"]
    assert sorted(nodes()) == workers
    services = kubectl("get", "services", "-o", "name", *IN).split()
    assert services == [f"service/{name}" for name in workers]

    monkeypatch.setenv("KUBE_EDITOR", "sed -i 's/^      replicas: 2/      replicas: 3/'")
    kubectl("edit", "elasticjob", NAME, *IN)
    wait_world(3)
    wait_until(lambda: "Worker: Active: 3" in described(), every_s=0.5)

    done, node = steps()[-1].number, nodes()[f"{NAME}-worker-1"]
    lab("kill-node", node)
    try:
        wait_until(lambda: node not in nodes().values())
        wait_world(3)
    finally:
        start_node(node)
    assert {step.number for step in steps()} >= set(range(1, done + 1))  # no step was lost
    running = "Reason: ElasticJobRunning Status: True Type: Running"
    wait_until(lambda: running in described(), every_s=0.5)

    (FOLDER / "enough").touch()
    succeeded = "Reason: ElasticJobSucceeded Status: True Type: Succeeded"
    wait_until(lambda: succeeded in described(), every_s=0.5)
    assert "Status: False Type: Running" in described()
