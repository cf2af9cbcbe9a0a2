"""ElasticJob manifests whose workers are shell scripts: all that tests of clusters need."""

from __future__ import annotations

from typing import Any

from elasticctl.api.spec import API_VERSION, KIND, WORKER_CONTAINER
from elasticctl.cluster.base import Manifest

FOREVER = "while :; do sleep 1; done"


def shell_job(
    name: str,
    script: str,
    workers: int = 1,
    *,
    namespace: str = "default",
    container: dict[str, Any] | None = None,
    grace_s: int = 5,
    **spec: Any,
) -> Manifest:
    """A job whose workers run `script` in bash; further keywords are fields of its spec."""
    worker = {"name": WORKER_CONTAINER, "command": ["bash", "-c", script], **(container or {})}
    template = {"spec": {"terminationGracePeriodSeconds": grace_s, "containers": [worker]}}
    replicas = {"Worker": {"replicas": workers, "restartPolicy": "OnFailure", "template": template}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        # A short pause before a failed worker is made again; tests have no minute to spare.
        "spec": {"policy": {"backoffSeconds": 0.1, "backoffMaxSeconds": 1.0}, **spec, "replicaSpecs": replicas},
    }
