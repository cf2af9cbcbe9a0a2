"""Manifests of what a job has on Kubernetes beside its pods: Service, token, disruption budget, PodGroup; pure."""

from __future__ import annotations

import hashlib
import hmac

from elasticctl.api.codec import Manifest
from elasticctl.api.spec import GROUP, LABEL_GROUP, LABEL_JOB, ElasticJob, PodGroups
from elasticctl_controller.core.pods import TOKEN_KEY, group_name, headless, owner_reference, token_secret_name

VOLCANO_API, COSCHEDULING_API = "scheduling.volcano.sh/v1beta1", "scheduling.x-k8s.io/v1alpha1"
LABEL_MANAGED = "app.kubernetes.io/managed-by"
MANAGER = "elasticctl"


def build_group_service(job: ElasticJob) -> Manifest:
    """The headless Service of all workers.

    One for them all: an API server takes some hundred requests a second, and a large job should wait for pods alone.
    """
    metadata = owned(job, group_name(job))
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": headless(_labels(job))}


def build_token_secret(job: ElasticJob, token: str) -> Manifest:
    """The Secret that workers mount their rendezvous token from."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owned(job, token_secret_name(job)),
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token},
    }


def build_pod_group(job: ElasticJob) -> Manifest:
    """The PodGroup of a job that asks for one: the minimum starts together or not at all, who comes later by itself."""
    api = {PodGroups.VOLCANO: VOLCANO_API, PodGroups.COSCHEDULING: COSCHEDULING_API}
    return {
        "apiVersion": api[job.sharing.pod_group or PodGroups.VOLCANO],
        "kind": "PodGroup",
        "metadata": owned(job, job.name),
        "spec": {"minMember": max(1, job.min)},
    }


def build_budget(job: ElasticJob) -> Manifest:
    """The PodDisruptionBudget: whoever drains nodes leaves the job its minimum.

    One worker may go at any time: a job at its minimum would otherwise hold up a drain for as long as it runs.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owned(job, f"{job.name}-workers"),
        "spec": {
            "minAvailable": max(0, min(job.min, job.desired - 1)),
            "selector": {"matchLabels": _labels(job)},
        },
    }


def owned(job: ElasticJob, name: str) -> Manifest:
    """The metadata of an object that the cluster removes with the job."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**_labels(job), LABEL_MANAGED: MANAGER},
        "ownerReferences": [owner_reference(job)],
    }


def _labels(job: ElasticJob) -> dict[str, str]:
    return {LABEL_GROUP: GROUP, LABEL_JOB: job.name}


def token(key: bytes, job_uid: str) -> str:
    """The bearer token of a job's workers."""
    return hmac.new(key, job_uid.encode(), hashlib.sha256).hexdigest()
