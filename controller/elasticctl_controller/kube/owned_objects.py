"""The objects that a job owns besides its pods: how they are built, created, updated and taken over.

A job needs headless Services, the token's Secret, a NetworkPolicy, a PodDisruptionBudget and perhaps a PodGroup. All
are owned by the job's object, so the cluster removes them with the job. An object of the same name that does not belong
to the job is left alone, unless it is of an earlier job of this name.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import (
    ClusterError,
    ConflictError,
    ElasticctlError,
    ForbiddenError,
    NotFoundError,
    TooLargeError,
)
from elasticctl.api.podtemplate import covering_budgets
from elasticctl.api.spec import KIND, LABEL_INDEX, LABEL_JOB, LABEL_MANAGED, MANAGER, ElasticJob
from elasticctl.kubeapi.connection import MERGE_PATCH, resource_path
from elasticctl.kubeapi.features import ALL, Feature
from elasticctl_controller.core.group.worker_tokens import derive_peer_key, derive_token
from elasticctl_controller.core.manifests import (
    build_group_service,
    build_network_policy,
    build_service,
    build_token_secret,
)
from elasticctl_controller.kube.gangs import build_gang, gang_name, group_of
from elasticctl_controller.kube.limited_api import LimitedApi

TRUST_S = 600.0
"""How long an object that was created is assumed to exist. After that it is checked again, because it may have been
deleted."""
BUDGETS_S = 5.0
"""How long the PodDisruptionBudgets of a namespace are assumed not to change: a drain tries again every 5 s."""
MOST_BUDGETS_BYTES = 4 << 20
"""Some three thousand of them. In a namespace that has more, they are ignored."""
_BUDGET, _POLICY, _SECRET = "PodDisruptionBudget", "NetworkPolicy", "Secret"
_PLURALS = {
    "Service": "services",
    _SECRET: "secrets",
    _BUDGET: "poddisruptionbudgets",
    "PodGroup": "podgroups",
    _POLICY: "networkpolicies",
}
_MUTABLE = (_BUDGET, "PodGroup")
"""Kinds that are patched when the job's bounds change."""

GroupBuilder = Callable[[ElasticJob, list[Manifest]], Manifest | None]
"""Builds the PodGroup that the pods of a job name, if they name one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectBuilders:
    """Build the manifests of the objects that must exist before a pod (`companions`), and of a job's `budget`.

    `group` builds the PodGroup that the pods of a job name, whose minimum may change while they wait to be placed.
    `token` builds the Secret with the job's current token.
    """

    companions: Callable[[ElasticJob, Manifest], list[Manifest]]
    budget: Callable[[ElasticJob], Manifest]
    group: Callable[[ElasticJob, list[Manifest]], Manifest | None] = lambda job, pods: None
    token: Callable[[ElasticJob], Manifest | None] = lambda job: None


@dataclass(slots=True)
class _Created:
    """The objects of one job that are known to exist: (kind, name) -> (as it was created, when)."""

    objects: dict[tuple[str, str], tuple[Manifest, float]] = field(default_factory=dict)


class OwnedObjects:
    """Creates the objects that a job owns besides its pods; thread-safe."""

    def __init__(self, api: LimitedApi, makers: ObjectBuilders) -> None:
        self._api, self._makers = api, makers
        self._lock = threading.Lock()
        self._jobs: dict[str, _Created] = {}
        self._budgets: dict[str, tuple[list[Manifest], float]] = {}  # by namespace, and when they were listed

    def ensure(self, job: ElasticJob, pod: Manifest) -> None:
        """Create what `pod` needs if it is missing. Raises ConflictError while objects of an earlier job are in the
        way.

        If the controller may not create a NetworkPolicy, that is only logged: an administrator who withholds the right
        has other policies. So is a Secret that it may not change, because the token in it stays valid until then.
        """
        for manifest in self._makers.companions(job, pod):
            try:
                self._ensure_object(job, manifest)
            except ForbiddenError as e:
                text = _without(job, manifest["kind"])
                if not text:
                    raise
                log.warning(text, job.key, e, extra={"job": job.key})

    def ensure_budget(self, job: ElasticJob) -> None:
        """Create or update the job's PodDisruptionBudget; a failure is only logged, because no job depends on it.

        There must be none if another budget covers the job's pods, because Kubernetes evicts no pod that two cover.
        """
        if job.deleting:
            return
        try:
            others = covering_budgets(job, self._budgets_in(job.namespace))
            if others:
                self._withdraw(job, self._makers.budget(job), others[0]["metadata"]["name"])
            else:
                self._ensure_object(job, self._makers.budget(job))
        except ElasticctlError as e:
            log.warning("job %s: no PodDisruptionBudget: %s", job.key, e, extra={"job": job.key})

    def put_token(self, job: ElasticJob) -> None:
        """Put the job's current token into its Secret."""
        secret = self._makers.token(job)
        if secret is not None:
            self._ensure_object(job, secret)

    def ensure_group(self, job: ElasticJob, pods: list[Manifest]) -> None:
        """Keep the PodGroup that the job's `pods` name in step with its minimum; a failure is only logged."""
        try:
            group = None if job.deleting else self._makers.group(job, pods)
            if group is not None:
                self._ensure_object(job, group)
        except ElasticctlError as e:
            log.warning("job %s: its PodGroup is not up to date: %s", job.key, e, extra={"job": job.key})

    def drop_job(self, job_uid: str) -> None:
        """Drop a job that is gone, and with it all that it owned."""
        with self._lock:
            self._jobs.pop(job_uid, None)

    def _budgets_in(self, namespace: str) -> list[Manifest]:
        """The PodDisruptionBudgets of a namespace, as of a few seconds ago at most."""
        with self._lock:
            known = self._budgets.get(namespace)
        if known is not None and time.monotonic() < known[1] + BUDGETS_S:
            return known[0]
        found: list[Manifest] = []
        with suppress(ForbiddenError, TooLargeError):  # the first: the role is older than this request
            path = resource_path("policy/v1", namespace, _PLURALS[_BUDGET])
            found = self._api.request("GET", path, most_bytes=MOST_BUDGETS_BYTES).get("items", [])
        with self._lock:
            self._budgets.pop(namespace, None)
            self._budgets[namespace] = (found, time.monotonic())  # in the order in which they were listed
            for other, (_, listed_at) in list(itertools.islice(self._budgets.items(), 2)):
                if time.monotonic() >= listed_at + BUDGETS_S:
                    del self._budgets[other]
        return found

    def _withdraw(self, job: ElasticJob, manifest: Manifest, other: str) -> None:
        """Delete the job's budget, if it has one."""
        name = manifest["metadata"]["name"]
        with self._lock:
            self._jobs.setdefault(job.uid, _Created()).objects.pop((_BUDGET, name), None)
        for budget in self._budgets_in(job.namespace):
            metadata = budget["metadata"]
            if metadata["name"] != name or job.uid not in [item["uid"] for item in metadata.get("ownerReferences", ())]:
                continue
            path = resource_path("policy/v1", job.namespace, _PLURALS[_BUDGET], name)
            with suppress(NotFoundError, ConflictError):
                self._api.request("DELETE", path, delete_options(metadata["uid"]))
            text = "job %s: PodDisruptionBudget %s covers its pods, so its own is deleted"
            log.info(text, job.key, other, extra={"job": job.key})
            with self._lock:
                self._budgets.pop(job.namespace, None)

    def _ensure_object(self, job: ElasticJob, manifest: Manifest) -> None:
        key = (manifest["kind"], manifest["metadata"]["name"])
        with self._lock:
            known = self._jobs.setdefault(job.uid, _Created()).objects.get(key)
        if known is not None and known[0] == manifest and time.monotonic() < known[1] + TRUST_S:
            return
        path = resource_path(manifest["apiVersion"], job.namespace, _PLURALS[manifest["kind"]])
        try:
            self._api.request("POST", path, manifest)
        except ConflictError:
            self._take_over(job, manifest, f"{path}/{manifest['metadata']['name']}")
        with self._lock:
            self._jobs.setdefault(job.uid, _Created()).objects[key] = (manifest, time.monotonic())

    def _take_over(self, job: ElasticJob, manifest: Manifest, path: str) -> None:
        """Update the object that has this name already if it is this job's own; delete it if an earlier job left it."""
        if manifest["kind"] == _SECRET:
            if job.status.token is not None:  # the name is unique to this job, and the controller may not read Secrets
                self._api.request("PUT", path, manifest)
            return
        found = self._api.request("GET", path)
        owners = found["metadata"].get("ownerReferences", ())
        what = f"{manifest['kind']} {manifest['metadata']['name']} in namespace {job.namespace}"
        if any(owner.get("uid") == job.uid for owner in owners):
            if manifest["kind"] in _MUTABLE and not _contains(found["spec"], manifest["spec"]):
                self._api.request("PATCH", path, {"spec": manifest["spec"]}, content_type=MERGE_PATCH)
            return
        of_earlier = any((owner.get("kind"), owner.get("name")) == (KIND, job.name) for owner in owners)
        if not of_earlier and not (not owners and _is_orphan(job, found)):
            raise ClusterError(
                f"{what} does not belong to this job, which needs its name. FIX: rename the job or delete the object"
            )
        self._api.request("DELETE", path, delete_options(found["metadata"]["uid"]))
        raise ConflictError(f"{what} was left by an earlier job {job.name} and is being deleted")


def build_named_group(job: ElasticJob, pods: list[Manifest], features: Collection[Feature] = ALL) -> Manifest | None:
    """The PodGroup of Kubernetes that these pods of the job name, if they name one."""
    if Feature.GANGS not in features:
        return None
    return build_gang(job) if any(group_of(pod) == gang_name(job) for pod in pods) else None


def build_companions(
    key: bytes, job: ElasticJob, pod: Manifest, build_group: GroupBuilder = build_named_group
) -> list[Manifest]:
    """What must exist before a pod: a NetworkPolicy, a Service (its own, or that of all workers with their token), and
    perhaps a PodGroup.
    """
    named = build_group(job, [pod])
    group = [build_network_policy(job), *([named] if named is not None else [])]
    if job.rdzv_endpoint:
        return [*group, build_service(job, int(pod["metadata"]["labels"][LABEL_INDEX]))]
    return [*group, build_group_service(job), build_current_token(key, job)]


def build_current_token(key: bytes, job: ElasticJob) -> Manifest:
    """The Secret with the job's current token."""
    number = job.status.token.number if job.status.token is not None else 0
    return build_token_secret(job, derive_token(key, job.uid, number), derive_peer_key(key, job.uid))


def _is_orphan(job: ElasticJob, found: Manifest) -> bool:
    """Did an earlier job own this, until it was deleted with `--cascade=orphan`?"""
    labels = found["metadata"].get("labels", {})
    return (labels.get(LABEL_MANAGED), labels.get(LABEL_JOB)) == (MANAGER, job.name)


def _without(job: ElasticJob, kind: str) -> str:
    """What to log about an object that the controller may not create, if a pod can do without it; else nothing."""
    if kind == _POLICY:
        return "job %s: no NetworkPolicy, so any pod may reach its workers' ports: %s"
    has_former = kind == _SECRET and job.status.token is not None and job.status.token.number > 1
    return "job %s: its Secret cannot be changed, so its previous token stays valid: %s" if has_former else ""


def _contains(found: Manifest, wanted: Manifest) -> bool:
    return all(found.get(name) == value for name, value in wanted.items())


def delete_options(uid: str) -> Manifest:
    """The body of a deletion request that deletes this very object or none."""
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
