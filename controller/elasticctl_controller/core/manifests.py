"""Manifests of what the controller creates for a job: pods, Services, token, policies for network and drains.

The workers of a job without `rdzvEndpoint` meet at our rendezvous service: its address and the worker's identity are
environment variables, and the job's token is a mounted file, never a value. A job with its own endpoint gets what
TorchElastic gave it: arguments in front of its own, and a Service for each worker.

`harden` fills in the security settings, tolerations and scratch volumes that a pod's template leaves open.
"""

from __future__ import annotations

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
    LABEL_MANAGED,
    MANAGER,
    WORKER_CONTAINER,
    ElasticJob,
    worker_labels,
    worker_name,
)
from elasticctl_protocol import variables
from elasticctl_protocol.variables import OnNan

TOKEN_FOLDER = "/var/run/secrets/elasticctl"  # noqa: S105 - a path, not a secret
TOKEN_FILE = f"{TOKEN_FOLDER}/token"
PEER_KEY_FILE = f"{TOKEN_FOLDER}/peers"
TOKEN_VOLUME = "elasticctl-rendezvous"  # noqa: S105
TOKEN_KEY, PEER_KEY = "token", "peers"
USER_ID = 1000
_USER = {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID}
LOST_NODE_TOLERATION_S = 10
"""How long Kubernetes leaves a pod on a node that is not ready if no controller runs. Its own default: 300."""
DEFAULT_GRACE_S = 30
"""Kubernetes' own."""
DNS_OPTIONS = ({"name": "timeout", "value": "1"}, {"name": "attempts", "value": "3"})
"""PyTorch looks up the name of every peer when ranks connect, and by default a lost answer costs 5 s."""
SCRATCH, SHARED_MEMORY = "/tmp", "/dev/shm"  # noqa: S108 - paths inside a container
_LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def build_pod(job: ElasticJob, index: int, rendezvous_endpoint: str) -> Manifest:
    """Return the pod of this index: the template, with the fields set that make it a worker of this job."""
    spec = dict(as_mapping(job.template.get("spec")))
    containers = [dict(as_mapping(item)) for item in as_list(spec.get("containers"))]
    worker = next((c for c in containers if c.get("name") == WORKER_CONTAINER), containers[0] if containers else None)
    if worker is not None:
        if job.rdzv_endpoint:
            worker["args"] = [*_torchelastic_args(job), *as_list(worker.get("args"))]
        else:
            worker["env"] = _add_missing(_environment(job, index, rendezvous_endpoint), worker.get("env"))
            worker["volumeMounts"] = _add_missing([_token_mount()], worker.get("volumeMounts"))
    if not job.rdzv_endpoint:
        spec["volumes"] = _add_missing([_token_volume(job)], spec.get("volumes"))
    name = worker_name(job.name, index)
    subdomain = name if job.rdzv_endpoint else group_name(job)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(job, index, as_mapping(job.template.get("metadata"))),
        # A restarted container would keep the name of a worker that has been counted as ended.
        "spec": spec | {"containers": containers, "restartPolicy": "Never", "hostname": name, "subdomain": subdomain},
    }


def build_service(job: ElasticJob, index: int) -> Manifest:
    """Return the headless Service of one worker, by whose name the peers in a TorchElastic job find it."""
    metadata = _metadata(job, index, {})
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": headless_spec(metadata["labels"])}


def headless_spec(selector: Mapping[str, str]) -> Manifest:
    """The spec of a Service that gives the pods selected by `selector` DNS names."""
    return {
        "clusterIP": "None",
        "selector": dict(selector),
        # Peers have to find each other before any of them can be ready.
        "publishNotReadyAddresses": True,
    }


def group_name(job: ElasticJob) -> str:
    """The name of the Service of all workers; the others reach each one as `WORKER.JOB-workers`."""
    return f"{job.name}-workers"


def token_secret_name(job: ElasticJob) -> str:
    """Name of the Secret that holds the job's rendezvous token under the key `token`.

    No other job ever has it, so the controller need not be allowed to read Secrets.
    """
    return f"{job.name}-rendezvous-{job.uid[:8]}"


def owner_reference(job: ElasticJob) -> Manifest:
    """Return the owner reference by which the cluster deletes objects with their job."""
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
    return metadata | ({"annotations": annotations} if annotations else {})


def _torchelastic_args(job: ElasticJob) -> list[str]:
    return [
        "--rdzv_backend=etcd",
        f"--rdzv_endpoint={job.rdzv_endpoint}",
        # With the bare name, as TorchElastic had it, a rerun met the remains of the previous run.
        f"--rdzv_id={job.name}-{job.uid[:8]}",
        f"--nnodes={_at_least_one(job.min)}:{_at_least_one(job.max)}",
    ]


def _environment(job: ElasticJob, index: int, endpoint: str) -> list[Manifest]:
    values = {
        variables.JOB: job.name,
        variables.JOB_UID: job.uid,
        variables.NAMESPACE: job.namespace,
        variables.WORKER: worker_name(job.name, index),
        variables.WORKER_INDEX: str(index),
        variables.RENDEZVOUS_ENDPOINT: endpoint,
        variables.TOKEN_FILE: TOKEN_FILE,
        **({variables.PEER_KEY_FILE: PEER_KEY_FILE} if job.status.token is not None else {}),
        variables.MIN_WORKERS: str(_at_least_one(job.min)),
        variables.MAX_WORKERS: str(_at_least_one(job.max)),
        variables.GRACE_S: str(grace_s(job)),
    }
    if job.policy.hang_timeout_seconds is not None:
        values[variables.HANG_TIMEOUT_S] = f"{job.policy.hang_timeout_seconds:g}"
    if job.policy.on_nan is not OnNan.WARN:
        values[variables.ON_NAN] = job.policy.on_nan.value
    references = {variables.POD_UID: "metadata.uid", variables.POD_IP: "status.podIP"}
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in references.items()),
    ]


def grace_s(job: ElasticJob) -> int | float:
    """How many seconds after SIGTERM its workers are killed."""
    grace_s = as_mapping(job.template.get("spec")).get("terminationGracePeriodSeconds")
    valid = isinstance(grace_s, int | float) and not isinstance(grace_s, bool) and grace_s >= 0
    return grace_s if valid else DEFAULT_GRACE_S  # type: ignore[return-value]


def _token_mount() -> Manifest:
    return {"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True}


def _token_volume(job: ElasticJob) -> Manifest:
    keys = (TOKEN_KEY, PEER_KEY) if job.status.token is not None else (TOKEN_KEY,)
    items = [{"key": key, "path": key} for key in keys]
    return {"name": TOKEN_VOLUME, "secret": {"secretName": token_secret_name(job), "items": items}}


def _add_missing(ours: list[Manifest], theirs: object) -> list[Any]:
    """Our entries, then theirs except for those with the same names. Ours come first so that theirs may refer to
    them."""
    names = [item["name"] for item in ours]  # not a set: a name in a template may be unhashable
    return [*ours, *(item for item in as_list(theirs) if as_mapping(item).get("name") not in names)]


def _at_least_one(count: int) -> int:
    """A group has at least one member, even in a job that may be scaled to 0."""
    return max(1, count)


def harden(pod: Manifest) -> Manifest:
    """Return the pod with safe defaults for everything that its template leaves open; `pod` is not changed."""
    spec = dict(as_mapping(pod.get("spec")))
    containers = [_restrict(as_mapping(item)) for item in as_list(spec.get("containers"))]
    initial = [_restrict(as_mapping(item)) for item in as_list(spec.get("initContainers"))]
    context = _pod_security_context(as_mapping(spec.get("securityContext")), [*containers, *initial])
    containers, initial = ([_as_user(context, item) for item in items] for items in (containers, initial))
    spec["securityContext"] = context
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("dnsConfig", {"options": [dict(option) for option in DNS_OPTIONS]})
    spec["tolerations"] = _add_tolerations(as_list(spec.get("tolerations")))
    names = [item.get("name") for item in containers]
    worker = names.index(WORKER_CONTAINER) if WORKER_CONTAINER in names else 0
    if containers:
        containers[worker] = _add_home(containers[worker])
    _add_volume(spec, containers, "elasticctl-scratch", SCRATCH, {})
    _add_volume(
        spec, containers[worker : worker + 1], "elasticctl-shm", SHARED_MEMORY, _shared_memory(containers, worker)
    )
    spec["containers"] = containers
    if initial:
        _add_volume(spec, initial, "elasticctl-scratch", SCRATCH, {})
        spec["initContainers"] = initial
    return {**pod, "spec": spec}


def _pod_security_context(context: Mapping[str, Any], containers: Sequence[Manifest]) -> Manifest:
    """The security context of the pod. It sets a user only if no container does, to avoid conflicts."""
    found = {"seccompProfile": {"type": "RuntimeDefault"}, **context}
    chosen = [_sets_user(item["securityContext"]) for item in containers]
    if _sets_user(context) or (chosen and all(chosen)):
        return found
    return {**({} if any(chosen) else _USER), "fsGroup": USER_ID, **found}


def _as_user(pod_context: Manifest, container: Manifest) -> Manifest:
    """The container with the default user, unless it or the pod sets one."""
    context = container["securityContext"]
    if _sets_user(pod_context) or _sets_user(context):
        return container
    missing = {key: value for key, value in _USER.items() if key not in pod_context}
    return {**container, "securityContext": {**missing, **context}}


def _sets_user(context: Mapping[str, Any]) -> bool:
    return "runAsUser" in context or "runAsNonRoot" in context


def _restrict(container: Mapping[str, Any]) -> Manifest:
    """The container without privileges and with a read-only root filesystem, unless it asks for them."""
    context = dict(as_mapping(container.get("securityContext")))
    if context.get("privileged") is not True:
        context.setdefault("allowPrivilegeEscalation", False)
        context.setdefault("capabilities", {"drop": ["ALL"]})
    context.setdefault("readOnlyRootFilesystem", True)
    return {**container, "securityContext": context}


def _add_home(container: Manifest) -> Manifest:
    """A user that the image does not know needs a name and a writable home for caches."""
    env = as_list(container.get("env"))
    named = [as_mapping(item).get("name") for item in env]  # may be unhashable
    missing = [{"name": n, "value": v} for n, v in (("HOME", SCRATCH), ("USER", "elasticjob")) if n not in named]
    return {**container, "env": [*env, *missing]}


def _add_tolerations(tolerations: list[Any]) -> list[Any]:
    """Leave lost nodes soon, unless the template tolerates those taints or all taints."""
    keys = [as_mapping(item).get("key") for item in tolerations]
    ours = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_TOLERATION_S}
        for key in _LOST_NODE_TAINTS
        if key not in keys and None not in keys and "" not in keys
    ]
    return [*tolerations, *ours]


def _add_volume(spec: Manifest, containers: list[Manifest], name: str, path: str, source: Manifest) -> None:
    """Mount an emptyDir at `path` in the containers that mount nothing there."""
    missing = [item for item in containers if path not in _mount_paths(item)]
    if not missing:
        return
    volumes = as_list(spec.get("volumes"))
    if all(as_mapping(volume).get("name") != name for volume in volumes):
        spec["volumes"] = [*volumes, {"name": name, "emptyDir": source}]
    for container in missing:
        mounts = as_list(container.get("volumeMounts"))
        container["volumeMounts"] = [*mounts, {"name": name, "mountPath": path}]


def _mount_paths(container: Mapping[str, Any]) -> set[str]:
    mounts = (as_mapping(item) for item in as_list(container.get("volumeMounts")))
    return {str(mount.get("mountPath", "")).rstrip("/") for mount in mounts}


def _shared_memory(containers: list[Manifest], worker: int) -> Manifest:
    """Shared memory up to the memory limit of the worker, against which it counts anyway."""
    resources = as_mapping(containers[worker].get("resources")) if containers else {}
    limit = as_mapping(resources.get("limits")).get("memory")
    return {"medium": "Memory", **({"sizeLimit": limit} if limit else {})}


def build_group_service(job: ElasticJob) -> Manifest:
    """The headless Service of all workers.

    One for all: an API server takes some hundred requests a second, and a large job should wait for its pods only.
    """
    metadata = owned_metadata(job, group_name(job))
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": headless_spec(_labels(job))}


def build_token_secret(job: ElasticJob, token: str, peer_key: str) -> Manifest:
    """The Secret that workers mount: their rendezvous token, and the key by which they recognize each other."""
    peers = {PEER_KEY: peer_key} if job.status.token is not None else {}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owned_metadata(job, token_secret_name(job)),
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token, **peers},
    }


def build_budget(job: ElasticJob) -> Manifest:
    """The PodDisruptionBudget: draining nodes leaves the job its minimum of workers.

    One worker may always be evicted, because otherwise a job at its minimum would block a drain for as long as it runs.
    Workers that are not ready may be evicted too: they do not count as available, so one that never becomes ready would
    block a drain as well.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owned_metadata(job, f"{job.name}-workers"),
        "spec": {
            "minAvailable": max(0, min(job.min, job.desired - 1)),
            "selector": {"matchLabels": _labels(job)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def build_network_policy(job: ElasticJob) -> Manifest:
    """The NetworkPolicy: only a job's own workers reach their ports, because torch's store and gloo have no passwords.

    What the workers reach themselves is not limited. Policies add up, so the namespace's owner can let others in.
    """
    own = {"matchLabels": _labels(job)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owned_metadata(job, f"{job.name}-workers"),
        "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]},
    }


def owned_metadata(job: ElasticJob, name: str) -> Manifest:
    """The metadata of an object that the cluster deletes with the job."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**_labels(job), LABEL_MANAGED: MANAGER},
        "ownerReferences": [owner_reference(job)],
    }


def _labels(job: ElasticJob) -> dict[str, str]:
    return {LABEL_GROUP: GROUP, LABEL_JOB: job.name}
