"""ElasticJob manifests whose workers are shell scripts: all that tests of clusters need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elasticctl.api.gpu_types import gpu_type, place
from elasticctl.api.spec import API_VERSION, KIND, WORKER_CONTAINER, ElasticJob, JobSpec
from elasticctl.cluster.base import Manifest
from elasticctl.templates import Template, find_template, render_manifest

LIGHT = ("--preload", "json")
"""Options of the launcher in tests that are not about spares: ranks still come from them, but they have not imported
torch. That takes 4 s of a processor for each rank, and as much again for the spare that takes its place."""
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
    """A job whose workers run `script` in sh; further keywords are fields of its spec."""
    worker = {"name": WORKER_CONTAINER, "command": ["sh", "-c", script], **(container or {})}
    template = {"spec": {"terminationGracePeriodSeconds": grace_s, "containers": [worker]}}
    replicas = {"Worker": {"replicas": workers, "restartPolicy": "OnFailure", "template": template}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        # A short pause before a failed worker is made again; tests have no minute to spare.
        "spec": {"policy": {"backoffSeconds": 0.1, "backoffMaxSeconds": 1.0}, **spec, "replicaSpecs": replicas},
    }


def light_template() -> Template:
    """The default template with the launcher's options `LIGHT`."""
    default = find_template("default", Path("/nowhere"))
    first = "command: [elasticctl-launch, "
    assert first in default.text
    return Template(default.name, default.text.replace(first, f"{first}{', '.join(LIGHT)}, "))


GOOD = """\
apiVersion: elastic.pytorch.org/v1alpha1
kind: ElasticJob
metadata: {name: digits}
spec:
  minReplicas: 1
  maxReplicas: 4
  replicaSpecs:
    Worker:
      replicas: 2
      template:
        apiVersion: v1
        kind: Pod
        spec:
          containers:
            - name: elasticjob-worker
              command: [sh]
              env:
                - {name: A, value: "1"}
              imagePullPolicy: Always
"""


def made(provider: str = "aws", gpu: str = "t4", spot: bool = True, gpus: int = 1, **status: Any) -> ElasticJob:
    """A job as `submit` makes it."""
    placement = place(provider, gpu_type(gpu) if gpu else None, gpus, spot=spot)
    spec = JobSpec(
        name="digits",
        command=("python", "train.py"),
        provider=provider,
        image="i",
        gpus_per_worker=gpus,
        node_terms=placement.terms,
        tolerations=placement.tolerations,
    )
    return ElasticJob.from_manifest({**render_manifest(spec, find_template("default", Path("none"))), "status": status})
