"""Kueue's objects on an API server: Workloads of ours, flavors and priority classes, read and written raw.

Nothing of it is asked for until a job names a queue. From then on two watches, of our own Workloads and of the few
flavors, keep what is read here; every write's answer is believed at once.
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
from elasticctl.api.spec import ANNOTATION_ADMITTED, GROUP, KIND, KUEUE, LABEL_GROUP, ElasticJob, Pod
from elasticctl.kubeapi.connection import MERGE_PATCH, resource_path
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource
from elasticctl_controller.core.kueue import (
    SUSPENDED_BY_OWNER,
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
from elasticctl_controller.kube.limiter import LimitedApi
from elasticctl_controller.kube.pruning import prune_flavor, prune_workload

VERSIONS = ("v1beta1", "v1beta2")
"""In the order in which they are looked for: the first is served by most clusters, and by all that are not new."""
RECHECK_S = 60.0
"""A cluster without Kueue is asked again after this time."""
FIRST_LIST_S = 5.0
WORKLOADS, FLAVORS = "workloads", "resourceflavors"

log = logging.getLogger(__name__)


class KueueObjects:
    """Thread-safe; `on_change(key)` hears of each job whose Workload has changed. `clock` is monotonic seconds."""

    def __init__(
        self, api: LimitedApi, on_change: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._on_change, self._clock = api, on_change, clock
        self._lock = threading.Lock()
        self._version, self._look_at = "", 0.0
        self._workloads, self._flavors = ObjectStore(prune_workload), ObjectStore(prune_flavor)
        self.reflectors: tuple[Reflector, ...] = ()

    def version(self) -> str:
        """The version of Kueue's API that is used; "" where it is not served.

        Raises ClusterError until what there is has been listed.
        """
        with self._lock:
            if not self._version and self._clock() >= self._look_at:
                self._version = next(filter(self._serves, VERSIONS), "")
                self._look_at = self._clock() + RECHECK_S
                if self._version:
                    self._watch()
        if not all(reflector.wait_synced(0) for reflector in self.reflectors):
            raise ClusterError(f"Kueue's {WORKLOADS} and {FLAVORS} are not listed yet; see the controller's log")
        return self._version

    @property
    def api_version(self) -> str:
        """`GROUP/VERSION` of Kueue's objects."""
        return f"{KUEUE}/{self._version}"

    def stop(self) -> None:
        """End the watches, if there are any."""
        with self._lock:
            for reflector in self.reflectors:
                reflector.stop()

    def workload(self, namespace: str, name: str) -> Manifest | None:
        """A Workload of ours; None when there is none."""
        return self._workloads.get(f"{namespace}/{name}")

    def flavor(self, name: str) -> Manifest | None:
        """A ResourceFlavor; None when there is none."""
        return self._flavors.get(name)

    def priority(self, name: str, *, of_pods: bool) -> int:
        """The value of a priority class, of pods' or of Kueue's own; NotFoundError when there is none."""
        api, plural = (self.api_version, "workloadpriorityclasses")
        if of_pods:
            api, plural = ("scheduling.k8s.io/v1", "priorityclasses")
        value = self._api.request("GET", resource_path(api, None, plural, name)).get("value")
        return value if isinstance(value, int) else 0

    def create(self, workload: Manifest) -> None:
        """Create a Workload; ConflictError when it is there."""
        path = resource_path(self.api_version, workload["metadata"]["namespace"], WORKLOADS)
        self._workloads.learn(self._api.request("POST", path, workload))

    def patch(self, workload: Manifest, patch: Manifest) -> None:
        """Change a Workload; ConflictError when it is another one by now, or gone."""
        self._patch(workload, patch, "")

    def patch_status(self, workload: Manifest, patch: Manifest) -> None:
        """Change its status; ConflictError when it has changed since the version that the patch names."""
        self._patch(workload, patch, "status")

    def delete(self, workload: Manifest) -> None:
        """Delete this very Workload; fine when it is gone."""
        metadata = workload["metadata"]
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": metadata["uid"]}}
        with suppress(NotFoundError, ConflictError):
            self._api.request("DELETE", self._path(workload), options)
        self._workloads.forget(f"{metadata['namespace']}/{metadata['name']}", metadata["uid"])

    def _patch(self, workload: Manifest, patch: Manifest, part: str) -> None:
        body = {**patch, "metadata": {"uid": workload["metadata"]["uid"], **patch.get("metadata", {})}}
        try:
            answer = self._api.request("PATCH", self._path(workload, part), body, content_type=MERGE_PATCH)
        except NotFoundError as e:
            raise ConflictError(f"Workload {workload['metadata']['name']} is gone") from e
        self._workloads.learn(answer)

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
        log.info("a job names a queue: Kueue's %s are watched", self.api_version)
        root = f"/apis/{self.api_version}"
        reflectors = (
            Reflector(self._api, Resource(f"{root}/{WORKLOADS}", f"{LABEL_GROUP}={GROUP}"), self._workloads),
            Reflector(self._api, Resource(f"{root}/{FLAVORS}"), self._flavors),
        )
        for reflector in reflectors:
            reflector.start()
        until = self._clock() + FIRST_LIST_S
        for reflector in reflectors:
            reflector.wait_synced(max(0.0, until - self._clock()))
        self.reflectors = reflectors
        self._workloads.subscribe(self._changed)

    def _changed(self, old: Manifest | None, new: Manifest | None) -> None:
        metadata = (new or old or {})["metadata"]
        for owner in metadata.get("ownerReferences", ()):
            if owner.get("kind") == KIND:
                self._on_change(f"{metadata['namespace']}/{owner.get('name')}")


BY_KUEUE = "kueue"
NOT_INSTALLED = "waits for Kueue, which is not installed in this cluster"

PatchJob = Callable[[ElasticJob, Manifest], None]
"""Change a job's own object; ConflictError when it is another one by now."""


class KueueQueueing:
    """See the module's docstring; `clock` is in seconds since the epoch."""

    def __init__(self, objects: KueueObjects, patch_job: PatchJob, clock: Callable[[], float] = time.time) -> None:
        self._objects, self._patch_job, self._clock = objects, patch_job, clock

    def turn(self, job: ElasticJob, pods: Iterable[Pod]) -> QueuedJob:
        """The job as Kueue lets it be. Where there is no Kueue, `suspend` alone decides: somebody else may set it.

        Raises ClusterError as long as it is not known what Kueue says: then nothing is done to the job either.
        """
        if not self._objects.version():
            held = NOT_INSTALLED if job.suspend and not job.moved_to else ""
            return QueuedJob(replace(job, held=held), again_s=None if job.status.phase.terminal else RECHECK_S)
        workload = self._objects.workload(job.namespace, workload_name(job))
        alive = sum(pod.owner_uid == job.uid and not pod.ended for pod in pods)
        verdict = judge_admission(job, workload, alive)
        if verdict.workers is not None and workload is not None:
            return self._admitted(job, workload, verdict.workers, verdict.step)
        return _not_admitted(job, workload, verdict)

    def carry_out(self, turn: QueuedJob, job: ElasticJob) -> None:
        """Take the turn's step on `job` as it is by now; raises what keeps it from being taken."""
        workload, step = turn.workload, turn.step
        if step is not None:
            log.info("job %s: %s for Kueue", job.key, step.name.lower())
        if step is KueueStep.START and workload is not None:
            admitted = {"annotations": {ANNOTATION_ADMITTED: workload["metadata"]["uid"]}}
            self._patch_job(job, {"metadata": admitted, "spec": {"suspend": False}})
        elif step is KueueStep.STOP:
            self._patch_job(job, {"metadata": {"annotations": {ANNOTATION_ADMITTED: None}}, "spec": {"suspend": True}})
        elif step is KueueStep.CREATE:
            self._objects.create(self._asked(job))
        elif step is not None and workload is not None:
            self._tell(step, job, workload)

    def _tell(self, step: KueueStep, job: ElasticJob, workload: Manifest) -> None:
        """The steps that change a Workload."""
        if step is KueueStep.UPDATE:
            self._objects.patch(workload, build_update(self._asked(job)))
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
            self._objects.patch_status(workload, build_release(workload, self._clock()))
        elif step is KueueStep.READY:
            self._objects.patch_status(workload, build_pods_ready(workload, self._clock()))
        elif step is KueueStep.FINISH:
            self._objects.patch_status(workload, build_finish(workload, job, self._clock()))

    def _admitted(self, job: ElasticJob, workload: Manifest, workers: int, step: KueueStep | None) -> QueuedJob:
        """It runs, no larger than it was admitted and where its flavors say; ClusterError where they do not say it."""
        flavors = [self._flavor(name) for name in flavor_names(workload)]
        size = min(job.desired, workers)
        by = job.scaled_by if size == job.desired else BY_KUEUE
        template = apply_placement(job.template, workload, flavors)
        bounded = replace(job, desired=size, min=min(job.min, size), scaled_by=by, template=template)
        return QueuedJob(bounded, step, workload)

    def _flavor(self, name: str) -> Manifest:
        found = self._objects.flavor(name)
        if found is None:
            raise ClusterError(f"Kueue's flavor {name} is not there, and was given to a job")
        return found

    def _asked(self, job: ElasticJob) -> Manifest:
        ranked = priority_class(job)
        value = None if ranked is None else self._objects.priority(ranked.name, of_pods=ranked.of_pods)
        return build_workload(job, self._objects.api_version, value)


def _not_admitted(job: ElasticJob, workload: Manifest | None, verdict: KueueVerdict) -> QueuedJob:
    """It has no turn: another reason than its owner's keeps it suspended, if there are words for one."""
    if not verdict.held:
        return QueuedJob(job, verdict.step, workload)
    return QueuedJob(replace(job, suspend=True, held=verdict.held), verdict.step, workload)
