"""Kueue on an API server: the Workloads of jobs, flavors and priority classes, and what follows for a job.

Nothing is requested from Kueue until a job names a queue. From then on, two watches fill a cache: of the jobs'
Workloads, and of flavors. The answer to a write goes into the cache immediately.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ClusterError, ConflictError, NotFoundError
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ANNOTATION_ADMITTED, GROUP, KIND, KUEUE, LABEL_GROUP, ElasticJob
from elasticctl.kubeapi.connection import MERGE_PATCH, resource_path
from elasticctl.kubeapi.features import Feature, left_out
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource
from elasticctl_controller.core.sharing.kueue import (
    SUSPENDED_BY_OWNER,
    Growth,
    KueueStep,
    KueueVerdict,
    QueuedJob,
    apply_placement,
    build_finish,
    build_pods_ready,
    build_release,
    build_update,
    build_workload,
    flavor_names,
    judge_admission,
    priority_class,
    workload_name,
)
from elasticctl_controller.core.sharing.kueue_growth import build_extra, judge_end, judge_growth, list_extras
from elasticctl_controller.kube.limited_api import LimitedApi
from elasticctl_controller.kube.owned_objects import delete_options
from elasticctl_controller.kube.pruning import prune_flavor, prune_workload

VERSIONS = ("v1beta1", "v1beta2")
"""In the order in which they are tried: most clusters serve the first."""
RECHECK_S = 60.0
"""After this time a cluster without Kueue is asked again."""
FIRST_LIST_S = 5.0
WORKLOADS, FLAVORS = "workloads", "resourceflavors"

log = logging.getLogger(__name__)


class KueueObjects:
    """Kueue's objects, read and written; thread-safe.

    `on_change(key)` is called for each job whose Workload has changed. `clock` is monotonic seconds. `namespace` limits
    the Workloads to one namespace ("": all).
    """

    def __init__(
        self,
        api: LimitedApi,
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        namespace: str = "",
    ) -> None:
        self._api, self._on_change, self._clock, self._namespace = api, on_change, clock, namespace
        self._lock = threading.Lock()
        self._version, self._look_at = "", 0.0
        self._workloads, self._flavors = ObjectStore(prune_workload, _job_key), ObjectStore(prune_flavor)
        self.reflectors: tuple[Reflector, ...] = ()

    def version(self) -> str:
        """Return the version of Kueue's API to use; "" where Kueue is not installed.

        Raises ClusterError until its objects have been listed.
        """
        with self._lock:
            if not self._version and self._clock() >= self._look_at:
                self._version = next(filter(self._serves, VERSIONS), "")
                self._look_at = self._clock() + RECHECK_S
                if self._version:
                    self._watch()
        if not all(reflector.wait_synced(0) for reflector in self.reflectors):
            raise ClusterError(f"Kueue's {WORKLOADS} and {FLAVORS} are not listed yet. Next: see the controller's log")
        return self._version

    @property
    def api_version(self) -> str:
        """`GROUP/VERSION` of Kueue's objects."""
        return f"{KUEUE}/{self._version}"

    def start(self) -> None:
        """Start nothing: the watches start once a job names a queue."""

    def stop(self) -> None:
        """Stop the watches, if there are any."""
        with self._lock:
            for reflector in self.reflectors:
                reflector.stop()

    @property
    def alive(self) -> bool:
        """False once the thread of a watch has died, which is an error."""
        return all(reflector.alive for reflector in self.reflectors)

    def workload(self, namespace: str, name: str) -> Manifest | None:
        """Return the Workload of a job; None when there is none."""
        return self._workloads.get(f"{namespace}/{name}")

    def workloads_of(self, job: ElasticJob) -> list[Manifest]:
        """Return all Workloads that belong to a job of this name."""
        return self._workloads.group(job.key)

    def flavor(self, name: str) -> Manifest | None:
        """Return a ResourceFlavor; None when there is none."""
        return self._flavors.get(name)

    def priority(self, name: str, *, of_pods: bool) -> int:
        """Return the value of a PriorityClass (`of_pods`) or WorkloadPriorityClass; raises NotFoundError."""
        api, plural = (self.api_version, "workloadpriorityclasses")
        if of_pods:
            api, plural = ("scheduling.k8s.io/v1", "priorityclasses")
        value = self._api.request("GET", resource_path(api, None, plural, name)).get("value")
        return value if isinstance(value, int) else 0

    def create(self, workload: Manifest) -> None:
        """Create a Workload; ConflictError when it exists."""
        path = resource_path(self.api_version, workload["metadata"]["namespace"], WORKLOADS)
        self._workloads.record_write(self._api.request("POST", path, workload))

    def patch(self, workload: Manifest, patch: Manifest) -> None:
        """Patch this very Workload; ConflictError when it is gone."""
        self._patch(workload, patch, "")

    def patch_status(self, workload: Manifest, patch: Manifest) -> None:
        """Patch its status; ConflictError when it has changed since the version that the patch names."""
        self._patch(workload, patch, "status")

    def delete(self, workload: Manifest) -> None:
        """Delete this very Workload; one that is gone is no error."""
        metadata = workload["metadata"]
        with suppress(NotFoundError, ConflictError):
            self._api.request("DELETE", self._path(workload), delete_options(metadata["uid"]))
        self._workloads.record_deletion(f"{metadata['namespace']}/{metadata['name']}", metadata["uid"])

    def _patch(self, workload: Manifest, patch: Manifest, part: str) -> None:
        body = {**patch, "metadata": {"uid": workload["metadata"]["uid"], **patch.get("metadata", {})}}
        try:
            answer = self._api.request("PATCH", self._path(workload, part), body, content_type=MERGE_PATCH)
        except NotFoundError as e:
            raise ConflictError(f"Workload {workload['metadata']['name']} is gone") from e
        self._workloads.record_write(answer)

    def _path(self, workload: Manifest, part: str = "") -> str:
        metadata = workload["metadata"]
        return resource_path(self.api_version, metadata["namespace"], WORKLOADS, metadata["name"], part)

    def _serves(self, version: str) -> bool:
        try:
            self._api.request("GET", f"/apis/{KUEUE}/{version}")
        except NotFoundError:
            return False
        return True

    def _watch(self) -> None:
        log.info("a job names a queue: watching the objects of Kueue's %s", self.api_version)
        workloads = resource_path(self.api_version, self._namespace or None, WORKLOADS)
        flavors = resource_path(self.api_version, None, FLAVORS)
        reflectors = (
            Reflector(self._api, Resource(workloads, f"{LABEL_GROUP}={GROUP}"), self._workloads),
            Reflector(self._api, Resource(flavors), self._flavors),
        )
        for reflector in reflectors:
            reflector.start()
        until = self._clock() + FIRST_LIST_S
        for reflector in reflectors:
            reflector.wait_synced(max(0.0, until - self._clock()))
        self.reflectors = reflectors
        self._workloads.subscribe(self._on_workload_change)

    def _on_workload_change(self, old: Manifest | None, new: Manifest | None) -> None:
        key = _job_key(new or old or {})
        if key:
            self._on_change(key)


def _job_key(workload: Manifest) -> str:
    """`NAMESPACE/NAME` of the job that owns a Workload; "" if none does."""
    metadata = workload["metadata"]
    owners = (owner for owner in metadata.get("ownerReferences", ()) if owner.get("kind") == KIND)
    return next((f"{metadata['namespace']}/{owner.get('name')}" for owner in owners), "")


BY_KUEUE = "kueue"
NOT_INSTALLED = "waits for Kueue, which is not installed in this cluster"


class NoQueueing:
    """`loop.controller.Queueing` for a controller that was installed without Kueue: only `suspend` decides."""

    def check_admission(self, job: ElasticJob, pods: Iterable[Pod]) -> QueuedJob:
        """Return the job with what it waits for, if it does."""
        held = f"waits for Kueue: {left_out(Feature.KUEUE)}" if job.suspend and not job.moved_to else ""
        return QueuedJob(replace(job, held=held))

    def carry_out(self, queued: QueuedJob, job: ElasticJob) -> None:
        """Nothing is ever due."""


PatchJob = Callable[[ElasticJob, Manifest], None]
"""Patch a job's object; ConflictError when it is gone."""


class KueueQueueing:
    """Implements `loop.controller.Queueing`."""

    def __init__(self, objects: KueueObjects, patch_job: PatchJob) -> None:
        self._objects, self._patch_job = objects, patch_job

    def check_admission(self, job: ElasticJob, pods: Iterable[Pod]) -> QueuedJob:
        """Return the job as Kueue admits it. Without Kueue, only `suspend` decides, which another controller may set.

        Raises ClusterError while Kueue's answer is unknown; the job is left alone until then.
        """
        if not self._objects.version():
            held = NOT_INSTALLED if job.suspend and not job.moved_to else ""
            return QueuedJob(replace(job, held=held), again_s=None if job.status.phase.terminal else RECHECK_S)
        workload = self._objects.workload(job.namespace, workload_name(job))
        alive = sum(pod.owner_uid == job.uid and not pod.ended for pod in pods)
        verdict = judge_admission(job, workload, alive)
        extras = list_extras(job, self._objects.workloads_of(job))
        if verdict.workers is None or workload is None:
            return replace(_not_admitted(job, workload, verdict), growth=judge_end(job, extras, alive))
        placed = self._place(job, workload)
        growth = judge_growth(placed, workload, extras, alive)
        return QueuedJob(_bounded(placed, growth.workers), verdict.step, workload, growth=growth)

    def carry_out(self, queued: QueuedJob, job: ElasticJob) -> None:
        """Take the step that is due, on `job` as it is by now; raises ElasticctlError if that fails."""
        workload, step = queued.workload, queued.step
        if step is not None:
            log.info("job %s: %s for Kueue", job.key, step.name.lower(), extra={"job": job.key})
        if step is KueueStep.START and workload is not None:
            admitted = {"annotations": {ANNOTATION_ADMITTED: workload["metadata"]["uid"]}}
            self._patch_job(job, {"metadata": admitted, "spec": {"suspend": False}})
        elif step is KueueStep.STOP:
            self._patch_job(job, {"metadata": {"annotations": {ANNOTATION_ADMITTED: None}}, "spec": {"suspend": True}})
        elif step is KueueStep.CREATE:
            self._objects.create(self._wanted_workload(job))
        elif step is not None and workload is not None:
            self._change_workload(step, job, workload)
        self._change_size(queued.growth, queued.job, workload)

    def _change_size(self, growth: Growth, placed: ElasticJob, workload: Manifest | None) -> None:
        """Release and delete before anything is requested, because waiting Workloads may need that quota."""
        for done, extras in (("released", growth.release), ("deleted", growth.delete), ("ready", growth.ready)):
            if extras:
                names = ", ".join(extra["metadata"]["name"] for extra in extras)
                log.info("job %s: %s for Kueue: %s", placed.key, done, names, extra={"job": placed.key})
        if growth.create:
            wanted = ", ".join(map(str, growth.create))
            log.info("job %s: asks Kueue for workers %s", placed.key, wanted, extra={"job": placed.key})
        for extra in growth.release:
            self._objects.patch_status(extra, build_release(extra, time.time()))
        for extra in growth.delete:
            self._objects.delete(extra)
        for extra in growth.ready:
            self._objects.patch_status(extra, build_pods_ready(extra, time.time()))
        if workload is not None:
            for number in growth.create:
                self._objects.create(build_extra(placed, workload, number, self._objects.api_version))

    def _change_workload(self, step: KueueStep, job: ElasticJob, workload: Manifest) -> None:
        """Take one of the steps that change a Workload."""
        if step is KueueStep.UPDATE:
            self._objects.patch(workload, build_update(self._wanted_workload(job)))
        elif step is KueueStep.DELETE:
            self._objects.delete(workload)
        elif step is KueueStep.ACTIVATE:
            self._objects.patch(
                workload, {"metadata": {"annotations": {SUSPENDED_BY_OWNER: None}}, "spec": {"active": True}}
            )
        elif step is KueueStep.DEACTIVATE:
            self._objects.patch(
                workload, {"metadata": {"annotations": {SUSPENDED_BY_OWNER: "true"}}, "spec": {"active": False}}
            )
        elif step is KueueStep.RELEASE:
            self._objects.patch_status(workload, build_release(workload, time.time()))
        elif step is KueueStep.READY:
            self._objects.patch_status(workload, build_pods_ready(workload, time.time()))
        elif step is KueueStep.FINISH:
            self._objects.patch_status(workload, build_finish(workload, job, time.time()))

    def _place(self, job: ElasticJob, workload: Manifest) -> ElasticJob:
        """Return the job on the nodes of the Workload's flavors; ClusterError without a flavor."""
        flavors = [self._flavor(name) for name in flavor_names(workload)]
        return replace(job, template=apply_placement(job.template, workload, flavors))

    def _flavor(self, name: str) -> Manifest:
        found = self._objects.flavor(name)
        if found is None:
            raise ClusterError(f"Kueue assigned the flavor {name} to a job, and it does not exist")
        return found

    def _wanted_workload(self, job: ElasticJob) -> Manifest:
        ranked = priority_class(job)
        value = None if ranked is None else self._objects.priority(ranked.name, of_pods=ranked.of_pods)
        return build_workload(job, self._objects.api_version, value)


def _bounded(job: ElasticJob, workers: int) -> ElasticJob:
    """Return the job with no more workers than were admitted."""
    size = min(job.desired, workers)
    by = job.scaled_by if size == job.desired else BY_KUEUE
    return replace(job, desired=size, min=min(job.min, size), scaled_by=by)


def _not_admitted(job: ElasticJob, workload: Manifest | None, verdict: KueueVerdict) -> QueuedJob:
    """Return the job, suspended if there is a reason other than its owner's wish."""
    if not verdict.held:
        return QueuedJob(job, verdict.step, workload)
    return QueuedJob(replace(job, suspend=True, held=verdict.held), verdict.step, workload)
