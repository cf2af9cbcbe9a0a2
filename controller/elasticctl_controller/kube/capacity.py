"""What is shared on Kubernetes: jobs and nodes as the workload watches them; quotas, and who else has GPUs there.

Quotas and other pods have watches of their own. Of all the pods that are no workers, the API server sends those that
are on a node and have not ended, and the few with GPUs are kept.

It tells of what matters to who decides, which is little of what happens: training advances all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import HELD, PLURAL
from elasticctl.api.spec import API_VERSION, GROUP, LABEL_GROUP
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource, object_key
from elasticctl_controller.kube.limiter import LimitedApi
from elasticctl_controller.kube.pruning import prune_holder
from elasticctl_controller.kube.workload import KubeWorkload

_PROGRESS_FIELDS = ("progress", "checkpoint", "generations", "curve", "lastReconcileTime", "stepsRedone", "growth")
"""Fields of a status that change as training goes on, and nothing else."""
OTHER_PODS = Resource(
    "/api/v1/pods",
    labels=f"{LABEL_GROUP}!={GROUP}",
    fields="spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed",
)
"""Pods that hold something and are no workers."""


class KubeCapacity:
    """`elasticctl_controller.loop.arbiter.SharedCluster` over an API server."""

    def __init__(self, api: LimitedApi, workload: KubeWorkload) -> None:
        self._workload = workload
        self._quotas = ObjectStore()
        self._holders = ObjectStore(prune_holder, keep=lambda pod: pod["gpus"] > 0)
        self.reflectors = (
            Reflector(api, Resource(f"/apis/{API_VERSION}/{PLURAL}"), self._quotas),
            Reflector(api, OTHER_PODS, self._holders),
        )

    def start(self, on_news: Callable[[], None]) -> None:
        """Begin to watch quotas and other pods; call `on_news` whenever something that counts has changed."""

        def job_changed(old: Manifest | None, new: Manifest | None) -> None:
            if old is None or new is None or _without_progress(old) != _without_progress(new):
                on_news()

        self._workload.jobs.subscribe(job_changed)
        self._workload.nodes.subscribe(lambda old, new: on_news())
        self._quotas.subscribe(lambda old, new: on_news())
        self._holders.subscribe(lambda old, new: on_news())
        for reflector in self.reflectors:
            reflector.start()

    def stop(self) -> None:
        """End the watches."""
        for reflector in self.reflectors:
            reflector.stop()

    def all_jobs(self) -> list[Manifest]:
        """Return every job."""
        return self._workload.jobs.items()

    def healthy_nodes(self) -> list[Manifest]:
        """Return the nodes that are not lost; `status.held` says what others hold of one."""
        lost = self._workload.lost_nodes()
        held = Counter[str]()
        for pod in self._holders.items():
            held[pod["spec"].get("nodeName", "")] += pod["gpus"]
        nodes = [node for node in self._workload.nodes.items() if object_key(node) not in lost]
        return [_with_held(node, held[object_key(node)]) for node in nodes]

    def quotas(self) -> list[Manifest]:
        """Return every ElasticQuota."""
        return self._quotas.items()


def _with_held(node: Manifest, gpus: int) -> Manifest:
    return {**node, "status": {**node["status"], HELD: {GPU_RESOURCE: gpus}}} if gpus else node


def _without_progress(job: Manifest) -> Mapping[str, Any]:
    """The job but for its advance and its version."""
    status = {key: value for key, value in job.get("status", {}).items() if key not in _PROGRESS_FIELDS}
    metadata = {**job.get("metadata", {}), "resourceVersion": ""}
    return {"metadata": metadata, "spec": job.get("spec"), "status": status}
