"""The pods of jobs on Kubernetes: creates them, deletes them, and measures how long lost ones take to be replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import (
    ConflictError,
    NotFoundError,
)
from elasticctl.api.objects import as_mapping
from elasticctl.api.spec import GROUP, LABEL_GROUP, LABEL_JOB, ElasticJob
from elasticctl.kubeapi.connection import resource_path
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource
from elasticctl_controller.core.workers import owner_uid, worker_index
from elasticctl_controller.kube.limited_api import LimitedApi
from elasticctl_controller.kube.owned_objects import OwnedObjects, delete_options
from elasticctl_controller.kube.pruning import is_accepted, prune_pod
from elasticctl_controller.loop.apply_actions import NameTakenError, PodCreator

DROP_S = 600.0
"""A pod that has not been replaced by then was removed on purpose, or waits for something other than the controller."""
MAX_LOSSES = 10_000


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
        """Return the pods with the job's label, of any owner, except for pods that are about to vanish."""
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
            if self._is_foreign(job, name):
                raise NameTakenError(f"pod {name} exists, and it does not belong to this job") from e
            raise

    def _is_foreign(self, job: ElasticJob, name: str) -> bool:
        """Does a pod of this name exist that lacks the labels of the job's workers?"""
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
        """Record the losses and replacements that the watch reports."""
        if is_loss(old, new):
            self.record_loss(new or old or {})
        elif old is None and new is not None:
            self._replacements.stop_clock(_replacement_key(new))

    def record_loss(self, pod: Manifest) -> None:
        """Start to measure how long the pod's replacement takes."""
        self._replacements.record_loss(_replacement_key(pod), pod["metadata"].get("uid", ""))


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
            self._drop_old(self._removed)

    def record_loss(self, key: str, uid: str) -> None:
        """Start the clock for a pod that has just been found lost, unless it runs already."""
        with self._lock:
            if uid not in self._removed:
                self._lost_at.setdefault(key, self._clock())
                self._drop_old(self._lost_at)

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

    def _drop_old(self, times: dict[str, float]) -> None:
        """Drop the oldest entries, which come first."""
        oldest = self._clock() - DROP_S
        while times and (len(times) > MAX_LOSSES or next(iter(times.values())) < oldest):
            del times[next(iter(times))]


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
    """True for a worker of the job that the pod is labelled with: anyone can give a pod labels and owners."""
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
