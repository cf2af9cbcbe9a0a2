"""What Kueue's answer means for a job, and the one thing to do about it next. Pure.

Level-triggered: each step changes the job or its Workload, and so leads to another look. What has to survive a restart
is on the objects: on the job `suspend`, and by which admission it was started; on the Workload `active`, and Kueue's
conditions. Quota is given back, or asked for anew, once no worker lives.
"""

from __future__ import annotations

from elasticctl.codec import Manifest
from elasticctl.podtemplate import at
from elasticctl.spec import ElasticJob
from elasticctl.status import Phase
from elasticctl.wording import joined
from elasticctl_controller.kueue.asking import asks_for, asks_for_such_pods
from elasticctl_controller.kueue.model import (
    ADMITTED,
    EVICTED,
    FINISHED,
    LEFT,
    PODS_READY,
    QUOTA,
    Step,
    Verdict,
    admitted_workers,
    is_active,
    is_true,
    said,
)


def judge(job: ElasticJob, workload: Manifest | None, pods: int) -> Verdict:
    """The verdict on a job that has a queue; `workload` is its own, `pods` how many of its pods have not ended.

    In this order: a job that has ended, one that its owner has suspended, one without a Workload, one that Kueue has
    closed or leaves aside, eviction, waiting, admission.
    """
    if job.status.phase.terminal:
        unfinished = workload is not None and not is_true(workload, FINISHED)
        return Verdict(step=Step.FINISH if unfinished else None)
    if job.suspend and (job.admitted or job.moving_to or job.moved_to):  # the first is cleared when we suspend it
        return _asleep(workload, pods)
    if workload is None or at(workload, "metadata", "deletionTimestamp") is not None:
        step = Step.CREATE if workload is None else None
        return _held(job, pods, f"is about to be put into Kueue's queue {job.queue}", step)
    if is_true(workload, FINISHED):
        return _held(job, pods, f"will not be admitted: Kueue has closed its Workload{_because(workload, FINISHED)}")
    if not is_active(workload):
        return _left_aside(job, workload, pods)
    if is_true(workload, EVICTED) and is_true(workload, QUOTA):
        words = f"gives its place in Kueue's queue {job.queue} back{_because(workload, EVICTED)}"
        return _held(job, pods, words, Step.RELEASE)
    if not is_true(workload, ADMITTED):
        revise = Step.DELETE if is_true(workload, QUOTA) else Step.UPDATE  # what has quota cannot be changed
        return _held(job, pods, _waiting(job, workload), None if asks_for(job, workload) else revise)
    return _admitted(job, workload, pods)


def _held(job: ElasticJob, pods: int, words: str, step: Step | None = None) -> Verdict:
    """It may not run: suspended first, then without workers, and only then the step."""
    if not job.suspend:
        return Verdict(held=words, step=Step.STOP)
    return Verdict(held=words, step=None if pods else step)


def _asleep(workload: Manifest | None, pods: int) -> Verdict:
    """Its owner has suspended it, or moved it away: others get its quota as soon as its workers are gone."""
    if workload is None or is_true(workload, FINISHED):
        return Verdict()
    if is_active(workload):
        return Verdict(step=Step.DEACTIVATE)
    return Verdict(step=Step.RELEASE if is_true(workload, QUOTA) and not pods else None)


def _left_aside(job: ElasticJob, workload: Manifest, pods: int) -> Verdict:
    """Its Workload is not active: its owner had suspended the job, and goes on; or somebody else does not want it."""
    if at(workload, "metadata", "annotations", LEFT) is not None:
        return Verdict(held=f"goes back into Kueue's queue {job.queue}", step=Step.ACTIVATE)
    words = f"will not be admitted: its Workload {at(workload, 'metadata', 'name')} was deactivated"
    step = Step.RELEASE if is_true(workload, QUOTA) else None
    return _held(job, pods, words + _because(workload, EVICTED), step)


def _admitted(job: ElasticJob, workload: Manifest, pods: int) -> Verdict:
    if not asks_for_such_pods(job, workload):
        words = f"asks for other workers than were admitted, and goes back into Kueue's queue {job.queue}"
        return _held(job, pods, words, Step.DELETE)
    if job.suspend:
        return Verdict(held=f"is admitted to Kueue's queue {job.queue}, and starts", step=Step.START)
    started = job.admitted == at(workload, "metadata", "uid")
    ready = job.status.phase is Phase.RUNNING and not is_true(workload, PODS_READY)
    step = Step.START if not started else Step.READY if ready else None
    return Verdict(workers=admitted_workers(workload), step=step)


def _waiting(job: ElasticJob, workload: Manifest) -> str:
    if is_true(workload, QUOTA):
        checks = at(workload, "status", "admissionChecks")
        missing = [str(at(item, "name")) for item in checks or () if at(item, "state") != "Ready"]
        waits = f"waits for its checks: {joined(missing)}" if missing else "is about to be admitted"
        return f"has quota in Kueue's queue {job.queue}, and {waits}"
    return f"waits to be admitted to Kueue's queue {job.queue}{_because(workload, QUOTA)}"


def _because(workload: Manifest, type_: str) -> str:
    found = said(workload, type_)
    return f": {found}" if found else ""
