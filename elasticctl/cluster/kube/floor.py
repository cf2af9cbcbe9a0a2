"""What is shared on Kubernetes: jobs and nodes as the workload watches them, and quotas, with a watch of their own.

It tells of what matters to who decides, which is little of what happens: training advances all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elasticctl.cluster.kube.limiter import LimitedApi
from elasticctl.cluster.kube.reflector import Reflector, Resource
from elasticctl.cluster.kube.store import ObjectStore, key_of
from elasticctl.cluster.kube.workload import KubeWorkload
from elasticctl.codec import Manifest
from elasticctl.quota import PLURAL
from elasticctl.spec import API_VERSION

_ADVANCE = ("progress", "checkpoint", "generations", "curve", "lastReconcileTime", "stepsRedone", "growth")
"""Fields of a status that change as training goes on, and nothing else."""


class KubeFloor:
    """`elasticctl_controller.arbiter.Floor` over an API server."""

    def __init__(self, api: LimitedApi, workload: KubeWorkload) -> None:
        self._workload = workload
        self._quotas = ObjectStore()
        self.reflector = Reflector(api, Resource(f"/apis/{API_VERSION}/{PLURAL}"), self._quotas)

    def start(self, on_news: Callable[[], None]) -> None:
        """Begin to watch quotas; call `on_news` from now on whenever something that counts has changed."""

        def job_changed(old: Manifest | None, new: Manifest | None) -> None:
            if old is None or new is None or _what_counts(old) != _what_counts(new):
                on_news()

        self._workload.jobs.subscribe(job_changed)
        self._workload.nodes.subscribe(lambda old, new: on_news())
        self._quotas.subscribe(lambda old, new: on_news())
        self.reflector.start()

    def stop(self) -> None:
        """End the watch."""
        self.reflector.stop()

    def all_jobs(self) -> list[Manifest]:
        """Return every job."""
        return self._workload.jobs.items()

    def healthy_nodes(self) -> list[Manifest]:
        """Return the nodes that are not lost."""
        lost = self._workload.lost_nodes()
        return [node for node in self._workload.nodes.items() if key_of(node) not in lost]

    def quotas(self) -> list[Manifest]:
        """Return every ElasticQuota."""
        return self._quotas.items()


def _what_counts(job: Manifest) -> Mapping[str, Any]:
    """The job but for its advance and its version."""
    status = {key: value for key, value in job.get("status", {}).items() if key not in _ADVANCE}
    metadata = {**job.get("metadata", {}), "resourceVersion": ""}
    return {"metadata": metadata, "spec": job.get("spec"), "status": status}
