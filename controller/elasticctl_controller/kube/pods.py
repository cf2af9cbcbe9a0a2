"""The pods of jobs on Kubernetes: creates them, with the objects that they need, and deletes them.

Besides its pods, a job needs headless Services, the token's Secret, a NetworkPolicy, a PodDisruptionBudget and perhaps
a PodGroup. All are owned by the job's object, so the cluster removes them with the job. An object of the same name that
belongs to somebody else is left alone, unless an earlier job of this name has left it behind.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import (
    ClusterError,
    ConflictError,
    ElasticctlError,
    ForbiddenError,
    NotFoundError,
    TooLargeError,
)
from elasticctl.api.objects import as_mapping
from elasticctl.api.podtemplate import covering_budgets
from elasticctl.api.spec import GROUP, KIND, LABEL_GROUP, LABEL_JOB, LABEL_MANAGED, MANAGER, ElasticJob
from elasticctl.kubeapi.connection import MERGE_PATCH, resource_path
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource
from elasticctl_controller.core.workers import owner_uid, worker_index
from elasticctl_controller.kube.limited_api import LimitedApi
from elasticctl_controller.kube.pruning import is_accepted, prune_pod
from elasticctl_controller.loop.apply_actions import NameTakenError, PodCreator

TRUST_S = 600.0
"""How long an object that was created is assumed to exist. After that it is looked for again, because somebody may have
deleted it."""
BUDGETS_S = 5.0
"""How long the PodDisruptionBudgets of a namespace are assumed not to change: a drain tries again every 5 s."""
MOST_BUDGETS_BYTES = 4 << 20
"""Some three thousand of them. Those of a namespace that has more are not looked through."""
_BUDGET, _POLICY, _SECRET = "PodDisruptionBudget", "NetworkPolicy", "Secret"
FORGET_S = 600.0
"""A pod that has not been replaced by then was removed on purpose, or waits for something else than the controller."""
MAX_LOSSES = 10_000

_PLURALS = {
    "Service": "services",
    _SECRET: "secrets",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PodGroup": "podgroups",
    _POLICY: "networkpolicies",
}
_MUTABLE = ("PodDisruptionBudget", "PodGroup")
"""Kinds that are patched when the job's bounds change."""

PodFinisher = Callable[[ElasticJob, list[Manifest]], Callable[[Manifest], Manifest]]
"""Returns what completes new pods of a job that has these pods into those that are created on this cluster."""

log = logging.getLogger(__name__)


class KubePods:
    """The pods of all jobs, as a watch sees them, and how they are created and deleted; thread-safe.

    `finisher` gives what completes pods before they are created, and `owned` creates the other objects that it needs.
    `on_replaced(seconds)` is called with the time it took to replace each lost pod. `namespace` limits the pods to one
    namespace ("": all).
    """

    def __init__(
        self,
        api: LimitedApi,
        owned: OwnedObjects,
        finisher: PodFinisher,
        on_replaced: Callable[[float], None],
        namespace: str = "",
    ) -> None:
        self._api, self._owned, self._finisher = api, owned, finisher
        self._replacements = ReplacementTimer(on_replaced)
        self.cache = ObjectStore(prune_pod, index_of=job_key_of)
        workers = Resource(resource_path("v1", namespace or None, "pods"), f"{LABEL_GROUP}={GROUP}")
        self.reflector = Reflector(api, workers, self.cache)

    def list_pods(self, job: ElasticJob) -> list[Manifest]:
        """Return the pods with the job's label, whoever owns them, except for those that are about to vanish."""
        return [pod for pod in self.cache.group(job.key) if not is_vanishing(pod)]

    def pod_creator(self, job: ElasticJob) -> PodCreator:
        """Return what creates pods of the job, after the objects that they need.

        It raises ConflictError if a pod's name is taken, and NameTakenError if the pod that has it is not in the cache,
        so that no event would say when it is gone.
        """
        finish = self._finisher(job, self.list_pods(job))
        return lambda manifest: self._create(job, finish(manifest))

    def _create(self, job: ElasticJob, pod: Manifest) -> None:
        self._owned.ensure(job, pod)
        try:
            with self._replacements.measure(_replacement_key(pod)):
                self.cache.record_write(self._api.request("POST", resource_path("v1", job.namespace, "pods"), pod))
        except ConflictError as e:
            name = pod["metadata"]["name"]
            if self._is_strangers(job, name):
                raise NameTakenError(f"pod {name} exists, and it does not belong to this job") from e
            raise

    def _is_strangers(self, job: ElasticJob, name: str) -> bool:
        """Is there a pod of this name without the labels of the job's workers?"""
        path, selector = resource_path("v1", job.namespace, "pods"), {"fieldSelector": f"metadata.name={name}"}
        found = self._api.request("GET", path, None, selector).get("items", ())
        labels = {LABEL_GROUP: GROUP, LABEL_JOB: job.name}
        return any(not labels.items() <= pod["metadata"].get("labels", {}).items() for pod in found)

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        """Delete this very pod, without its grace period when forced; a pod that is gone is no error."""
        options = delete_options(uid) | ({"gracePeriodSeconds": 0} if force else {})
        if not force:
            self._replacements.expect_removal(uid)
        try:
            answer = self._api.request("DELETE", resource_path("v1", job.namespace, "pods", name), options)
        except (NotFoundError, ConflictError):  # gone, or another pod has the name by now
            self.cache.record_deletion(f"{job.namespace}/{name}", uid)
            return
        if force and not answer.get("metadata", {}).get("finalizers"):
            self.cache.record_deletion(f"{job.namespace}/{name}", uid)
        elif answer.get("metadata", {}).get("deletionTimestamp") is not None:
            self.cache.record_write(answer)

    def record_change(self, old: Manifest | None, new: Manifest | None) -> None:
        """Take note of the losses and replacements that the watch reports."""
        if is_loss(old, new):
            self.record_loss(new or old or {})
        elif old is None and new is not None:
            self._replacements.stop_clock(_replacement_key(new))

    def record_loss(self, pod: Manifest) -> None:
        """Start to measure how long the pod's replacement takes."""
        self._replacements.record_loss(_replacement_key(pod), pod["metadata"].get("uid", ""))


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
    """Creates the objects that a job owns besides its pods; thread-safe. `clock` is monotonic seconds."""

    def __init__(self, api: LimitedApi, makers: ObjectBuilders, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._makers, self._clock = api, makers, clock
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
                said = _without(job, manifest["kind"])
                if not said:
                    raise
                log.warning(said, job.key, e, extra={"job": job.key})

    def ensure_budget(self, job: ElasticJob) -> None:
        """Create or update the job's PodDisruptionBudget; a failure is only logged, because no job depends on it.

        There must be none if somebody else's covers the job's pods, because Kubernetes evicts no pod that two cover.
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
        """Forget a job that is gone, and with it all that it owned."""
        with self._lock:
            self._jobs.pop(job_uid, None)

    def _budgets_in(self, namespace: str) -> list[Manifest]:
        """The PodDisruptionBudgets of a namespace, as they were lately."""
        with self._lock:
            known = self._budgets.get(namespace)
        if known is not None and self._clock() < known[1] + BUDGETS_S:
            return known[0]
        found: list[Manifest] = []
        with suppress(ForbiddenError, TooLargeError):  # the first: the role is older than this request
            path = resource_path("policy/v1", namespace, _PLURALS[_BUDGET])
            found = self._api.request("GET", path, most_bytes=MOST_BUDGETS_BYTES).get("items", [])
        with self._lock:
            self._budgets.pop(namespace, None)
            self._budgets[namespace] = (found, self._clock())  # the last to be listed is the last
            for other, (_, listed_at) in list(itertools.islice(self._budgets.items(), 2)):
                if self._clock() >= listed_at + BUDGETS_S:
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
            said = "job %s: PodDisruptionBudget %s covers its pods, so its own is deleted"
            log.info(said, job.key, other, extra={"job": job.key})
            with self._lock:
                self._budgets.pop(job.namespace, None)

    def _ensure_object(self, job: ElasticJob, manifest: Manifest) -> None:
        key = (manifest["kind"], manifest["metadata"]["name"])
        with self._lock:
            known = self._jobs.setdefault(job.uid, _Created()).objects.get(key)
        if known is not None and known[0] == manifest and self._clock() < known[1] + TRUST_S:
            return
        path = resource_path(manifest["apiVersion"], job.namespace, _PLURALS[manifest["kind"]])
        try:
            self._api.request("POST", path, manifest)
        except ConflictError:
            self._take_over(job, manifest, f"{path}/{manifest['metadata']['name']}")
        with self._lock:
            self._jobs.setdefault(job.uid, _Created()).objects[key] = (manifest, self._clock())

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
        uid = found["metadata"]["uid"]
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        self._api.request("DELETE", path, options)
        raise ConflictError(f"{what} was left by an earlier job {job.name} and is being deleted")


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


class ReplacementTimer:
    """Measures how long lost pods take to be replaced; thread-safe. `clock` is monotonic seconds.

    A key names a pod and its job: `<uid of the job>/<name of the pod>`.
    """

    def __init__(self, on_replaced: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_replaced, self._clock = on_replaced, clock
        self._lock = threading.Lock()
        self._lost_at: dict[str, float] = {}
        self._removed: dict[str, float] = {}

    def expect_removal(self, uid: str) -> None:
        """Do not count the end of this pod as a loss: it is removed on purpose."""
        with self._lock:
            self._removed[uid] = self._clock()
            self._forget_old(self._removed)

    def record_loss(self, key: str, uid: str) -> None:
        """Start the clock for a pod that has just been found lost, unless it runs already."""
        with self._lock:
            if uid not in self._removed:
                self._lost_at.setdefault(key, self._clock())
                self._forget_old(self._lost_at)

    def stop_clock(self, key: str) -> None:
        """Stop the clock without a result: another replica of the controller has created the pod."""
        with self._lock:
            self._lost_at.pop(key, None)

    @contextmanager
    def measure(self, key: str) -> Iterator[None]:
        """Stop the clock when the block, which creates the pod, ends without an error.

        A watch may report the pod before that.
        """
        with self._lock:
            at = self._lost_at.pop(key, None)
        try:
            yield
        except BaseException:
            if at is not None:
                with self._lock:
                    self._lost_at[key] = at
            raise
        if at is not None:
            self._on_replaced(self._clock() - at)

    def _forget_old(self, times: dict[str, float]) -> None:
        """Forget the oldest entries, which come first."""
        oldest = self._clock() - FORGET_S
        while times and (len(times) > MAX_LOSSES or next(iter(times.values())) < oldest):
            del times[next(iter(times))]


def delete_options(uid: str) -> Manifest:
    """The body of a deletion request that deletes this very object or none."""
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}


def is_vanishing(pod: Manifest) -> bool:
    """True for a pod that is being deleted without grace: the next event says that it is gone, and its name is free."""
    metadata = pod["metadata"]
    return (
        "deletionTimestamp" in metadata
        and metadata.get("deletionGracePeriodSeconds") == 0
        and not metadata.get("finalizers")
    )


def is_loss(old: Manifest | None, new: Manifest | None) -> bool:
    """True for a change by which a pod that ran or was to run no longer does."""
    return old is not None and _is_live(old) and (new is None or not _is_live(new))


def _is_live(pod: Manifest) -> bool:
    over = pod["status"].get("phase") in ("Succeeded", "Failed")
    return not over and "deletionTimestamp" not in pod["metadata"]


def is_placed(pod: Manifest) -> bool:
    """True for a pod that holds a place on a node: one was found for it, or accepted it, and it has not ended."""
    return bool(pod["spec"].get("nodeName")) and is_accepted(pod["status"])


def is_worker(pod: Manifest, job: Manifest | None) -> bool:
    """True for a worker of the job that the pod is labelled with: anybody can give a pod labels and owners."""
    owned = as_mapping((job or {}).get("metadata"))
    is_owner = bool(owned.get("uid")) and owner_uid(pod) == owned["uid"]
    return is_owner and worker_index(owned.get("name", ""), pod["metadata"].get("name", "")) is not None


def job_key_of(pod: Manifest) -> str:
    """Return the key of the job that a pod is labelled with."""
    metadata = pod["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata.get('labels', {}).get(LABEL_JOB, '')}"


def _replacement_key(manifest: Mapping[str, Any]) -> str:
    """Return a key that a pod shares with its replacement, but not with a later job's pod of the same name."""
    return f"{owner_uid(manifest)}/{manifest['metadata']['name']}"
