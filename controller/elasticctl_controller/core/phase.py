"""The phase of a job, its reason and its conditions, from its workers and its spec."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticctl.api.codec import Timestamp, to_rfc3339
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import Condition, ConditionType, JobStatus, Phase
from elasticctl.api.text import times
from elasticctl_controller.core.failure_budget import complete_failure, describe_failure, fatal_failure, paused_until
from elasticctl_controller.core.workers import Roster, completed_at, count_kept, is_active

# Running and Restarting replace each other; the others stay once set.
_EXCLUSIVE = {ConditionType.RUNNING: ConditionType.RESTARTING, ConditionType.RESTARTING: ConditionType.RUNNING}
# Cancelled has no condition type of its own: tools that wait for a job to end know only Succeeded and Failed.
_TYPE = {
    Phase.RUNNING: ConditionType.RUNNING,
    Phase.RESTARTING: ConditionType.RESTARTING,
    Phase.SUSPENDED: ConditionType.SUSPENDED,
    Phase.SUCCEEDED: ConditionType.SUCCEEDED,
    Phase.FAILED: ConditionType.FAILED,
    Phase.CANCELLED: ConditionType.FAILED,
}
FINISHING = "Finishing"
QUEUED, PLANNED = "Queued", "Planned"
NOT_ADMITTED, OVER_LIMIT = "NotAdmitted", "OverLimit"
DEADLINE_EXCEEDED = "DeadlineExceeded"


def update_conditions(
    conditions: tuple[Condition, ...], phase: Phase, message: str, now: float
) -> tuple[Condition, ...]:
    """Return the conditions of a job in this phase; conditions that are already right keep their times."""
    if not has_condition(conditions, ConditionType.CREATED):
        conditions = put_condition(conditions, ConditionType.CREATED, "True", "ElasticJobCreated", "", now)
    kind, reason = _TYPE.get(phase), f"ElasticJob{phase.value}"
    if phase is not Phase.SUSPENDED and has_condition(conditions, ConditionType.SUSPENDED, "True"):
        conditions = put_condition(conditions, ConditionType.SUSPENDED, "False", "ElasticJobResumed", "", now)
    if phase is Phase.SUSPENDED or phase.terminal:
        for active in (ConditionType.RUNNING, ConditionType.RESTARTING):
            if has_condition(conditions, active, "True"):
                conditions = put_condition(conditions, active, "False", reason, "", now)
    if kind is None:
        return conditions
    opposite = _EXCLUSIVE.get(kind)
    conditions = tuple(item for item in conditions if item.type != opposite)
    return put_condition(conditions, kind, "True", reason, message if phase.terminal else "", now)


def update_limit(conditions: tuple[Condition, ...], over_limit: str, now: float) -> tuple[Condition, ...]:
    """The conditions, with whether the project's limits allow the job. A job that they have always allowed has no such
    condition."""
    kind = ConditionType.OVER_LIMIT
    if over_limit:
        return put_condition(conditions, kind, "True", "NotAllowed", over_limit, now)
    if find_condition(conditions, kind) is None:
        return conditions
    return put_condition(conditions, kind, "False", "Allowed", "", now)


def has_run(conditions: tuple[Condition, ...]) -> bool:
    """True if the job has been running before."""
    return has_condition(conditions, ConditionType.RUNNING) or has_condition(conditions, ConditionType.RESTARTING)


def find_condition(conditions: tuple[Condition, ...], kind: ConditionType) -> Condition | None:
    """The condition of this type; None if it has never been set."""
    return next((item for item in conditions if item.type == kind), None)


def has_condition(conditions: tuple[Condition, ...], kind: ConditionType, status: str = "") -> bool:
    """True if there is a condition of this type, with this status if one is given."""
    return any(item.type == kind and (not status or item.status == status) for item in conditions)


def put_condition(
    conditions: tuple[Condition, ...], kind: ConditionType, status: str, reason: str, message: str, now: float
) -> tuple[Condition, ...]:
    """The conditions with this one set at `now`; unchanged if it is set like this already."""
    at = Timestamp(now)
    old = find_condition(conditions, kind)
    new = Condition(kind.value, status, reason, message, at, at)
    if old is None:
        return (*conditions, new)
    if (old.status, old.reason, old.message) == (status, reason, message):
        return conditions
    if old.status == status:
        new = replace(new, last_transition_time=old.last_transition_time)
    return tuple(new if item.type == kind else item for item in conditions)


@dataclass(frozen=True, slots=True)
class PhaseDecision:
    """A phase, its reason in one word, and a message for people."""

    phase: Phase
    reason: str
    message: str


def decide_phase(job: ElasticJob, status: JobStatus, roster: Roster, now: float) -> PhaseDecision:
    """Decide the phase of a job that has not ended; `status` already counts the ends of this pass.

    Checked in this order: cancellation, success (a completed worker means that training is done), the restart budget,
    the deadline, the limits of the project, suspension (by the owner, or until the job is admitted), waiting for a
    share, the plan for a goal, and the number of running workers.
    """
    if job.cancel:
        message = "the job is being deleted" if job.deleting else "cancelled on request"
        return PhaseDecision(Phase.CANCELLED, "Cancelled", message)
    done_at = completed_at(roster.workers)
    if done_at is not None:
        return _finish(job, status, roster, done_at, now)
    fatal = fatal_failure(job, status, roster.ends)
    if fatal is not None:
        return PhaseDecision(Phase.FAILED, fatal, _explain_failure(job, status, roster))
    deadline = deadline_at(job, status)
    if deadline is not None and now >= deadline:
        return PhaseDecision(Phase.FAILED, DEADLINE_EXCEEDED, f"active for longer than {job.deadline_s:g} s")
    if job.over_limit:
        return PhaseDecision(Phase.SUSPENDED, OVER_LIMIT, job.over_limit)
    if job.held:
        return PhaseDecision(Phase.SUSPENDED, NOT_ADMITTED, job.held)
    if job.suspend:
        return PhaseDecision(Phase.SUSPENDED, "Suspended", "suspended on request; resume it to continue")
    if status.share is not None and not status.share.workers:
        phase = Phase.SUSPENDED if has_run(status.conditions) else Phase.PENDING
        return PhaseDecision(phase, QUEUED, status.share.message)
    if status.plan is not None and not job.desired:
        phase = Phase.SUSPENDED if has_run(status.conditions) else Phase.PENDING
        return PhaseDecision(phase, f"{PLANNED}{status.plan.reason}", status.plan.message)
    return _decide_by_workers(job, status, roster, now)


def deadline_at(job: ElasticJob, status: JobStatus) -> float | None:
    """When `activeDeadlineSeconds` end, in seconds since the epoch; None without a deadline."""
    return None if job.deadline_s is None or status.start_time is None else status.start_time + job.deadline_s


def stragglers_until(job: ElasticJob, done_at: float) -> float:
    """Until when to wait for workers that have not completed, in seconds since the epoch."""
    return done_at + job.policy.straggler_seconds


def _finish(job: ElasticJob, status: JobStatus, roster: Roster, done_at: float, now: float) -> PhaseDecision:
    """Wait for the other members of the generation that completed, but not for workers that never joined it."""
    group = status.generations[-1].workers if status.generations else ()
    unfinished = sum(is_active(worker) and (not group or worker.name in group) for worker in roster.workers)
    if unfinished == 0 or now >= stragglers_until(job, done_at):
        first = min(roster.workers, key=lambda worker: (worker.ended_at != done_at, worker.index))
        return PhaseDecision(Phase.SUCCEEDED, "Completed", f"worker {first.name} completed")
    until = to_rfc3339(stragglers_until(job, done_at))
    return PhaseDecision(
        Phase.RUNNING, FINISHING, f"training is done; {unfinished} workers have until {until} to finish"
    )


def _explain_failure(job: ElasticJob, status: JobStatus, roster: Roster) -> str:
    counted = [end for end in roster.ends if end.cause.counted]
    last = complete_failure(counted[-1]) if counted else status.newest_failure
    since = " since the last checkpoint" if status.checkpoint.step is not None else ""
    used = status.failures if status.failures_since_commit is None else status.failures_since_commit
    budget = f"failures{since}: {used}, backoffLimit: {job.backoff_limit}"
    return f"{describe_failure(last)}; {budget}" if last else budget


def _decide_by_workers(job: ElasticJob, status: JobStatus, roster: Roster, now: float) -> PhaseDecision:
    active = [worker for worker in roster.workers if is_active(worker)]
    running = count_kept([worker for worker in active if worker.phase == PodPhase.RUNNING], job.desired)
    needed = max(1, job.min)
    if running >= needed:
        return PhaseDecision(Phase.RUNNING, "Running", f"{running} of {job.desired} workers running")
    phase = Phase.RESTARTING if has_run(status.conditions) else Phase.PENDING
    if job.desired == 0:
        return PhaseDecision(phase, "NoWorkersWanted", "scaled to 0 workers")
    until = paused_until(job, status, now)
    if until is not None and len(active) < job.desired:
        return PhaseDecision(
            phase,
            "BackOff",
            f"workers failed, or ended immediately, {times(status.backoff.failures)} in a row; next attempt at"
            f" {to_rfc3339(until)}",
        )
    return PhaseDecision(phase, "WaitingForWorkers", f"{running} of at least {needed} workers running")
