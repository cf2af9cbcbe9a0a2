"""The load of the benchmarks on a cluster, and a watch that records when each pod appears."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.api.spec import API_VERSION, KIND, PLURAL, WORKER_CONTAINER
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource
from elasticctl_controller.kube.pruning import prune_pod

T = TypeVar("T")

NAMESPACE = "elasticctl-benchmark"
HOLLOW = {"kubelab/hollow": "true"}
"""The label of kubelab's hollow nodes: kubelets whose pods run without containers."""
NOBODY = "nobody"
"""The name of a scheduler that does not exist: pods that request it are never started."""
POLL_S = 0.02
ELASTIC_JOBS = resource_path(API_VERSION, NAMESPACE, PLURAL)
"""The path of ElasticJobs on the API server."""


class NotInTime(Exception):
    """Something did not happen in time."""


class Pods:
    """The pods of the benchmark's namespace, as seen by one watch; times are in monotonic seconds."""

    def __init__(self, api: Connection) -> None:
        self._store = ObjectStore(prune_pod)
        self.created_at: dict[str, float] = {}  # by uid
        self.last_created_at = 0.0
        self._store.subscribe(self._record_creation)
        self._reflector = Reflector(api, Resource(resource_path("v1", NAMESPACE, "pods")), self._store)

    def start(self) -> None:
        """Start watching."""
        self._reflector.start()
        self._reflector.wait_synced()

    def stop(self) -> None:
        """Stop watching."""
        self._reflector.stop()

    def __len__(self) -> int:
        return len(self._store.items())

    def uids(self) -> dict[str, str]:
        """Return name -> uid of all pods."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self._store.items()}

    def running(self) -> int:
        """Return the number of running pods."""
        return sum(pod["status"].get("phase") == "Running" for pod in self._store.items())

    def on(self, node: str) -> dict[str, str]:
        """Return name -> uid of the pods on a node."""
        pods = [pod for pod in self._store.items() if pod["spec"].get("nodeName") == node]
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def replaced_at(self, name: str, uid: str) -> float | None:
        """Return when another pod of this name was created; None if none has been."""
        now = self.uids().get(name)
        return None if now in (None, uid) else self.created_at[now]

    def _record_creation(self, old: Manifest | None, new: Manifest | None) -> None:
        if new is not None and (old is None or old["metadata"]["uid"] != new["metadata"]["uid"]):
            self.last_created_at = self.created_at[new["metadata"]["uid"]] = time.monotonic()


class Load:
    """Creates ElasticJobs, and removes jobs."""

    def __init__(self, api: Connection) -> None:
        self._api = api
        self.pods = Pods(api)

    def open(self) -> None:
        """Create an empty namespace."""
        namespaces = resource_path("v1", None, "namespaces")
        with suppress(NotFoundError):
            self._api.request("GET", f"{namespaces}/{NAMESPACE}")
            self.close()
        self._api.request("POST", namespaces, {"metadata": {"name": NAMESPACE}})
        accounts = resource_path("v1", NAMESPACE, "serviceaccounts", "default")
        until(lambda: self._exists(accounts), 60, "the namespace's service account")
        self.pods.start()

    def close(self) -> None:
        """Remove the namespace with its contents."""
        path = resource_path("v1", None, "namespaces", NAMESPACE)
        self._api.request("DELETE", path)
        until(lambda: not self._exists(path), 600, "the end of the namespace")

    def create_ours(self, name: str, workers: int, most: int | None = None, **pod: Any) -> None:
        """Create an ElasticJob of `workers` workers, at most `most`; further keywords are fields of their pods."""
        spec = elastic_job(workers, most or workers, template(**pod))
        self.create(ELASTIC_JOBS, API_VERSION, KIND, name, spec)

    def grow(self, name: str, workers: int, steps: int) -> None:
        """Scale one of our jobs up, `steps` workers at a time, each time once the workers before run.

        The kubelets of kubemark in this release crash when too many pods start at the same time (concurrent map
        writes).
        """
        for target in (*range(steps, workers, steps), workers):
            self.scale(name, target)
            until(lambda: self.pods.running() == target, 300, f"{target} running workers")  # noqa: B023

    def scale(self, name: str, workers: int) -> None:
        """Scale one of our jobs to this number of workers."""
        patch = {"spec": {"replicaSpecs": {"Worker": {"replicas": workers}}}}
        self._api.request("PATCH", f"{ELASTIC_JOBS}/{name}", patch, content_type=MERGE_PATCH)

    def clear(self, path: str = ELASTIC_JOBS) -> None:
        """Remove all objects of a kind, ElasticJobs by default, and wait until nothing is left of them."""
        self._api.request("DELETE", path, {"propagationPolicy": "Background"}, timeout_s=60)
        services = resource_path("v1", NAMESPACE, "services")
        until(lambda: not len(self.pods), 600, "the end of all pods")
        until(lambda: not self._api.request("GET", services)["items"], 600, "the end of all services")

    def delete_pod(self, name: str) -> None:
        """Delete a pod without grace."""
        self._api.request("DELETE", resource_path("v1", NAMESPACE, "pods", name), {"gracePeriodSeconds": 0})

    def create(self, path: str, version: str, kind: str, name: str, spec: Manifest) -> None:
        """Create an object of any kind."""
        metadata = {"name": name, "namespace": NAMESPACE}
        self._api.request("POST", path, {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})

    def _exists(self, path: str) -> bool:
        try:
            self._api.request("GET", path)
        except NotFoundError:
            return False
        return True


def until(condition: Callable[[], T | None], limit_s: float, what: str) -> T:
    """Wait until the condition is true, and return its value. Raises NotInTime if that takes too long."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise NotInTime(f"not within {limit_s:.0f} s: {what}")
        time.sleep(POLL_S)
    return found


def names(prefix: str, count: int) -> Iterable[str]:
    """Yield `prefix-0`, `prefix-1`, …"""
    return (f"{prefix}-{number}" for number in range(count))


def elastic_job(workers: int, most: int, pod: Manifest) -> Manifest:
    """The spec of an ElasticJob of `workers` workers, at most `most`."""
    worker = {"replicas": workers, "restartPolicy": "OnFailure", "template": pod}
    return {"minReplicas": 1, "maxReplicas": most, "replicaSpecs": {"Worker": worker}}


def template(**pod: Any) -> Manifest:
    """The template of a bare pod; keywords are further fields of its spec."""
    worker = {"name": WORKER_CONTAINER, "image": "lab/base:dev", "command": ["sleep", "infinity"]}
    where = {} if "schedulerName" in pod else {"nodeSelector": HOLLOW}
    # No grace: a deleted pod is gone immediately, as if its machine had failed.
    return {"spec": {"terminationGracePeriodSeconds": 0, "containers": [worker], **where, **pod}}
