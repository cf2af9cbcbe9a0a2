"""The jobs: manifests that differ only in who manages the workers, and in how well that is tuned."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.recoveries.contenders import STORE_SERVER
from benchmarks.replicas import ADDRESS, Replicas, prepare
from elasticctl.api.codec import Manifest
from elasticctl.api.spec import API_VERSION, KIND, PLURAL, WORKER_CONTAINER
from elasticctl.kubeapi.connection import Connection, resource_path

KEPT = "node-3"
"""A node that no event affects: it has the operator's pod, and no workers."""
NAME, NAMESPACE, IMAGE, STATE = "peers", "default", "lab/trainer:dev", "/state"
SCRIPT = Path(__file__).parents[1] / "recoveries" / "train.py"
WORKERS, STEP_S, SAVE_EVERY_STEPS, GRACE_S = 3, 0.05, 20, 10
PATIENT = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
TUNED_ENVIRONMENT = {
    "PET_MONITOR_INTERVAL": "0.1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # otherwise groups keep the address of a former rank 0, and hang
}
TUNED_CONF = {"is_host": "0", "last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "3"}


@dataclass(frozen=True, slots=True)
class Contender:
    """`path` is where its jobs are, `replicas` returns the patch that sets their number of workers."""

    name: str
    path: str
    replicas: tuple[str, ...]
    pods: str
    manifest: Manifest = field(default_factory=dict)

    def size(self, workers: int) -> Manifest:
        """Return the patch that scales the job."""
        patch: Any = {"replicas": workers}
        for name in reversed(self.replicas):
            patch = {name: patch}
        return {"spec": patch}


def _pod(
    container: str, command: list[str], folder: Path, environment: Mapping[str, str] | None = None, **more: Any
) -> Manifest:
    script = [str(SCRIPT), "--storage", f"file://{STATE}/checkpoints", "--steps", f"{STATE}/steps"]
    script += ["--step-s", str(STEP_S), "--save-every-steps", str(SAVE_EVERY_STEPS)]
    worker = {
        "name": container,
        "image": IMAGE,
        "command": [*command, *script],
        "env": [{"name": name, "value": value} for name, value in {**ENVIRONMENT, **(environment or {})}.items()],
        "volumeMounts": [{"name": "state", "mountPath": STATE}],
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"benchmark": NAME}},
    }
    others = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [KEPT]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [others]}]}
    spec = {
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [worker],
        "volumes": [{"name": "state", "hostPath": {"path": str(folder), "type": "Directory"}}],
        "topologySpreadConstraints": [spread],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
        **more,
    }
    return {"metadata": {"labels": {"benchmark": NAME}}, "spec": spec}


@contextmanager
def elasticjob(api: Connection, folder: Path) -> Iterator[Contender]:
    """Return our job without any tuning, under two controllers."""
    prepare(api)
    launch = str(Path(sys.executable).with_name("elasticctl-launch"))
    template = _pod(WORKER_CONTAINER, [launch, "--", sys.executable], folder)
    replicas = {"replicas": WORKERS, "restartPolicy": "OnFailure", "template": template}
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"minReplicas": 1, "maxReplicas": WORKERS, "replicaSpecs": {"Worker": replicas}},
    }
    with tempfile.TemporaryDirectory() as logs:
        controllers = Replicas(Path(logs))
        try:
            for _ in range(2):
                controllers.start()
            controllers.leader()
            path = resource_path(API_VERSION, NAMESPACE, PLURAL)
            yield Contender("ElasticJob", path, ("replicaSpecs", "Worker"), f"job-name={NAME}", body)
        finally:
            controllers.stop()


def _pytorchjob(name: str, folder: Path, policy: Mapping[str, Any], **pod: Any) -> Contender:
    template = _pod("pytorch", [sys.executable, "-m", "torch.distributed.run"], folder, **pod)
    worker = {"replicas": WORKERS, "restartPolicy": "OnFailure", "template": template}
    version = "kubeflow.org/v1"
    body = {
        "apiVersion": version,
        "kind": "PyTorchJob",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "nprocPerNode": "1",  # the default is the number of processors of a node
            "elasticPolicy": {"minReplicas": 1, "maxReplicas": WORKERS, "rdzvBackend": "c10d", **policy},
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }
    label = f"training.kubeflow.org/job-name={NAME}"
    path = resource_path(version, NAMESPACE, "pytorchjobs")
    return Contender(name, path, ("pytorchReplicaSpecs", "Worker"), label, body)


@contextmanager
def pytorchjob(api: Connection, folder: Path) -> Iterator[Contender]:
    """Return Kubeflow's job with its defaults: the first worker hosts the store, and a failing rank ends its agent."""
    yield _pytorchjob("PyTorchJob", folder, {})


@contextmanager
def pytorchjob_tuned(api: Connection, folder: Path) -> Iterator[Contender]:
    """Return the best that was found: a store outside the workers, short timeouts, many restarts, quick eviction from
    nodes."""
    command = [sys.executable, STORE_SERVER, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            policy = {
                "rdzvHost": ADDRESS,
                "rdzvPort": int(server.stdout.readline()),
                "maxRestarts": 100,
                "rdzvConf": [{"key": key, "value": value} for key, value in TUNED_CONF.items()],
            }
            tolerations = [
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1} for key in PATIENT
            ]
            yield _pytorchjob(
                "PyTorchJob, tuned", folder, policy, environment=TUNED_ENVIRONMENT, tolerations=tolerations
            )
        finally:
            server.kill()


CONTENDERS = {"elasticjob": elasticjob, "pytorchjob": pytorchjob, "pytorchjob-tuned": pytorchjob_tuned}
