"""Manifests of what the controller makes for workers: their pods and headless Services, pure.

A job without `rdzvEndpoint` meets at our rendezvous service: the address and the worker's identity come as environment
variables, the job's token as a mounted file, never as a value. A job that brings its own endpoint gets what
TorchElastic gave it: arguments in front of its own, and a Service for each worker.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.objects import as_list, as_mapping
from elasticctl.api.spec import (
    API_VERSION,
    GROUP,
    KIND,
    LABEL_GROUP,
    LABEL_JOB,
    WORKER_CONTAINER,
    ElasticJob,
    PodGroups,
    worker_labels,
    worker_name,
)

TOKEN_FOLDER = "/var/run/secrets/elasticctl"  # noqa: S105 - a path, not a secret
TOKEN_FILE = f"{TOKEN_FOLDER}/token"
TOKEN_VOLUME = "elasticctl-rendezvous"  # noqa: S105
VOLCANO_GROUP = "scheduling.k8s.io/group-name"
COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"
"""By which pods name their PodGroup: an annotation, and a label."""
TOKEN_KEY = "token"  # noqa: S105


def build_pod(job: ElasticJob, index: int, rendezvous_endpoint: str) -> Manifest:
    """Return the pod of this index; the template's own fields stay, but for those that make it this job's worker."""
    spec = dict(as_mapping(job.template.get("spec")))
    containers = [dict(as_mapping(item)) for item in as_list(spec.get("containers"))]
    worker = next((c for c in containers if c.get("name") == WORKER_CONTAINER), containers[0] if containers else None)
    if worker is not None:
        if job.rdzv_endpoint:
            worker["args"] = [*_torchelastic_args(job), *as_list(worker.get("args"))]
        else:
            worker["env"] = _with_named(_environment(job, index, rendezvous_endpoint), worker.get("env"))
            worker["volumeMounts"] = _with_named([_token_mount()], worker.get("volumeMounts"))
    if not job.rdzv_endpoint:
        spec["volumes"] = _with_named([_token_volume(job)], spec.get("volumes"))
    if job.sharing.pod_group is PodGroups.VOLCANO:
        spec.setdefault("schedulerName", "volcano")
    name = worker_name(job.name, index)
    subdomain = name if job.rdzv_endpoint else group_name(job)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(job, index, as_mapping(job.template.get("metadata"))),
        # A restarted container would keep the name of a worker that is counted as ended.
        "spec": spec | {"containers": containers, "restartPolicy": "Never", "hostname": name, "subdomain": subdomain},
    }


def prefer_node(pod: Manifest, node: str) -> Manifest:
    """Return the pod with a wish to be put on this node; where it cannot be, another will do."""
    affinity = dict(as_mapping(pod["spec"].get("affinity")))
    there = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    by_node = dict(as_mapping(affinity.get("nodeAffinity")))
    wishes = as_list(by_node.get("preferredDuringSchedulingIgnoredDuringExecution"))
    by_node["preferredDuringSchedulingIgnoredDuringExecution"] = [*wishes, {"weight": 100, "preference": there}]
    return pod | {"spec": pod["spec"] | {"affinity": affinity | {"nodeAffinity": by_node}}}


def build_service(job: ElasticJob, index: int) -> Manifest:
    """Return the headless Service of one worker, under whose name TorchElastic's jobs find it."""
    metadata = _metadata(job, index, {})
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": headless_spec(metadata["labels"])}


def headless_spec(selector: Mapping[str, str]) -> Manifest:
    """The spec of a Service through which the pods that `selector` names are found by their host names."""
    return {
        "clusterIP": "None",
        "selector": dict(selector),
        # Peers have to find each other before any of them can be ready.
        "publishNotReadyAddresses": True,
    }


def group_name(job: ElasticJob) -> str:
    """Name of the Service of all workers of a job that meets at ours: each is `WORKER.JOB-workers` to the others."""
    return f"{job.name}-workers"


def token_secret_name(job: ElasticJob) -> str:
    """Name of the Secret that holds the job's rendezvous token under the key `token`.

    No other job ever has it, so the controller need not be allowed to read Secrets.
    """
    return f"{job.name}-rendezvous-{job.uid[:8]}"


def owner_reference(job: ElasticJob) -> Manifest:
    """Return the reference by which the cluster deletes what the job owns."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _metadata(job: ElasticJob, index: int, template: Mapping[str, Any]) -> Manifest:
    metadata: Manifest = {
        "name": worker_name(job.name, index),
        "namespace": job.namespace,
        "labels": {**as_mapping(template.get("labels")), **worker_labels(job.name, index)},
        "ownerReferences": [owner_reference(job)],
    }
    annotations = dict(as_mapping(template.get("annotations")))
    if job.sharing.pod_group is PodGroups.VOLCANO:
        annotations[VOLCANO_GROUP] = job.name
    elif job.sharing.pod_group is PodGroups.COSCHEDULING:
        metadata["labels"][COSCHEDULING_GROUP] = job.name
    return metadata | ({"annotations": annotations} if annotations else {})


def _torchelastic_args(job: ElasticJob) -> list[str]:
    return [
        "--rdzv_backend=etcd",
        f"--rdzv_endpoint={job.rdzv_endpoint}",
        # The bare name, as TorchElastic had it, made a rerun meet the ghosts of the run before.
        f"--rdzv_id={job.name}-{job.uid[:8]}",
        f"--nnodes={_nodes(job.min)}:{_nodes(job.max)}",
    ]


def _environment(job: ElasticJob, index: int, endpoint: str) -> list[Manifest]:
    values = {
        "ELASTICCTL_JOB": job.name,
        "ELASTICCTL_JOB_UID": job.uid,
        "ELASTICCTL_NAMESPACE": job.namespace,
        "ELASTICCTL_WORKER": worker_name(job.name, index),
        "ELASTICCTL_WORKER_INDEX": str(index),
        "ELASTICCTL_RDZV_ENDPOINT": endpoint,
        "ELASTICCTL_RDZV_TOKEN_FILE": TOKEN_FILE,
        "ELASTICCTL_MIN_WORKERS": str(_nodes(job.min)),
        "ELASTICCTL_MAX_WORKERS": str(_nodes(job.max)),
        "ELASTICCTL_HANG_TIMEOUT_S": f"{job.policy.hang_timeout_seconds:g}",
    }
    references = {"ELASTICCTL_POD_UID": "metadata.uid", "ELASTICCTL_POD_IP": "status.podIP"}
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in references.items()),
    ]


def _token_mount() -> Manifest:
    return {"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True}


def _token_volume(job: ElasticJob) -> Manifest:
    items = [{"key": TOKEN_KEY, "path": TOKEN_KEY}]
    return {"name": TOKEN_VOLUME, "secret": {"secretName": token_secret_name(job), "items": items}}


def _with_named(ours: list[Manifest], theirs: object) -> list[Any]:
    """Ours, then theirs but for entries of the same names. First, so that theirs may refer to them."""
    names = [item["name"] for item in ours]  # no set: a name of theirs may be anything, and not hashable
    return [*ours, *(item for item in as_list(theirs) if as_mapping(item).get("name") not in names)]


def _nodes(count: int) -> int:
    """A group has one member at least, even of a job that may be scaled to none."""
    return max(1, count)


USER_ID = 1000
_USER = {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID}
LOST_NODE_TOLERATION_S = 10
"""How long Kubernetes leaves a pod on a node that is not ready, should no controller run. Its own default: 300."""
DNS_OPTIONS = ({"name": "timeout", "value": "1"}, {"name": "attempts", "value": "3"})
"""PyTorch looks up the name of every peer's address when ranks connect; an answer that is lost costs 5 s by default."""
SCRATCH, SHARED_MEMORY = "/tmp", "/dev/shm"  # noqa: S108 - paths inside a container
_LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def harden(pod: Manifest) -> Manifest:
    """Return the pod with all of it; `pod` is not changed."""
    spec = dict(as_mapping(pod.get("spec")))
    containers = [_contained(as_mapping(item)) for item in _sequence_of_hardening(spec.get("containers"))]
    initial = [_contained(as_mapping(item)) for item in _sequence_of_hardening(spec.get("initContainers"))]
    context = _secured(as_mapping(spec.get("securityContext")), [*containers, *initial])
    containers, initial = ([_as_user(context, item) for item in items] for items in (containers, initial))
    spec["securityContext"] = context
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("dnsConfig", {"options": [dict(option) for option in DNS_OPTIONS]})
    spec["tolerations"] = _tolerant(_sequence_of_hardening(spec.get("tolerations")))
    names = [item.get("name") for item in containers]
    worker = names.index(WORKER_CONTAINER) if WORKER_CONTAINER in names else 0
    if containers:
        containers[worker] = _at_home(containers[worker])
    _add_volume(spec, containers, "elasticctl-scratch", SCRATCH, {})
    _add_volume(spec, containers[worker : worker + 1], "elasticctl-shm", SHARED_MEMORY, _shared(containers, worker))
    spec["containers"] = containers
    if initial:
        _add_volume(spec, initial, "elasticctl-scratch", SCRATCH, {})
        spec["initContainers"] = initial
    return {**pod, "spec": spec}


def _secured(context: Mapping[str, Any], containers: Sequence[Manifest]) -> Manifest:
    """The pod's own context. A user for all is in it only where no container chose one, which it might contradict."""
    found = {"seccompProfile": {"type": "RuntimeDefault"}, **context}
    chose = [_chose_user(item["securityContext"]) for item in containers]
    if _chose_user(context) or (chose and all(chose)):
        return found
    return {**({} if any(chose) else _USER), "fsGroup": USER_ID, **found}


def _as_user(pod_context: Manifest, container: Manifest) -> Manifest:
    """With the default user, unless it or the pod has one."""
    context = container["securityContext"]
    if _chose_user(pod_context) or _chose_user(context):
        return container
    missing = {key: value for key, value in _USER.items() if key not in pod_context}
    return {**container, "securityContext": {**missing, **context}}


def _chose_user(context: Mapping[str, Any]) -> bool:
    return "runAsUser" in context or "runAsNonRoot" in context


def _contained(container: Mapping[str, Any]) -> Manifest:
    """No privileges and a root filesystem that stays as it is; a privileged container must say so itself."""
    context = dict(as_mapping(container.get("securityContext")))
    if context.get("privileged") is not True:
        context.setdefault("allowPrivilegeEscalation", False)
        context.setdefault("capabilities", {"drop": ["ALL"]})
    context.setdefault("readOnlyRootFilesystem", True)
    return {**container, "securityContext": context}


def _at_home(container: Manifest) -> Manifest:
    """A user that the image does not know needs a name and a place to write caches to."""
    env = _sequence_of_hardening(container.get("env"))
    named = [as_mapping(item).get("name") for item in env]  # anything may stand there: it need not be hashable
    missing = [{"name": n, "value": v} for n, v in (("HOME", SCRATCH), ("USER", "elasticjob")) if n not in named]
    return {**container, "env": [*env, *missing]}


def _tolerant(tolerations: list[Any]) -> list[Any]:
    """With a short stay on lost nodes, unless the template has a say on those taints or on all."""
    keys = [as_mapping(item).get("key") for item in tolerations]
    short = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_TOLERATION_S}
        for key in _LOST_NODE_TAINTS
        if key not in keys and None not in keys and "" not in keys
    ]
    return [*tolerations, *short]


def _add_volume(spec: Manifest, containers: list[Manifest], name: str, path: str, source: Manifest) -> None:
    """Mount an emptyDir at `path` in those of the containers that have nothing there."""
    bare = [item for item in containers if path not in _mount_paths(item)]
    if not bare:
        return
    volumes = _sequence_of_hardening(spec.get("volumes"))
    if all(as_mapping(volume).get("name") != name for volume in volumes):
        spec["volumes"] = [*volumes, {"name": name, "emptyDir": source}]
    for container in bare:
        mounts = _sequence_of_hardening(container.get("volumeMounts"))
        container["volumeMounts"] = [*mounts, {"name": name, "mountPath": path}]


def _mount_paths(container: Mapping[str, Any]) -> set[str]:
    mounts = (as_mapping(item) for item in _sequence_of_hardening(container.get("volumeMounts")))
    return {str(mount.get("mountPath", "")).rstrip("/") for mount in mounts}


def _shared(containers: list[Manifest], worker: int) -> Manifest:
    """Shared memory: as much as the worker may use at all. It counts as the worker's memory, so this is no extra."""
    resources = as_mapping(containers[worker].get("resources")) if containers else {}
    limit = as_mapping(resources.get("limits")).get("memory")
    return {"medium": "Memory", **({"sizeLimit": limit} if limit else {})}


def _sequence_of_hardening(value: object) -> list[Any]:
    return list(value) if isinstance(value, list) else []


VOLCANO_API, COSCHEDULING_API = "scheduling.volcano.sh/v1beta1", "scheduling.x-k8s.io/v1alpha1"
LABEL_MANAGED = "app.kubernetes.io/managed-by"
MANAGER = "elasticctl"


def build_group_service(job: ElasticJob) -> Manifest:
    """The headless Service of all workers.

    One for them all: an API server takes some hundred requests a second, and a large job should wait for pods alone.
    """
    metadata = owned_metadata(job, group_name(job))
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": headless_spec(_labels(job))}


def build_token_secret(job: ElasticJob, token: str) -> Manifest:
    """The Secret that workers mount their rendezvous token from."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owned_metadata(job, token_secret_name(job)),
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token},
    }


def build_pod_group(job: ElasticJob) -> Manifest:
    """The PodGroup of a job that asks for one: the minimum starts together or not at all, who comes later by itself."""
    api = {PodGroups.VOLCANO: VOLCANO_API, PodGroups.COSCHEDULING: COSCHEDULING_API}
    return {
        "apiVersion": api[job.sharing.pod_group or PodGroups.VOLCANO],
        "kind": "PodGroup",
        "metadata": owned_metadata(job, job.name),
        "spec": {"minMember": max(1, job.min)},
    }


def build_budget(job: ElasticJob) -> Manifest:
    """The PodDisruptionBudget: whoever drains nodes leaves the job its minimum.

    One worker may go at any time: a job at its minimum would otherwise hold up a drain for as long as it runs.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owned_metadata(job, f"{job.name}-workers"),
        "spec": {
            "minAvailable": max(0, min(job.min, job.desired - 1)),
            "selector": {"matchLabels": _labels(job)},
        },
    }


def owned_metadata(job: ElasticJob, name: str) -> Manifest:
    """The metadata of an object that the cluster removes with the job."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**_labels(job), LABEL_MANAGED: MANAGER},
        "ownerReferences": [owner_reference(job)],
    }


def _labels(job: ElasticJob) -> dict[str, str]:
    return {LABEL_GROUP: GROUP, LABEL_JOB: job.name}


def derive_token(key: bytes, job_uid: str) -> str:
    """The bearer token of a job's workers."""
    return hmac.new(key, job_uid.encode(), hashlib.sha256).hexdigest()
