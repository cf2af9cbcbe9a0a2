"""The controller's core: from a job and what is observed of it to the next status and the next actions.

A pure function, level-triggered: it may be called at any time, any number of times, with caches that lag. It relies on
two things of the loop: the status is written before the actions run, against the resourceVersion it was read at, and
pods are named by index, so that the API server itself refuses a double. So whatever has to survive a crash between
two steps is stored first: a pod is deleted only when the stored roster says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.spec import GROUP, LABEL_GROUP, LABEL_JOB, LABEL_TYPE, ElasticJob, PodPhase, worker_name
from elasticctl.api.status import Cause, JobStatus, Phase, ReplicaStatus, ShareStatus, WorkerStatus
from elasticctl_controller.core.actions import Action, CreateWorker, Decision, DeleteJob, Observed
from elasticctl_controller.core.deletions import is_spent, list_deletions, mark_removals
from elasticctl_controller.core.history import close_recovered, fold_reports
from elasticctl_controller.core.notifications import list_contradictions, list_events
from elasticctl_controller.core.phase import (
    FINISHING,
    QUEUED,
    PhaseDecision,
    deadline_at,
    decide_phase,
    stragglers_until,
    update_conditions,
)
from elasticctl_controller.core.restarts import add_worker_seconds, attribute_to_nodes, count_ends, record_scaling
from elasticctl_controller.core.workers import Roster, completed_at, is_active, update_roster

RETRY_S = 5.0  # look again when workers are missing and nothing can be done about it now
MAX_CREATES = 500  # per pass, so that a pass stays short
BY_SHARING = "sharing"


def reconcile(job: ElasticJob, observed: Observed, now: float) -> Decision:
    """Decide what to do about `job` at `now` (seconds since the epoch, UTC). Never raises, whatever the job holds."""
    if job.deleting:
        return Decision(job.status)  # the cluster removes what the job owns
    job = apply_share(job, observed.share)
    roster = update_roster(job, observed, now)
    status = add_worker_seconds(job, fold_reports(job.status, observed), roster.ends)
    status = attribute_to_nodes(replace(status, share=observed.share), roster.explained, now)
    if status.phase.terminal:
        decision = PhaseDecision(status.phase, status.reason, status.message)
    else:
        finishing = completed_at(roster.workers) is not None
        status = count_ends(job, record_scaling(job, status, now), roster.ends, finishing)
        decision = decide_phase(job, status, roster, now)
        status = _set_start_time(status, decision, now)
    workers = mark_removals(job, roster, decision, observed.leave, observed.moves)
    status = _sealed(job, _fill_status(job, close_recovered(status), decision, workers, now), now)
    actions = _actions(job, roster, observed, status, now)
    return Decision(
        status=status,
        actions=actions,
        events=(*list_contradictions(job), *list_events(job.status, status)),
        requeue_s=_requeue(job, roster, observed, status, actions, now),
    )


def apply_share(job: ElasticJob, share: ShareStatus | None) -> ElasticJob:
    """The job as sharing lets it be: it wants what it is given. `scaled_by` says on whose wish that changes."""
    if share is None:
        return job
    chosen = job.sharing.automatic or not share.workers or not job.status.desired
    return replace(job, desired=min(share.workers, job.desired), scaled_by=BY_SHARING if chosen else job.scaled_by)


def _set_start_time(status: JobStatus, decision: PhaseDecision, now: float) -> JobStatus:
    """Start the job's clock; suspension stops it and resuming starts it anew, as for a batch/Job. So does waiting."""
    if decision.phase is Phase.SUSPENDED or decision.reason == QUEUED:
        return replace(status, start_time=None)
    starting = status.start_time is None and not decision.phase.terminal
    return replace(status, start_time=Timestamp(now)) if starting else status


def _fill_status(
    job: ElasticJob, status: JobStatus, decision: PhaseDecision, workers: tuple[WorkerStatus, ...], now: float
) -> JobStatus:
    active = sum(map(is_active, workers))
    running = sum(is_active(worker) and worker.phase == PodPhase.RUNNING for worker in workers)
    succeeded = sum(worker.cause is Cause.COMPLETED for worker in workers)
    ended_at = status.completion_time or Timestamp(now)
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
        share=None if decision.phase.terminal else status.share,
        desired=job.desired,
        min=job.min,
        max=job.max,
        selector=f"{LABEL_GROUP}={GROUP},{LABEL_JOB}={job.name},{LABEL_TYPE}=worker",
        completion_time=ended_at if decision.phase.terminal else None,
        workers=workers,
    )


def _sealed(job: ElasticJob, status: JobStatus, now: float) -> JobStatus:
    """The stored status itself when nothing changed, so that a job at rest is never written."""
    if replace(status, last_reconcile_time=job.status.last_reconcile_time) == job.status:
        return job.status
    return replace(status, last_reconcile_time=Timestamp(now))


def _actions(job: ElasticJob, roster: Roster, observed: Observed, status: JobStatus, now: float) -> tuple[Action, ...]:
    expires_at = _expires_at(job, status)
    if expires_at is not None and now >= expires_at:
        return (DeleteJob(),)
    deletes = list_deletions(job, roster, observed, status.phase.terminal)
    return (*deletes, *_creations(job, roster, observed, status, now))


def _creations(
    job: ElasticJob, roster: Roster, observed: Observed, status: JobStatus, now: float
) -> tuple[CreateWorker, ...]:
    """Fill the gaps at the lowest free indices.

    A name is taken while any pod bears it, terminating ones and strangers' included. The remains of an ended worker
    are deleted within a pass or two, so its index is waited for rather than going to a new one.
    """
    held_back = status.backoff.until is not None and now < status.backoff.until
    if status.phase.terminal or status.phase is Phase.SUSPENDED or status.reason == FINISHING or held_back:
        return ()
    live = sum(not pod.ended for pod in roster.pods.values())
    vacating = sum(is_spent(w) and w.uid in roster.pods and not roster.pods[w.uid].deleting for w in status.workers)
    wanted = min(job.desired - status.active - vacating, job.max - live, MAX_CREATES)
    taken = {pod.name for pod in observed.pods}
    free = (index for index in range(job.max) if worker_name(job.name, index) not in taken)
    indices = list(itertools.islice(free, max(0, wanted)))
    # Those that wait already have been sent to the first of the nodes.
    nodes = (("",) * len(indices) + observed.nodes)[len(observed.nodes) :]
    return tuple(CreateWorker(index, node) for index, node in zip(indices, nodes, strict=True))


def _requeue(
    job: ElasticJob,
    roster: Roster,
    observed: Observed,
    status: JobStatus,
    actions: tuple[Action, ...],
    now: float,
) -> float | None:
    """Seconds until something is due that no event will tell of."""
    return min((max(0.0, at - now) for at in _due(job, roster, observed, status, actions, now)), default=None)


def _due(
    job: ElasticJob,
    roster: Roster,
    observed: Observed,
    status: JobStatus,
    actions: tuple[Action, ...],
    now: float,
) -> Iterable[float]:
    """Times at which to look again."""
    if set(list_deletions(replace(job, status=status), roster, observed, status.phase.terminal)) - set(actions):
        yield now  # what was only marked in this pass
    if status.phase.terminal:
        expires_at = _expires_at(job, status)
        if expires_at is not None:
            yield expires_at
        return
    deadline, done_at = deadline_at(job, status), completed_at(status.workers)
    if deadline is not None:
        yield deadline
    if done_at is not None:
        yield stragglers_until(job, done_at)
    elif status.phase is not Phase.SUSPENDED and status.active < job.desired:
        until = status.backoff.until
        yield until if until is not None and until > now else now + RETRY_S


def _expires_at(job: ElasticJob, status: JobStatus) -> float | None:
    """When the job object itself is to go; None for a job that has not ended or has no time to live."""
    if not status.phase.terminal or job.ttl_s is None or status.completion_time is None:
        return None
    return status.completion_time + job.ttl_s
