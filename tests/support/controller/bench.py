"""The controller's view of one job's objects, against the fake API server."""

from __future__ import annotations

from functools import partial
from typing import Any

from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.core.manifests import build_budget, build_group_service, build_pod, build_token_secret
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.owned_objects import ObjectBuilders, OwnedObjects, build_current_token
from elasticctl_controller.kube.workload import KubeWorkload, Settings
from tests.support.control import ControlApi
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/default/elasticjobs"


CORE = "/api/v1/namespaces/default"


BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"


class Bench:
    """A workload on a server, and the keys it has called for."""

    def __init__(self, control: ControlApi) -> None:
        self.control = control
        self.replaced: list[float] = []
        self.keys: list[str] = []
        api = LimitedApi(control.connection(), TokenBucket(10_000, 10_000))
        makers = ObjectBuilders(
            lambda job, pod: [build_group_service(job), build_token_secret(job, "secret-token", "peers")],
            build_budget,
            token=partial(build_current_token, b"k" * 32),
        )
        self.workload = KubeWorkload(
            api,
            Settings("http://rendezvous:7777", "me", node_grace_s=0.1),
            OwnedObjects(api, makers),
            lambda job, pods: lambda pod: pod,
            self.replaced.append,
        )

    def begin(self) -> None:
        self.workload.start()
        assert self.workload.wait_synced(600)
        self.workload.subscribe(self.keys.append)
        wait_until(lambda: self.control.watches >= 3)

    def submit(self, name: str = "job", **spec: Any) -> ElasticJob:
        job = self.control.put(f"{JOBS}/{name}", shell_job(name, "true", 3, minReplicas=1, **spec))
        wait_until(lambda: (self.workload.get_job(f"default/{name}") or {}).get("metadata") == job["metadata"])
        return self.job(name)

    def job(self, name: str = "job") -> ElasticJob:
        return ElasticJob.from_manifest(self.workload.get_job(f"default/{name}") or {})

    def create(self, job: ElasticJob, index: int = 0) -> Pod:
        self.workload.pod_creator(job)(build_pod(job, index, self.workload.rendezvous_endpoint))
        return next(pod for pod in self.pods(job) if pod.index == index)

    def pods(self, job: ElasticJob) -> list[Pod]:
        return [Pod.from_manifest(pod) for pod in self.workload.list_pods(job)]

    def place(self, pod: Pod, node: str, phase: str = "Running") -> None:
        """Do to a pod what a scheduler and a kubelet do."""
        path = f"{CORE}/pods/{pod.name}"
        stored = self.control.objects[path]
        spec = {**stored["spec"], "nodeName": node}
        self.control.put(
            path, {**stored, "metadata": dict(stored["metadata"]), "spec": spec, "status": {"phase": phase}}
        )

    def add_node(self, name: str, ready: str = "True") -> None:
        conditions = [{"type": "Ready", "status": ready}]
        self.control.put(f"/api/v1/nodes/{name}", {"metadata": {"name": name}, "status": {"conditions": conditions}})
