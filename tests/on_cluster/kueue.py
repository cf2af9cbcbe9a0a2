"""Kueue itself on a cluster: two queues of one cohort, with quotas in processors, and what is held there.

Where it is not installed the lab installs it, and it is stopped when the tests are over: it would answer for every pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection
from tests.on_cluster.commands import LAB, kubectl, lab
from tests.on_cluster.waiting import wait_until

GROUP, VERSION = "kueue.x-k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
FLAVOR, FLAVOR_LABEL = "spot", "elasticctl.dev/test-flavor"
WORKER_CPU_M = 100
"""The request of each worker, in thousandths of a processor: quotas count workers then."""
LEFT = (
    "deployment/kueue-controller-manager",
    "validatingwebhookconfiguration/kueue-validating-webhook-configuration",
    "mutatingwebhookconfiguration/kueue-mutating-webhook-configuration",
)
"""What of Kueue would act or answer after the tests."""


@contextmanager
def kueue(api: Connection, namespace: str, queues: tuple[str, ...]) -> Iterator[None]:
    """Kueue with a ClusterQueue and a LocalQueue of each name, and one flavor that all nodes are of."""
    there = "kueue-controller-manager" in kubectl("get", "deployments", "-A", "-o", "name")
    if not there and not LAB:
        pytest.skip("there is no Kueue, and $ELASTICCTL_TEST_LAB is not set: nobody to install it")
    if not there:
        lab("install", "kueue", timeout_s=300)
    try:
        _create(api, "resourceflavors", {"nodeLabels": {FLAVOR_LABEL: FLAVOR}}, FLAVOR)
        label_nodes(api, FLAVOR)
        for queue in queues:
            _create(api, "clusterqueues", _queue(0), queue)
            _create(api, f"namespaces/{namespace}/localqueues", {"clusterQueue": queue}, queue)
        yield
    finally:
        for queue in queues:
            _delete(api, f"namespaces/{namespace}/localqueues/{queue}")
            _delete(api, f"clusterqueues/{queue}")
        _delete(api, f"resourceflavors/{FLAVOR}")
        label_nodes(api, None)
        if not there:
            services = kubectl("get", "apiservice", "-o", "name").split()
            visibility = [name for name in services if name.endswith(f".visibility.{GROUP}")]
            for name in (*LEFT, *visibility):
                kubectl("-n", "kueue-system", "delete", name, "--ignore-not-found")


def set_quota(api: Connection, queue: str, workers: int) -> None:
    """Let the queue have so many workers of its own."""
    api.request("PATCH", f"{ROOT}/clusterqueues/{queue}", {"spec": _queue(workers)}, content_type=MERGE_PATCH)


def held(api: Connection, queue: str) -> int:
    """How many workers' quota is reserved in the queue, by Kueue's own account."""
    usage = api.request("GET", f"{ROOT}/clusterqueues/{queue}").get("status", {}).get("flavorsReservation", [])
    totals = [entry["total"] for flavor in usage for entry in flavor["resources"]]
    return sum(_milli(total) for total in totals) // WORKER_CPU_M


def describe(api: Connection, namespace: str) -> str:
    """All Workloads with what is true of them, and why the others wait: for a test that fails."""
    lines = []
    for item in api.request("GET", f"{ROOT}/namespaces/{namespace}/workloads")["items"]:
        conditions = item.get("status", {}).get("conditions", [])
        said = [f"{one['type']}={one['status']} ({one['message']})" for one in conditions]
        spec = item["spec"]
        lines.append(f"{item['metadata']['name']}: {spec['podSets'][0]['count']} at {spec.get('priority')}; {said}")
    return "\n".join(lines)


def label_nodes(api: Connection, value: str | None) -> None:
    """Have all nodes be of that flavor, or of none."""
    for node in api.request("GET", "/api/v1/nodes")["items"]:
        patch = {"metadata": {"labels": {FLAVOR_LABEL: value}}}
        api.request("PATCH", f"/api/v1/nodes/{node['metadata']['name']}", patch, content_type=MERGE_PATCH)


def _queue(workers: int) -> Manifest:
    resources = [{"name": "cpu", "nominalQuota": f"{workers * WORKER_CPU_M}m"}]
    flavors: list[dict[str, Any]] = [{"name": FLAVOR, "resources": resources}]
    return {
        "cohort": "all",
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "LowerPriority"},
        "resourceGroups": [{"coveredResources": ["cpu"], "flavors": flavors}],
    }


def _create(api: Connection, path: str, spec: Manifest, name: str) -> None:
    kinds = {"resourceflavors": "ResourceFlavor", "clusterqueues": "ClusterQueue", "localqueues": "LocalQueue"}
    kind = kinds[path.rpartition("/")[2]]
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": name}, "spec": spec}
    with suppress(ConflictError):
        api.request("POST", f"{ROOT}/{path}", body)


def _delete(api: Connection, path: str) -> None:
    """Delete it, and wait until it is gone: Kueue takes its own finalizer off."""
    with suppress(NotFoundError):
        api.request("DELETE", f"{ROOT}/{path}")
    wait_until(lambda: _is_gone(api, path), 30)


def _is_gone(api: Connection, path: str) -> bool:
    try:
        api.request("GET", f"{ROOT}/{path}")
    except NotFoundError:
        return True
    return False


def _milli(quantity: str) -> int:
    return int(quantity[:-1]) if quantity.endswith("m") else 1000 * int(quantity)
