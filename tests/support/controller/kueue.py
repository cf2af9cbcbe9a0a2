"""Jobs that name a queue, and their Workloads as an API server gives them out."""

from __future__ import annotations

from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.core.sharing.kueue import build_workload
from tests.support.controller.samples import a_job

API_VERSION = "kueue.x-k8s.io/v1beta1"
UID = "workload-uid"
TEMPLATE = {
    "metadata": {"labels": {"team": "vision"}},
    "spec": {
        "nodeSelector": {"zone": "a"},
        "containers": [
            {
                "name": "elasticjob-worker",
                "image": "trainer",
                "env": [{"name": "PASSWORD", "value": "hunter2"}],
                "resources": {"limits": {GPU_RESOURCE: 2}},
            }
        ],
    },
}


def queued(**fields: Any) -> ElasticJob:
    """A job of three workers in queue `team`, at least one and at most four; suspended, as it is submitted."""
    return a_job(**{"queue": "team", "suspend": True, "template": TEMPLATE, **fields})


def stored(job: ElasticJob, *holds: str, version: str = API_VERSION, **status: Any) -> Manifest:
    """The job's Workload, as it was built for it; of its conditions those named hold."""
    workload = build_workload(job, version, None)
    workload["metadata"] |= {"uid": UID, "resourceVersion": "7", "generation": 2}
    conditions = [
        {
            "type": name,
            "status": "True",
            "reason": name,
            "message": f"{name} it is",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
            "observedGeneration": 1,
        }
        for name in holds
    ]
    return {**workload, "status": {"conditions": conditions, **status}}


def admission(count: int | None = None, **flavors: str) -> Manifest:
    """What `status.admission` says: so many pods on these flavors, by resource."""
    given = {"name": "workers", "flavors": flavors, **({} if count is None else {"count": count})}
    return {"clusterQueue": "cluster", "podSetAssignments": [given]}
