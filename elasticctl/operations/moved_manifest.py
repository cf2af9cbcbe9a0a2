"""The manifest of a job that moves to another context: its storage, workspace, nodes and image there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import UsageError
from elasticctl.api.goal import ON_DEMAND, parse_order
from elasticctl.api.gpu_types import (
    AWS_CAPACITY_LABELS,
    GKE_GPU_LABEL,
    GKE_SPOT_LABEL,
    GPU_TYPES,
    INSTANCE_LABEL,
    GpuType,
    place,
)
from elasticctl.api.objects import at
from elasticctl.api.podtemplate import (
    capacity,
    hardware,
    node_labels,
    set_variable,
    worker_container,
)
from elasticctl.api.spec import (
    ANNOTATION_FORMER_STORAGES,
    ANNOTATION_MOVED_FROM,
    ANNOTATION_MOVING_FROM,
    ANNOTATION_RERUN_OF,
    ElasticJob,
)
from elasticctl.operations.rerun import Rerun, rerun_manifest
from elasticctl.operations.storage_urls import sibling_url
from elasticctl.settings.contexts import LOCAL, Context
from elasticctl_protocol import variables

WORKSPACES = "workspaces"
"""Where a moved job's workspace is kept, next to its state."""
_CLOUDS = ("aws", "gcp")
_KNOWN_TAINTS = ("nvidia.com/gpu", GKE_SPOT_LABEL)
_KNOWN_LABELS = (INSTANCE_LABEL, GKE_GPU_LABEL, GKE_SPOT_LABEL, *(label for label, _, _ in AWS_CAPACITY_LABELS))


@dataclass(frozen=True, slots=True)
class JobLocation:
    """The location of a job, now or later: its context, namespace and storage URL."""

    context: Context
    namespace: str
    url: str

    @property
    def mark(self) -> str:
        """The value of the annotation on the job at the other end."""
        return f"{self.context.name} {self.url}"


def moved_manifest(manifest: Manifest, old: JobLocation, new: JobLocation) -> Manifest:
    """The job as it is created in its new place: suspended. Raises UsageError if it cannot run there."""
    start = hardware(ElasticJob.from_manifest(manifest)).env.get(variables.START_FROM, "")
    made = rerun_manifest(manifest, Rerun(manifest["metadata"]["name"], new.url, start))
    metadata = made["metadata"]
    metadata["namespace"] = new.namespace
    annotations = {key: value for key, value in metadata["annotations"].items() if key != ANNOTATION_RERUN_OF}
    before = at(manifest, "metadata", "annotations", ANNOTATION_RERUN_OF)
    metadata["annotations"] = annotations | ({ANNOTATION_RERUN_OF: before} if before else {})
    metadata["annotations"][ANNOTATION_MOVED_FROM] = old.mark
    metadata["annotations"][ANNOTATION_MOVING_FROM] = f"{old.context.name} {new.context.name}"
    made["spec"]["suspend"] = True
    template = at(made, "spec", "replicaSpecs", "Worker", "template")
    _set_storage(template, new.url)
    _adapt_nodes(template, ElasticJob.from_manifest(manifest), old.context, new.context)
    adapt_pools(made["spec"], old.context, new.context)
    return made


def storage_patch(manifest: Manifest, old: JobLocation, new: JobLocation) -> dict[str, Any]:
    """The patch that lets a job continue in its context with another storage."""
    template = copy.deepcopy(at(manifest, "spec", "replicaSpecs", "Worker", "template"))
    _set_storage(template, new.url)
    containers = {"spec": {"containers": template["spec"]["containers"]}}
    former = dict.fromkeys([*ElasticJob.from_manifest(manifest).former_storages, old.url])
    annotations = {ANNOTATION_MOVED_FROM: old.mark, ANNOTATION_FORMER_STORAGES: "\n".join(former)}
    return {
        "metadata": {"annotations": annotations},
        "spec": {"suspend": False, "replicaSpecs": {"Worker": {"template": containers}}},
    }


def workspace_of(manifest: Manifest) -> tuple[str, str]:
    """The URL and digest of a job's workspace; blank if it has none."""
    url, _, digest = hardware(ElasticJob.from_manifest(manifest)).env.get(variables.WORKSPACE, "").rpartition("#")
    return (url, digest) if url else ("", "")


def workspaces_next_to(url: str) -> str:
    """Where the workspace is stored when the job's state is stored at `url`."""
    return sibling_url(url, WORKSPACES)


def _set_storage(template: Any, url: str) -> None:
    container = worker_container(template)
    set_variable(container, variables.STORAGE, url)
    items = at(container, "env")
    for item in items if isinstance(items, list) else ():
        if at(item, "name") == variables.WORKSPACE:
            item["value"] = f"{workspaces_next_to(url)}#{str(at(item, 'value')).rpartition('#')[2]}"


def _adapt_nodes(template: Any, job: ElasticJob, old: Context, new: Context) -> None:
    """Translate a job's requirements on nodes for another provider."""
    if (old.provider == LOCAL) != (new.provider == LOCAL):
        raise UsageError(
            f"{job.name} cannot be moved between this machine and a cluster: commands and images"
            " differ. FIX: move its state"
            f" alone with --to {old.name} --storage URL, or submit it there again"
        )
    container = worker_container(template)
    if new.image and at(container, "image") == old.image:
        container["image"] = new.image
    spec = template["spec"]
    if new.service_account and spec.get("serviceAccountName", "") == old.service_account:
        spec["serviceAccountName"] = new.service_account
    if old.provider == new.provider:
        return
    gpu, found = _gpu_of(job), hardware(job)
    if found.gpus_per_worker and gpu is None and new.provider in _CLOUDS:
        raise UsageError(f"{job.name} does not say which GPU type it needs, so it cannot be moved to {new.provider}")
    wanted = place(
        new.provider,
        gpu if new.provider in _CLOUDS else None,
        found.gpus_per_worker,
        spot=capacity(job.template) != ON_DEMAND,
    )
    kept = [item for item in spec.get("tolerations") or () if at(item, "key") not in _KNOWN_TAINTS]
    spec["tolerations"] = [*kept, *(dict(item) for item in wanted.tolerations)]
    _set_nodes(spec, wanted.terms)
    if any(at(item, "name") == variables.NOTICE_SOURCE for item in at(container, "env") or ()):
        set_variable(container, variables.NOTICE_SOURCE, new.provider if new.provider in _CLOUDS else "")


def adapt_pools(spec: dict[str, Any], old: Context, new: Context) -> None:
    """Replace the order of pools by the new context's; another provider does not know the old one's pools."""
    if "pools" in spec and new.pools:
        spec["pools"] = parse_order(new.pools, new.pool_wait_s or None).as_spec()
    elif old.provider != new.provider:
        spec.pop("pools", None)


def _gpu_of(job: ElasticJob) -> GpuType | None:
    """The GPU type that the pods request, by instance types or by GKE's label; None if they request none."""
    labels = node_labels(job.template)
    instances, accelerators = labels.get(INSTANCE_LABEL, ()), labels.get(GKE_GPU_LABEL, ())
    for gpu in GPU_TYPES.values():
        if gpu.gke_accelerator and gpu.gke_accelerator in accelerators:
            return gpu
        if any(instance in sizes for sizes in gpu.aws.values() for instance in instances):
            return gpu
    return None


def _set_nodes(spec: dict[str, Any], terms: tuple[Mapping[str, tuple[str, ...]], ...]) -> None:
    """Replace the pod's requirements on nodes, except for the user's own labels."""
    selector = {key: value for key, value in (spec.get("nodeSelector") or {}).items() if key not in _KNOWN_LABELS}
    if selector or "nodeSelector" in spec:
        spec["nodeSelector"] = selector
    affinity = spec.setdefault("affinity", {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    nodes = {key: value for key, value in (affinity.get("nodeAffinity") or {}).items() if key != required}
    if terms:
        nodes[required] = {
            "nodeSelectorTerms": [
                {
                    "matchExpressions": [
                        {"key": label, "operator": "In", "values": list(values)}
                        if values
                        else {"key": label, "operator": "DoesNotExist"}
                        for label, values in term.items()
                    ]
                }
                for term in terms
            ]
        }
    affinity["nodeAffinity"] = nodes
