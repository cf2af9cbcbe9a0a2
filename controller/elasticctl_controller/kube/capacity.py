"""The capacity that projects share on Kubernetes: nodes, jobs, quotas, and the GPUs that other pods hold.

Jobs, nodes and pods with a worker's label are read from the workload's watches. Other pods have a watch of their own,
in which the API server sends those that are on a node and have not ended, and only those with GPUs are kept. A pod that
has a worker's label but is no job's worker counts as one of these.

The allocator is notified of relevant changes only, because training makes progress all the time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import HELD
from elasticctl.api.spec import GROUP, LABEL_GROUP
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource, object_key
from elasticctl_controller.kube.limited_api import LimitedApi
from elasticctl_controller.kube.pods import is_placed, is_worker, job_key_of
from elasticctl_controller.kube.pruning import prune_holder, unfold_job
from elasticctl_controller.kube.spending import KubeQuotas
from elasticctl_controller.kube.workload import KubeWorkload

_PROGRESS_FIELDS = (
    "progress",
    "checkpoint",
    "generations",
    "curve",
    "usage",
    "usageHistory",
    "lastReconcileTime",
    "stepsRedone",
    "growth",
)
"""Fields of a status that change because training makes progress, and for no other reason."""
OTHER_PODS = Resource(
    "/api/v1/pods",
    labels=f"{LABEL_GROUP}!={GROUP}",
    fields="spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed",
)
"""Pods that are on a node and are not workers."""


class KubeCapacity:
    """`elasticctl_controller.loop.allocator.SharedCluster` over an API server."""

    def __init__(self, api: LimitedApi, workload: KubeWorkload, quotas: KubeQuotas) -> None:
        self._workload, self._quotas = workload, quotas
        self._holders = ObjectStore(prune_holder, keep=lambda pod: pod["gpus"] > 0)
        self.reflector = Reflector(api, OTHER_PODS, self._holders)

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever the division of capacity may change."""

        def job_changed(old: Manifest | None, new: Manifest | None) -> None:
            if old is None or new is None or _without_progress(old) != _without_progress(new):
                on_change()

        def pod_changed(old: Manifest | None, new: Manifest | None) -> None:
            if self._is_pretender(new or old or {}):
                on_change()

        self._workload.jobs.subscribe(job_changed)
        self._workload.nodes.subscribe(lambda old, new: on_change())
        self._quotas.store.subscribe(lambda old, new: on_change())
        self._holders.subscribe(lambda old, new: on_change())
        self._workload.pods.cache.subscribe(pod_changed)

    def all_jobs(self) -> Iterator[Manifest]:
        """Return every job, one at a time: they may be large."""
        return map(unfold_job, self._workload.jobs.items())

    def healthy_nodes(self) -> list[Manifest]:
        """Return the nodes that are not lost; `status.held` is what other pods hold of one."""
        lost = self._workload.lost_nodes()
        held = Counter[str]()
        pretenders = filter(self._is_pretender, self._workload.pods.cache.items())
        for pod in itertools.chain(self._holders.items(), filter(is_placed, pretenders)):
            held[pod["spec"].get("nodeName", "")] += pod["gpus"]
        nodes = [node for node in self._workload.nodes.items() if object_key(node) not in lost]
        return [_with_held(node, held[object_key(node)]) for node in nodes]

    def quotas(self) -> list[Manifest]:
        """Return every ElasticQuota."""
        return self._quotas.all()

    def _is_pretender(self, pod: Manifest) -> bool:
        """True for a pod that holds GPUs and has a worker's label, but is no worker of a job that there is."""
        return pod["gpus"] > 0 and not is_worker(pod, self._workload.jobs.get(job_key_of(pod)))


def _with_held(node: Manifest, gpus: int) -> Manifest:
    return {**node, "status": {**node["status"], HELD: {GPU_RESOURCE: gpus}}} if gpus else node


def _without_progress(job: Manifest) -> Mapping[str, Any]:
    """The job without its progress and its version."""
    status = {key: value for key, value in job.get("status", {}).items() if key not in _PROGRESS_FIELDS}
    metadata = {**job.get("metadata", {}), "resourceVersion": ""}
    return {"metadata": metadata, "spec": job.get("spec"), "status": status}
