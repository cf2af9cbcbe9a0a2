"""Nodes with GPUs on the fake API server, and a kubelet that runs what is bound to them."""

from __future__ import annotations

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from tests.support.control import ControlApi

API = "/apis/elastic.pytorch.org/v1alpha1"


GPU = {"resources": {"limits": {GPU_RESOURCE: 1}}}


def jobs(namespace: str) -> str:
    return f"{API}/namespaces/{namespace}/elasticjobs"


def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def add_node(control: ControlApi, name: str, gpus: int, **labels: str) -> None:
    control.put(
        f"/api/v1/nodes/{name}",
        {
            "metadata": {"name": name, "labels": labels},
            "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {GPU_RESOURCE: str(gpus)}},
        },
    )


def status(control: ControlApi, namespace: str, name: str) -> JobStatus:
    return ElasticJob.from_manifest(control.objects[f"{jobs(namespace)}/{name}"]).status


def run_pods(control: ControlApi, namespace: str, node: str) -> None:
    """Do what a scheduler and a kubelet do; pods that are to be deleted go."""
    for name in control.names(pods(namespace)):
        path = f"{pods(namespace)}/{name}"
        stored = control.objects[path]
        if "deletionTimestamp" in stored["metadata"]:
            control.remove(path)
        elif not stored["spec"].get("nodeName"):
            running = {"phase": "Running", "startTime": to_rfc3339(1_700_000_000 + len(name))}
            spec = {**stored["spec"], "nodeName": node}
            control.put(path, {**stored, "metadata": dict(stored["metadata"]), "spec": spec, "status": running})
