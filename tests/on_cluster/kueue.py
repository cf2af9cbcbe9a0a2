"""Kueue itself on a cluster: queues of one cohort with quotas in GPUs, and what is reserved there.

If it is not installed, the lab installs it. It is stopped in the end, because it would act on every pod.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from tests.on_cluster.commands import LAB, kubectl, need_lab
from tests.on_cluster.waiting import wait_until

GROUP, VERSION = "kueue.x-k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
FLAVOR, FLAVOR_LABEL = "spot", "elasticctl.dev/test-flavor"
INSTALL_LIMIT_S = 300.0
PREEMPTION = {
    "withinClusterQueue": "LowerPriority",
    "reclaimWithinCohort": "LowerPriority",
    "borrowWithinCohort": {"policy": "LowerPriority", "maxPriorityThreshold": -1},
}
"""What docs/sharing.md recommends."""
LEFT = (
    "deployment/kueue-controller-manager",
    "validatingwebhookconfiguration/kueue-validating-webhook-configuration",
    "mutatingwebhookconfiguration/kueue-mutating-webhook-configuration",
)
"""What of Kueue would still act or respond after the end."""


@contextmanager
def kueue(api: Connection, queues: Mapping[str, str]) -> Iterator[None]:
    """Set up Kueue with a ClusterQueue and a LocalQueue of each name, in its namespace, and one flavor for all nodes.

    Skips the test if it is not there and cannot be installed.
    """
    there = "kueue-controller-manager" in kubectl("get", "deployments", "-A", "-o", "name")
    if not there:
        need_lab()
        subprocess.run([LAB, "install", "kueue"], check=True, timeout=INSTALL_LIMIT_S)
    try:
        _create(api, f"{ROOT}/resourceflavors", "ResourceFlavor", FLAVOR, {"nodeLabels": {FLAVOR_LABEL: FLAVOR}})
        _label_nodes(api, FLAVOR)
        for queue, namespace in queues.items():
            _create(api, f"{ROOT}/clusterqueues", "ClusterQueue", queue, queue_of_flavors({FLAVOR: 0}))
            path = f"{ROOT}/namespaces/{namespace}/localqueues"
            _create(api, path, "LocalQueue", queue, {"clusterQueue": queue})
        yield
    finally:
        for queue, namespace in queues.items():
            _delete(api, f"{ROOT}/namespaces/{namespace}/localqueues/{queue}")
            _delete(api, f"{ROOT}/clusterqueues/{queue}")
        _delete(api, f"{ROOT}/resourceflavors/{FLAVOR}")
        _label_nodes(api, None)
        if not there:
            services = kubectl("get", "apiservice", "-o", "name").split()
            visibility = [name for name in services if name.endswith(f".visibility.{GROUP}")]
            for name in (*LEFT, *visibility):
                kubectl("-n", "kueue-system", "delete", name, "--ignore-not-found")


def set_quota(api: Connection, queue: str, gpus: int) -> None:
    """Set the number of GPUs of the queue's own."""
    api.request(
        "PATCH", f"{ROOT}/clusterqueues/{queue}", {"spec": queue_of_flavors({FLAVOR: gpus})}, content_type=MERGE_PATCH
    )


def held(api: Connection, queue: str) -> int:
    """Return how many GPUs are reserved in the queue, according to Kueue."""
    usage = api.request("GET", f"{ROOT}/clusterqueues/{queue}").get("status", {}).get("flavorsReservation", [])
    return sum(int(entry["total"]) for flavor in usage for entry in flavor["resources"])


def describe(api: Connection, namespace: str) -> str:
    """Return all Workloads with their conditions, and why they wait, for a test that fails."""
    lines = []
    for item in api.request("GET", f"{ROOT}/namespaces/{namespace}/workloads")["items"]:
        conditions = item.get("status", {}).get("conditions", [])
        said = [f"{one['type']}={one['status']} ({one['message']})" for one in conditions]
        spec = item["spec"]
        lines.append(f"{item['metadata']['name']}: {spec['podSets'][0]['count']} at {spec.get('priority')}; {said}")
    return "\n".join(lines)


def _label_nodes(api: Connection, value: str | None) -> None:
    """Give all nodes that flavor, or none."""
    for node in api.request("GET", "/api/v1/nodes")["items"]:
        patch = {"metadata": {"labels": {FLAVOR_LABEL: value}}}
        path = resource_path("v1", None, "nodes", node["metadata"]["name"])
        api.request("PATCH", path, patch, content_type=MERGE_PATCH)


def queue_of_flavors(gpus: Mapping[str, int]) -> Manifest:
    """Return the spec of a ClusterQueue with GPUs of each flavor, which are tried in that order."""
    flavors: list[dict[str, Any]] = [
        {"name": flavor, "resources": [{"name": GPU_RESOURCE, "nominalQuota": number}]}
        for flavor, number in gpus.items()
    ]
    return {
        "cohort": "all",
        "namespaceSelector": {},
        "preemption": PREEMPTION,
        "resourceGroups": [{"coveredResources": [GPU_RESOURCE], "flavors": flavors}],
    }


def _create(api: Connection, path: str, kind: str, name: str, spec: Manifest) -> None:
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": name}, "spec": spec}
    with suppress(ConflictError):
        api.request("POST", path, body)


def _delete(api: Connection, path: str) -> None:
    """Delete it, and wait until it is gone: Kueue removes its own finalizer."""
    with suppress(NotFoundError):
        api.request("DELETE", path)
    wait_until(lambda: _is_gone(api, path), 60)


def _is_gone(api: Connection, path: str) -> bool:
    try:
        api.request("GET", path)
    except NotFoundError:
        return True
    return False
