"""The controller's core: from a job and what is observed of it to the next status and the next actions.

`reconcile` is a pure, level-triggered function: it may be called at any time, any number of times, with stale caches.
It relies on two guarantees of the loop: the status is written before the actions run, against the resourceVersion it
was read at; and pods are named by index, so that the API server refuses duplicates. Everything that must survive a
crash between two steps is therefore stored first: a pod is deleted only once the stored status says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import PlanStatus, PoolsStatus
from elasticctl.api.observed.workers import count_workers
from elasticctl.api.spec import GROUP, LABEL_GROUP, LABEL_JOB, LABEL_TYPE, ElasticJob, PodPhase
from elasticctl.api.status import Cause, JobStatus, Phase, ReplicaStatus, ShareStatus, WorkerStatus
from elasticctl_controller.core.actions import (
    Action,
    Decision,
    DeleteJob,
    list_creations,
    list_deletions,
    mark_removals,
)
from elasticctl_controller.core.failure_budget import (
    BY_SHARING,
    add_worker_seconds,
    attribute_to_nodes,
    count_broken_generations,
    count_ends,
    paused_until,
    record_scaling,
)
from elasticctl_controller.core.goal.deadline_plan import plan_workers
from elasticctl_controller.core.goal.pool_order import follow_order
from elasticctl_controller.core.group.worker_tokens import due_times, keep_newest, rotate
from elasticctl_controller.core.history import close_recovered, fold_reports
from elasticctl_controller.core.notifications import list_contradictions, list_events
from elasticctl_controller.core.observation import Observed, WorkerMoves
from elasticctl_controller.core.phase import (
    FINISHING,
    QUEUED,
    PhaseDecision,
    deadline_at,
    decide_phase,
    stragglers_until,
    update_conditions,
    update_limit,
)
from elasticctl_controller.core.waiting import (
    decide_wait,
    find_unexplained,
    next_ignored_at,
    unexplained_at,
    update_waiting,
)
from elasticctl_controller.core.workers import (
    Roster,
    completed_at,
    count_kept,
    is_active,
    stays,
    update_roster,
)

RETRY_S = 5.0  # when workers are missing and nothing can be done about it now


def reconcile(job: ElasticJob, observed: Observed, now: float) -> Decision:
    """Decide what to do about `job` at `now` (seconds since the epoch). Never raises, even if the job's fields make no
    sense."""
    if job.deleting and job.orphaning:
        return Decision(job.status)  # its workers are to stay
    if job.deleting:  # a finalizer still keeps its object, and until that is gone the cluster removes nothing of it
        job = replace(job, cancel=True, ttl_s=None)
    reported = fold_reports(job.status, observed.group)
    job, moves, plan, pools = _decide_size(job, observed, reported, now)
    roster = update_roster(job, observed, moves.moves_to, now)
    status = add_worker_seconds(job, reported, roster.ends)
    status = attribute_to_nodes(replace(status, share=observed.share, plan=plan, pools=pools), roster.explained, now)
    if status.phase.terminal:
        decision = PhaseDecision(status.phase, status.reason, status.message)
    else:
        finishing = completed_at(roster.workers) is not None
        status = count_broken_generations(job.status, record_scaling(job, status, now))
        status = count_ends(job, status, roster.ends, finishing)
        decision = decide_phase(job, status, roster, now)
        status = _set_start_time(status, decision, now)
    workers = mark_removals(job, roster, decision, moves)
    wants = not decision.phase.terminal and decision.phase is not Phase.SUSPENDED and decision.reason != FINISHING
    if pools is not None and pools.trying is not None:
        wants = False  # replacements for workers that may stay
    wait = decide_wait(job, roster, observed.cluster, workers, now) if wants else None
    unexplained = find_unexplained(roster, workers) if wants else None
    status = replace(status, conditions=update_waiting(status.conditions, wait, now))
    if not decision.phase.terminal:
        status = replace(status, conditions=update_limit(status.conditions, job.over_limit, now))
    status = _fill_status(job, close_recovered(status), decision, workers, now)
    status = keep_newest(status, observed.token.known)
    status = rotate(job, status, observed.token.delivered, bool(observed.cluster.pods), observed.token.every_s, now)
    if replace(status, last_reconcile_time=job.status.last_reconcile_time) == job.status:
        status = job.status  # the stored one itself: a job at rest is never written
    else:
        status = replace(status, last_reconcile_time=Timestamp(now))
    actions = _list_actions(job, roster, observed, moves, status, now)
    due = list(_due_times(job, roster, observed, status, actions, now))
    if unexplained is not None and unexplained_at(unexplained) > now:
        due.append(unexplained_at(unexplained))
        unexplained = None  # not yet
    return Decision(
        status=status,
        actions=actions,
        events=(*list_contradictions(job), *list_events(job.status, status)),
        requeue_s=min((max(0.0, at - now) for at in due), default=None),
        unexplained=unexplained,
    )


def _decide_size(
    job: ElasticJob, observed: Observed, reported: JobStatus, now: float
) -> tuple[ElasticJob, WorkerMoves, PlanStatus | None, PoolsStatus | None]:
    """The job with its number of workers, which workers leave or move for that, and its plan and pools.

    Nothing else asks for goals and orders of pools, and jobs without them have neither a plan nor pools.
    """
    moves, plan, pools = WorkerMoves.of(observed.allotment), None, None
    if job.goal is not None:
        job, moves, plan = plan_workers(job, job.goal, observed, moves, reported, now)
    job = apply_share(job, observed.share)
    if job.pools is not None:
        moves, pools = follow_order(job, job.pools, observed, moves, reported, now)
    return job, moves, plan, pools


def apply_share(job: ElasticJob, share: ShareStatus | None) -> ElasticJob:
    """The job with its number of workers limited to its share; `scaled_by` says who caused a change."""
    if share is None:
        return job
    by = job.scaled_by if _follows_request(job, share) else BY_SHARING
    return replace(job, desired=min(share.workers, job.desired), scaled_by=by)


def _follows_request(job: ElasticJob, share: ShareStatus) -> bool:
    """Does a change to this share follow a request to scale the job, rather than sharing's own taking and giving
    back?"""
    before = job.status.desired
    if job.sharing.automatic or not share.workers or not before:
        return False
    if min(share.workers, job.desired) < before:
        return job.desired < before
    last = job.status.scalings[-1] if job.status.scalings else None
    given_back = last is not None and last.by == BY_SHARING and last.to_workers < last.from_workers
    return bool(job.scaled_by) and not given_back


def _set_start_time(status: JobStatus, decision: PhaseDecision, now: float) -> JobStatus:
    """Set the start time. Suspending clears it and resuming sets it again, as for a batch/Job; so does queueing."""
    if decision.phase is Phase.SUSPENDED or decision.reason == QUEUED:
        return replace(status, start_time=None)
    starting = status.start_time is None and not decision.phase.terminal
    return replace(status, start_time=Timestamp(now)) if starting else status


def _fill_status(
    job: ElasticJob, status: JobStatus, decision: PhaseDecision, workers: tuple[WorkerStatus, ...], now: float
) -> JobStatus:
    active = count_kept(workers, job.desired)
    running = sum(is_active(worker) and worker.phase == PodPhase.RUNNING for worker in workers)
    succeeded = sum(worker.cause is Cause.COMPLETED for worker in workers)
    ended_at = status.completion_time or Timestamp(now)
    counted = count_workers(replace(status, phase=decision.phase, workers=workers, active=active))
    return replace(
        status,
        phase=decision.phase,
        reason=decision.reason,
        message=decision.message,
        observed_generation=job.generation,
        conditions=update_conditions(status.conditions, decision.phase, decision.message, now),
        replica_statuses={"Worker": ReplicaStatus(running, succeeded, status.failures)},  # as TorchElastic counted
        replicas=active,
        active=active,
        placed=counted.placed,
        starting=counted.starting,
        training=counted.training,
        share=None if decision.phase.terminal else status.share,
        activity=None if decision.phase.terminal else status.activity,
        usage=None if decision.phase.terminal else status.usage,
        desired=job.desired,
        min=job.min,
        max=job.max,
        selector=f"{LABEL_GROUP}={GROUP},{LABEL_JOB}={job.name},{LABEL_TYPE}=worker",
        completion_time=ended_at if decision.phase.terminal else None,
        workers=workers,
    )


def _list_actions(
    job: ElasticJob, roster: Roster, observed: Observed, moves: WorkerMoves, status: JobStatus, now: float
) -> tuple[Action, ...]:
    expires_at = _expires_at(job, status)
    if expires_at is not None and now >= expires_at:
        return (DeleteJob(),)
    deletes = list_deletions(job, roster, observed.cluster, status.phase.terminal)
    return (*deletes, *list_creations(job, roster, observed, moves, status, now))


def _due_times(
    job: ElasticJob,
    roster: Roster,
    observed: Observed,
    status: JobStatus,
    actions: tuple[Action, ...],
    now: float,
) -> Iterable[float]:
    """When to reconcile again (seconds since the epoch), because something is due that no watch event announces."""
    if set(list_deletions(replace(job, status=status), roster, observed.cluster, status.phase.terminal)) - set(actions):
        yield now  # marked in this pass, deleted in the next
    if status.phase.terminal:
        expires_at = _expires_at(job, status)
        if expires_at is not None:
            yield expires_at
        return
    deadline, done_at = deadline_at(job, status), completed_at(status.workers)
    if deadline is not None:
        yield deadline
    if status.plan is not None and status.plan.again_at is not None and not job.suspend:
        yield status.plan.again_at
    if status.pools is not None:
        yield from (at for at in (status.pools.then_at, status.pools.back_at) if at is not None and at > now)
    if done_at is not None:
        yield stragglers_until(job, done_at)
    elif status.phase is not Phase.SUSPENDED and sum(map(stays, status.workers)) < job.desired:
        until = paused_until(job, status, now)
        yield now + RETRY_S if until is None else until
    yield from due_times(status, observed.token.every_s)
    ignored_at = next_ignored_at(roster, now)
    if ignored_at is not None:
        yield ignored_at


def _expires_at(job: ElasticJob, status: JobStatus) -> float | None:
    """When to delete the job object; None for a job that has not ended or has no time to live."""
    if not status.phase.terminal or job.ttl_s is None or status.completion_time is None:
        return None
    return status.completion_time + job.ttl_s
