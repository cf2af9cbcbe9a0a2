"""Whether workers are restarted: the restart budget, the pause before the next attempt, and counts by cause.

Only causes with `Cause.counted` use up `backoffLimit`, and a new checkpoint refills it: `failures` is for the life of
the job, `failures_since_commit` is what is limited. A generation whose ranks failed and were started again by the same
workers counts like a worker that ended (`count_broken_generations`). Everything here follows from ends that are stored
in the same write, so a crash of the controller between any two steps counts nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import capacity_of
from elasticctl.api.podtemplate import capacity
from elasticctl.api.spec import ElasticJob, Policy, RestartPolicy
from elasticctl.api.status import (
    Cause,
    GroupGeneration,
    Interruption,
    JobStatus,
    Phase,
    RankFailure,
    RestartBackoff,
    Scaling,
    ScalingPhase,
)
from elasticctl.api.text import shorten, span
from elasticctl_controller.core.group.failures import PERMANENT_EXIT_CODES
from elasticctl_controller.core.workers import FINISHED, SUSPENDED, WorkerEnd
from elasticctl_protocol.failures import OUT_OF_MEMORY, FailureVerdict

BY_SHARING, BY_PLAN = "sharing", "plan"
"""Who has scaled a job, where no user has."""
MAX_INTERRUPTIONS, MAX_SCALINGS = 50, 20
QUICK_DEATH_S = 10.0  # a worker that dies sooner than this after its start is not replaced immediately
HEALTHY_LIFE_S = 120.0  # a failed worker that ran as long as this starts a new series of failures
CLOCK_STEP_S = 1.0  # Kubernetes cuts start times to whole seconds
MAX_FAILURES_IN_A_ROW = 64  # more do not lengthen the pause
_OF_PLATFORM = (Cause.PREEMPTED, Cause.DRAINED, Cause.NODE_LOST)
"""The machine was taken away, which is no evidence about the next one."""
_USUAL = Policy()


def count_ends(job: ElasticJob, status: JobStatus, ends: Sequence[WorkerEnd], finishing: bool) -> JobStatus:
    """Count new ends by cause, against the restart budget and in the history of interruptions.

    Ends caused by suspending or finishing the job are no restarts. Once a worker has completed (`finishing`), failures
    of others are counted by cause only.
    """
    counts = Counter(end.cause.value for end in ends if end.worker.removal not in (SUSPENDED, FINISHED))
    status = replace(status, restarts=_add(status.restarts, counts))
    if finishing:
        return status
    for end in sorted(ends, key=lambda end: (end.at, end.worker.index, end.worker.uid)):
        status = _count_end(job.policy, status, end)
    return status


def count_broken_generations(before: JobStatus, status: JobStatus) -> JobStatus:
    """Count the generations that are new in `status` as ended by ranks that failed, and refill the budget.

    A checkpoint of a newer step than any before refills it; failures that happened since then still count.
    """
    used = before.failures if before.failures_since_commit is None else before.failures_since_commit
    commit = status.checkpoint
    refilled = commit.step is not None and commit.step > (
        -1 if before.checkpoint.step is None else before.checkpoint.step
    )
    known = {item.generation for item in before.generations if item.failure is not None}
    status = replace(status, failures_since_commit=0 if refilled else used)
    for item in status.generations:
        failure = item.failure
        if failure is None or item.generation in known:
            continue
        older = refilled and failure.at is not None and commit.at is not None and failure.at < commit.at
        status = _count_failure(status, failure, charged=not older)
        cause = Cause.COLLATERAL if failure.verdict == FailureVerdict.COLLATERAL else Cause.APPLICATION
        if failure.signal == "SIGKILL" and failure.error == OUT_OF_MEMORY:
            cause = Cause.OOM_KILLED
        status = replace(
            status,
            restarts=_add(status.restarts, {cause.value: 1}),
            interruptions=(*status.interruptions, _broken(item, failure, cause))[-MAX_INTERRUPTIONS:],
        )
    return status


def _broken(item: GroupGeneration, failure: RankFailure, cause: Cause) -> Interruption:
    return Interruption(
        at=failure.at,
        worker=failure.worker,
        cause=cause,
        message=_describe_end(failure),
        exit_code=failure.exit_code,
        generation=item.generation,
    )


def _describe_end(failure: RankFailure) -> str:
    """The error or, if the rank left none, how it ended."""
    code = "" if failure.exit_code is None else f"exit code {failure.exit_code}"
    return failure.error or (f"ended by {failure.signal}" if failure.signal else code)


def _count_failure(status: JobStatus, failure: RankFailure, *, charged: bool = True) -> JobStatus:
    return replace(
        status,
        failures=status.failures + 1,
        failures_since_commit=(status.failures_since_commit or 0) + charged,
        first_failure=status.first_failure or failure,
        last_failure=failure,
    )


def attribute_to_nodes(status: JobStatus, uids: Collection[str], now: float) -> JobStatus:
    """Correct the cause of workers counted as unresponsive whose nodes have turned out to be lost."""
    moved = {Cause.UNRESPONSIVE.value: -len(uids), Cause.NODE_LOST.value: len(uids)}
    return replace(
        status,
        restarts=_add(status.restarts, moved),
        interruptions=tuple(_as_node_loss(item, now) if item.uid in uids else item for item in status.interruptions),
    )


def add_worker_seconds(job: ElasticJob, status: JobStatus, ends: Sequence[WorkerEnd]) -> JobStatus:
    """Add the time that ended workers ran to the total for their capacity type, from which their cost follows.

    Unlike `count_ends`, this includes workers that were stopped because the job was over.
    """
    asked = capacity(job.template) or "unknown"
    ran_s: dict[str, float] = {}
    for end in ends:
        if end.worker.started_at is not None:
            kind = capacity_of(end.worker.pool) or asked
            ran_s[kind] = ran_s.get(kind, 0.0) + max(0.0, end.at - end.worker.started_at)
    more = {kind: round(status.worker_seconds.get(kind, 0.0) + took_s, 3) for kind, took_s in ran_s.items() if took_s}
    return replace(status, worker_seconds={**status.worker_seconds, **more}) if more else status


def fatal_failure(job: ElasticJob, status: JobStatus, ends: Sequence[WorkerEnd]) -> str | None:
    """Return why these ends, or the restart budget, fail the job; None when it continues."""
    if job.restart_policy is RestartPolicy.NEVER and any(end.cause.counted for end in ends):
        return "RestartPolicyNever"
    permanent = (end for end in ends if end.cause is Cause.APPLICATION and end.exit_code in PERMANENT_EXIT_CODES)
    if job.restart_policy is RestartPolicy.EXIT_CODE and any(permanent):
        return "PermanentExitCode"
    if any(end.cause is Cause.APPLICATION and end.failure.permanent for end in ends):
        return "PermanentError"
    used = status.failures if status.failures_since_commit is None else status.failures_since_commit
    return "BackoffLimitExceeded" if used > job.backoff_limit else None


def paused_until(job: ElasticJob, status: JobStatus, now: float) -> float | None:
    """Until when no worker is created after failures, in seconds since the epoch; None if there is no pause now.

    No pause is longer than the job's policy, or the default policy, allows. One that seems to be was started by a clock
    that has been set back since, and does not count.
    """
    until = status.backoff.until
    longest_s = max(job.policy.backoff_max_seconds, _USUAL.backoff_max_seconds) + CLOCK_STEP_S
    return until if until is not None and now < until <= now + longest_s else None


def complete_failure(end: WorkerEnd) -> RankFailure:
    """The report of this worker's failure, with the worker and the time filled in."""
    report = end.failure
    return replace(
        report,
        verdict=report.verdict or FailureVerdict.APPLICATION,
        error=report.error or end.cause.value,
        worker=end.worker.name,
        at=report.at or end.at,
    )


def describe_failure(failure: RankFailure) -> str:
    """One line: worker, rank, exit code or signal, error."""
    details = [
        f"rank {failure.rank}" if failure.rank is not None else "",
        f"exit code {failure.exit_code}" if failure.exit_code is not None and not failure.is_hang else "",
        failure.signal,
    ]
    inside = ", ".join(part for part in details if part)
    where = f"worker {failure.worker}" + (f" ({inside})" if inside else "")
    return f"{where}: {shorten(failure.error)}" if failure.error else where


def record_scaling(job: ElasticJob, status: JobStatus, now: float) -> JobStatus:
    """Record a change of the desired number of workers since the last pass.

    A job that was waiting for its share or for Kueue has not been scaled, regardless of the number of workers that it
    starts with. Neither has a job that has just been suspended, because its share no longer counts. A job that was
    suspended before is scaled by its owner only.
    """
    first_pass = not status.conditions
    still_none = not status.active and (not job.desired or (bool(job.queue) and status.start_time is None))
    asleep = status.phase is Phase.SUSPENDED and status.desired and status.share is None and not job.queue
    if first_pass or status.desired == job.desired or still_none or (job.suspend and not asleep):
        return status
    scaling = Scaling(
        at=Timestamp(now),
        from_workers=status.desired,
        to_workers=job.desired,
        by=job.scaled_by,
        message=_why(status, job.scaled_by),
        # There will be no first step with 0 workers, or while the job is suspended: such a scaling is done immediately.
        phase=ScalingPhase.IN_PROGRESS if job.desired and not job.suspend else ScalingPhase.DONE,
    )
    before = tuple(
        replace(item, phase=ScalingPhase.SUPERSEDED) if item.phase is ScalingPhase.IN_PROGRESS else item
        for item in status.scalings
    )
    return replace(status, scalings=(*before, scaling)[-MAX_SCALINGS:])


def is_asked_for(status: JobStatus) -> bool:
    """True while a scaling is in progress that a person asked for, rather than sharing or the plan for a goal."""
    newest = status.scalings[-1] if status.scalings else Scaling()
    return newest.phase is ScalingPhase.IN_PROGRESS and newest.by not in (BY_SHARING, BY_PLAN)


def _why(status: JobStatus, by: str) -> str:
    """Why sharing, or the plan, has changed the number."""
    if by == BY_PLAN:
        return status.plan.message if status.plan is not None else ""
    return status.share.change if status.share is not None and by == BY_SHARING else ""


def _count_end(policy: Policy, status: JobStatus, end: WorkerEnd) -> JobStatus:
    if not end.cause.interruption:
        return status
    quick = end.lived_s is not None and end.lived_s < QUICK_DEATH_S
    if end.cause.counted or quick:
        status = replace(status, backoff=_extend_backoff(policy, status, end))
    if end.cause.counted:
        status = _count_failure(status, complete_failure(end))
    return replace(status, interruptions=(*status.interruptions, _interruption(status, end))[-MAX_INTERRUPTIONS:])


def _extend_backoff(policy: Policy, status: JobStatus, end: WorkerEnd) -> RestartBackoff:
    """Lengthen the pause once per attempt: workers that started before the last pause ended belong to that attempt.

    Workers that the platform took away lengthen no pause, unless they never started: a template that names a node which
    does not exist would be tried again and again. A policy cannot shorten the pauses after those, because each attempt
    costs only the API server's time.
    """
    backoff = status.backoff
    taken = end.cause in _OF_PLATFORM and end.worker.started_at is not None
    in_a_row = min(backoff.failures, MAX_FAILURES_IN_A_ROW)
    if _starts_new_series(status, end):
        in_a_row = 1
    elif not taken and (
        backoff.until is None or end.lived_s is None or end.at - end.lived_s >= backoff.until - CLOCK_STEP_S
    ):
        in_a_row = min(in_a_row + 1, MAX_FAILURES_IN_A_ROW)
    in_a_row = max(in_a_row, 1)
    doublings = 0 if taken else in_a_row - 1
    first_s, longest_s = policy.backoff_seconds, policy.backoff_max_seconds
    if end.cause in _OF_PLATFORM and not taken:
        first_s, longest_s = max(first_s, _USUAL.backoff_seconds), max(longest_s, _USUAL.backoff_max_seconds)
    pause_s = min(longest_s, first_s * 2.0**doublings)
    before = min(backoff.until or 0.0, end.at + longest_s)
    return RestartBackoff(failures=in_a_row, until=Timestamp(max(before, end.at + pause_s)))


def _starts_new_series(status: JobStatus, end: WorkerEnd) -> bool:
    """Has the job shown since the last pause that it can run, so that this end starts a new series?

    A long life shows it, and so does a step in which a worker of this name took part. For a failure that counts, only a
    long life or a new checkpoint does.
    """
    if end.lived_s is not None and end.lived_s >= HEALTHY_LIFE_S:
        return True
    since = status.backoff.until or 0.0
    if end.cause.counted:
        return status.checkpoint.at is not None and status.checkpoint.at > since
    return any(
        item.first_step_at is not None and item.formed_at is not None and item.formed_at > since
        for item in status.generations
        if end.worker.name in item.workers
    )


def _interruption(status: JobStatus, end: WorkerEnd) -> Interruption:
    return Interruption(
        at=end.at,
        worker=end.worker.name,
        uid=end.worker.uid,
        cause=end.cause,
        message=_describe_end(end.failure) if end.cause.counted else end.failure.error,
        exit_code=end.exit_code,
        generation=_last_generation_of(status, end.worker.name),
    )


def _as_node_loss(item: Interruption, now: float) -> Interruption:
    later = "" if item.at is None else f"{span(now - item.at)} later "
    return replace(item, cause=Cause.NODE_LOST, message=f"it did not answer, and {later}its node was found to be lost")


def _last_generation_of(status: JobStatus, worker: str) -> int:
    """The generation that lost this worker; its peers may have formed the next one before the loss was observed."""
    numbers = (item.generation for item in status.generations if worker in item.workers or not item.workers)
    return max(numbers, default=status.generation)


def _add(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    sums = {key: counts.get(key, 0) + more.get(key, 0) for key in sorted({*counts, *more})}
    return {key: count for key, count in sums.items() if count > 0}
