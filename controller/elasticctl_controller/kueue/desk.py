"""Where jobs that name a queue of Kueue's take their turn: reads what the verdict rests on, and carries its step out.

Each step is one write, made after the pass over the job; what it changes leads to the next pass. So a job at rest costs
nothing, and an error here keeps no worker from being replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from elasticctl.cluster.kube.kueue import RECHECK_S, KueueObjects
from elasticctl.codec import Manifest
from elasticctl.errors import ClusterError
from elasticctl.spec import ANNOTATION_ADMITTED, ElasticJob, Pod
from elasticctl_controller.kueue.asking import build_workload, priority_class, revision, workload_name
from elasticctl_controller.kueue.judging import judge
from elasticctl_controller.kueue.model import LEFT, Step, Turn, Verdict, flavor_names
from elasticctl_controller.kueue.placing import placed
from elasticctl_controller.kueue.telling import finished, ready, released

BY_KUEUE = "kueue"
MISSING = "waits for Kueue, which is not installed in this cluster"

PatchJob = Callable[[ElasticJob, Manifest], None]
"""Change a job's own object; ConflictError when it is another one by now."""

log = logging.getLogger(__name__)


class Desk:
    """See the module's docstring; `clock` is in seconds since the epoch."""

    def __init__(self, objects: KueueObjects, patch_job: PatchJob, clock: Callable[[], float] = time.time) -> None:
        self._objects, self._patch_job, self._clock = objects, patch_job, clock

    def turn(self, job: ElasticJob, pods: Iterable[Pod]) -> Turn:
        """The job as Kueue lets it be. Where there is no Kueue, `suspend` alone decides: somebody else may set it.

        Raises ClusterError as long as it is not known what Kueue says: then nothing is done to the job either.
        """
        if not self._objects.version():
            held = MISSING if job.suspend and not job.moved_to else ""
            return Turn(replace(job, held=held), again_s=None if job.status.phase.terminal else RECHECK_S)
        workload = self._objects.workload(job.namespace, workload_name(job))
        alive = sum(pod.owner_uid == job.uid and not pod.ended for pod in pods)
        verdict = judge(job, workload, alive)
        if verdict.workers is not None and workload is not None:
            return self._admitted(job, workload, verdict.workers, verdict.step)
        return _held(job, workload, verdict)

    def carry_out(self, turn: Turn, job: ElasticJob) -> None:
        """Take the turn's step on `job` as it is by now; raises what keeps it from being taken."""
        workload, step = turn.workload, turn.step
        if step is not None:
            log.info("job %s: %s for Kueue", job.key, step.name.lower())
        if step is Step.START and workload is not None:
            admitted = {"annotations": {ANNOTATION_ADMITTED: workload["metadata"]["uid"]}}
            self._patch_job(job, {"metadata": admitted, "spec": {"suspend": False}})
        elif step is Step.STOP:
            self._patch_job(job, {"metadata": {"annotations": {ANNOTATION_ADMITTED: None}}, "spec": {"suspend": True}})
        elif step is Step.CREATE:
            self._objects.create(self._asked(job))
        elif step is not None and workload is not None:
            self._tell(step, job, workload)

    def _tell(self, step: Step, job: ElasticJob, workload: Manifest) -> None:
        """The steps that change a Workload."""
        if step is Step.UPDATE:
            self._objects.patch(workload, revision(self._asked(job)))
        elif step is Step.DELETE:
            self._objects.delete(workload)
        elif step is Step.ACTIVATE:
            self._objects.patch(workload, {"metadata": {"annotations": {LEFT: None}}, "spec": {"active": True}})
        elif step is Step.DEACTIVATE:
            self._objects.patch(workload, {"metadata": {"annotations": {LEFT: "true"}}, "spec": {"active": False}})
        elif step is Step.RELEASE:
            self._objects.patch_status(workload, released(workload, self._clock()))
        elif step is Step.READY:
            self._objects.patch_status(workload, ready(workload, self._clock()))
        elif step is Step.FINISH:
            self._objects.patch_status(workload, finished(workload, job, self._clock()))

    def _admitted(self, job: ElasticJob, workload: Manifest, workers: int, step: Step | None) -> Turn:
        """It runs, no larger than it was admitted and where its flavors say; ClusterError where they do not say it."""
        flavors = [self._flavor(name) for name in flavor_names(workload)]
        size = min(job.desired, workers)
        by = job.scaled_by if size == job.desired else BY_KUEUE
        template = placed(job.template, workload, flavors)
        bounded = replace(job, desired=size, min=min(job.min, size), scaled_by=by, template=template)
        return Turn(bounded, step, workload)

    def _flavor(self, name: str) -> Manifest:
        found = self._objects.flavor(name)
        if found is None:
            raise ClusterError(f"Kueue's flavor {name} is not there, and was given to a job")
        return found

    def _asked(self, job: ElasticJob) -> Manifest:
        ranked = priority_class(job)
        value = None if ranked is None else self._objects.priority(ranked.name, of_pods=ranked.of_pods)
        return build_workload(job, self._objects.api_version, value)


def _held(job: ElasticJob, workload: Manifest | None, verdict: Verdict) -> Turn:
    """It has no turn: another reason than its owner's keeps it suspended, if there are words for one."""
    if not verdict.held:
        return Turn(job, verdict.step, workload)
    return Turn(replace(job, suspend=True, held=verdict.held), verdict.step, workload)
