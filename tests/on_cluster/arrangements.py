"""Who decides which jobs run: each arrangement with what it needs on a cluster of six GPUs, and its form of a job."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import GPU, Quota
from elasticctl.api.spec import API_VERSION, KIND, QUEUE_LABEL, WORKER_CONTAINER
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from elasticctl.kubeapi.features import ALL, Feature, format_features
from tests.on_cluster.kueue import kueue, set_quota
from tests.on_cluster.random_jobs import GPUS, GUARANTEED, PROJECTS, Job
from tests.on_cluster.trainer import HOST_FOLDER, TRAIN

FOLDER = HOST_FOLDER / "scenarios"
"""A folder that all nodes share; workers see it as /state."""
GANGS = "/apis/scheduling.k8s.io/v1beta1"
TRAINING = (str(TRAIN), "--epochs", "1000000", "--step-delay-s", "0.1")
QUIET = "trap 'exit 0' TERM; until [ -e /state/$JOB.over ]; do sleep 0.2; done"
GRACE_S = 20


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`flags` are the controller's; `open` is a context that sets up whatever else is needed on the cluster.

    `queued`: jobs name a queue, and a job that waits there is removed from it rather than suspended.
    """

    name: str
    flags: Sequence[str]
    open: Callable[[Connection], AbstractContextManager[None]]
    queued: bool = False


@contextmanager
def _guarantees(api: Connection) -> Iterator[None]:
    cluster = KubeCluster(api)
    for project in PROJECTS:
        cluster.put_quota(Quota(project, guaranteed={GPU: GUARANTEED}).to_manifest())
    try:
        yield
    finally:
        for project in PROJECTS:
            cluster.delete_quota(project)


@contextmanager
def _queues(api: Connection) -> Iterator[None]:
    with kueue(api, {project: project for project in PROJECTS}):
        for project in PROJECTS:
            set_quota(api, project, GUARANTEED)
        yield


@contextmanager
def _gangs(api: Connection) -> Iterator[None]:
    try:
        api.request("GET", GANGS)
    except NotFoundError:
        pytest.skip(f"{GANGS} is not served: start the lab with --feature GenericWorkload")
    yield


ARRANGEMENTS = {
    one.name: one
    for one in (
        Arrangement("sharing", ("--sharing",), _guarantees),
        Arrangement("kueue", (), _queues, queued=True),
        Arrangement("gangs", (), _gangs),
        Arrangement("none", (f"--features={format_features(ALL - {Feature.GANGS})}",), lambda api: nullcontext()),
    )
}


def manifest(job: Job, arrangement: Arrangement, *, train: bool) -> Manifest:
    """Return the job as it is submitted; with `train` its workers make steps, otherwise they wait until they are
    stopped."""
    container: dict[str, Any] = {
        "name": WORKER_CONTAINER,
        "image": "lab/trainer:dev",
        "env": [{"name": "JOB", "value": job.name}, {"name": "OMP_NUM_THREADS", "value": "1"}],
        "volumeMounts": [{"name": "state", "mountPath": "/state"}],
        "resources": {"limits": {GPU_RESOURCE: "1"}},
    }
    if train:
        launch = str(Path(sys.executable).with_name("elasticctl-launch"))
        container["command"] = [launch, "--preload", "json", "--nproc-per-node", "1", "--", sys.executable, *TRAINING]
        container["env"].append({"name": "ELASTICCTL_STORAGE", "value": f"file:///state/{job.name}"})
    else:
        container["command"] = ["bash", "-c", QUIET]
    volume = {"name": "state", "hostPath": {"path": str(FOLDER), "type": "Directory"}}
    pod = {
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": [volume],
        "nodeSelector": {"kubelab/real": "true"},
    }
    metadata: dict[str, Any] = {"name": job.name, "namespace": job.project}
    if arrangement.queued:
        metadata["labels"] = {QUEUE_LABEL: job.project}
    replicas = {"replicas": job.most, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "minReplicas": job.least,
            "maxReplicas": job.most,
            "suspend": arrangement.queued,
            "policy": {"backoffSeconds": 0.1, "backoffMaxSeconds": 1.0},
            **({"sharing": {"automatic": True}} if job.elastic else {}),
            "replicaSpecs": {"Worker": replicas},
        },
    }


@contextmanager
def stage(api: Connection) -> Iterator[None]:
    """Set up the projects' namespaces, the folder, and six GPUs that the real nodes offer without having them."""
    for project in PROJECTS:
        with suppress(ConflictError):
            api.request("POST", "/api/v1/namespaces", {"metadata": {"name": project}})
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    FOLDER.chmod(0o777)  # workers run as arbitrary users
    _offer(api, GPUS)
    try:
        yield
    finally:
        _offer(api, 0)


def _offer(api: Connection, gpus: int) -> None:
    nodes = api.request("GET", "/api/v1/nodes", None, {"labelSelector": "kubelab/real"})["items"]
    for number, node in enumerate(nodes):
        own = {GPU_RESOURCE: str(gpus // len(nodes) + (number < gpus % len(nodes)))}
        path = resource_path("v1", None, "nodes", node["metadata"]["name"]) + "/status"
        api.request("PATCH", path, {"status": {"capacity": own, "allocatable": own}}, content_type=MERGE_PATCH)
