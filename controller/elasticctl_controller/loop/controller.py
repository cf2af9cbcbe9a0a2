"""The controller's loop: observe, reconcile, write the status, act.

A pass over a job does each of these once, in this order. `reconcile` relies on that: nothing is done before the stored
status says so. An error ends the pass and is logged, and the job is retried after a pause. A worker that cannot be
created is no error: the status reports it, and it is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from elasticctl.api.errors import ConflictError, ElasticctlError
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import JobStatus, TokenStatus
from elasticctl_controller.core.actions import Decision
from elasticctl_controller.core.failure_budget import is_asked_for
from elasticctl_controller.core.goal.pools import PoolEvidence
from elasticctl_controller.core.group.failures import GroupRules
from elasticctl_controller.core.history import only_progress_changed
from elasticctl_controller.core.interruption_notices import LeaveNotice, Leaving
from elasticctl_controller.core.observation import Allotment, GroupView, Observed, TokenView
from elasticctl_controller.core.reconcile import reconcile
from elasticctl_controller.core.sharing.kueue import QueuedJob
from elasticctl_controller.loop.apply_actions import PARALLEL_CALLS, Workload, apply_actions, log_events, log_fields
from elasticctl_controller.loop.cluster_observer import ClusterObserver, notices_of
from elasticctl_controller.loop.workqueue import WorkQueue, fair_pause_s

PROGRESS_WRITE_S = 1.0
"""Progress alone is written to a job's status at most this often."""
PROGRESS_SETTLE_S = 0.1
"""How long to collect reports of the rendezvous service before a pass: ranks report every step."""
SLOW_PASS_S = 10.0
"""A longer pass is logged: the API server is slow, or this machine."""
REFUSED_RETRY_S = 3.0
"""How long after a worker could not be created it is tried again: nothing announces that a quota has room again, or
that what the template names exists now..."""
REFUSED_PER_S = 20.0
"""... but no more often than this over all jobs, so that many of them do not use up the requests that others need. Each
namespace has the same share of it."""
TOKEN_RETRY_S = 60.0
OK, CONFLICT, ERROR = "ok", "conflict", "error"

log = logging.getLogger(__name__)


class Rendezvous(Protocol):
    """The loop's side of `elasticctl_controller.rendezvous.service.RendezvousService`; thread-safe."""

    @property
    def token_every_s(self) -> float:
        """How often a job gets a new token."""

    def set_group(
        self,
        key: str,
        *,
        status: JobStatus,
        job_uid: str,
        alive: Mapping[str, str],
        minimum: int,
        leaving: Leaving,
        rules: GroupRules,
    ) -> None:
        """Set which workers are alive (pod uid -> worker name), which of them are to leave, and the rules.

        `status` initialises the group of a job that is not known yet.
        """

    def view(self, key: str, job_uid: str) -> GroupView:
        """Return what the workers of the job with this uid have reported."""

    def drop(self, key: str) -> None:
        """Drop a job that is gone."""


class Queueing(Protocol):
    """An external queue that admits jobs, such as Kueue's. Thread-safe."""

    def check_admission(self, job: ElasticJob, pods: Iterable[Pod]) -> QueuedJob:
        """Return the job as it may run now. Raises ElasticctlError if that cannot be found out."""

    def carry_out(self, queued: QueuedJob, job: ElasticJob) -> None:
        """Do what is due: change the queue's objects, or the job."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What limits the number of a job's workers: sharing, through its allotments, and the queue that the job names.

    `restrict` applies the limits of its project to a job (`loop.project_limits`).
    """

    restrict: Callable[[ElasticJob], ElasticJob] = lambda job: job
    allotment: Callable[[ElasticJob], Allotment | None] = lambda job: None
    queueing: Queueing | None = None


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is notified of what the loop does.

    `on_pass(seconds, outcome)` is called after each pass with "ok", "conflict" or "error"; `on_status(job, status)`
    once a job's new status is stored, with the job as it was before; `on_gone(key)` for a job that no longer exists.
    """

    on_pass: Callable[[float, str], None] = lambda seconds, outcome: None
    on_status: Callable[[ElasticJob, JobStatus], None] = lambda job, status: None
    on_gone: Callable[[str], None] = lambda key: None


@dataclass(slots=True)
class _Memory:
    """What the loop remembers about one job between passes.

    `written_at` is when its status was last written. `refused` is why the last worker could not be created (None: none
    was tried). `taken` are names of workers that pods of others had, and when to try them again. `token` is its newest
    token, and `delivered_token` the number of the last one that was delivered to its workers. Times are in seconds
    since the epoch.
    """

    job_uid: str
    written_at: float = 0.0
    refused: str | None = None
    taken: dict[str, float] = field(default_factory=dict)
    token: TokenStatus | None = None
    delivered_token: int = 0


class Controller:
    """Reconciles the jobs of a `Workload`. Without a `rendezvous`, jobs bring their own.

    Up to `threads` jobs are worked on at a time, but never one job by two threads.
    """

    def __init__(
        self,
        workload: Workload,
        rendezvous: Rendezvous | None,
        clock: Callable[[], float] = time.time,
        queue: WorkQueue | None = None,
        threads: int = 1,
        scheduling: Scheduling | None = None,
        listeners: Listeners | None = None,
    ) -> None:
        self._scheduling = scheduling or Scheduling()
        self._workload, self._rendezvous, self._clock = workload, rendezvous, clock
        self._queue, self._listeners = WorkQueue() if queue is None else queue, listeners or Listeners()
        self._memories: dict[str, _Memory] = {}
        self._evidence = PoolEvidence()
        self._cluster = ClusterObserver(workload, clock)
        self._calls = ThreadPoolExecutor(PARALLEL_CALLS, thread_name_prefix="calls")
        self._threads = [threading.Thread(target=self._run, name=f"loop-{n}", daemon=True) for n in range(threads)]

    def start(self) -> None:
        """Reconcile every job once, then on every change, in threads."""
        self._workload.subscribe(self._queue.add)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the current passes, and end the threads."""
        self._queue.shut_down()
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join()
        self._calls.shutdown()

    @property
    def alive(self) -> bool:
        """True between `start` and `stop`; False if a thread has died, which is an error."""
        return all(thread.is_alive() for thread in self._threads)

    def enqueue_soon(self, key: str) -> None:
        """Reconcile a job after a moment, in which more may change: its ranks have reported. Thread-safe."""
        self._queue.add_after(key, PROGRESS_SETTLE_S)

    def enqueue(self, key: str) -> None:
        """Reconcile a job now, because of a change that `Workload` does not announce. Thread-safe."""
        self._queue.add(key)

    def _run(self) -> None:
        while (key := self._queue.get()) is not None:
            began = time.monotonic()
            outcome = self._attempt(key)
            took_s = time.monotonic() - began
            if took_s > SLOW_PASS_S:
                log.warning("job %s: the pass took %.0f s", key, took_s, extra={"job": key})
            self._listeners.on_pass(took_s, outcome)
            if outcome == OK:
                self._queue.reset_failures(key)
            else:
                self._queue.add_rate_limited(key)
            self._queue.done(key)

    def _attempt(self, key: str) -> str:
        """Make one pass, and return its outcome."""
        try:
            self.sync(key)
        except ConflictError as e:
            log.info("job %s: %s; retrying", key, e, extra={"job": key})
            return CONFLICT
        except ElasticctlError as e:
            log.warning("job %s: %s; retrying", key, e, extra={"job": key})
            return ERROR
        except Exception:  # the edge of the loop: log, back off, retry
            log.exception("job %s: the pass failed; retrying", key, extra={"job": key})
            return ERROR
        return OK

    def sync(self, key: str) -> None:
        """Make one pass over a job. Raises the first error, after which the rest of the pass is skipped."""
        manifest = self._workload.get_job(key)
        if manifest is None:
            self._memories.pop(key, None)
            self._listeners.on_gone(key)
            self._cluster.drop_job(key)
            if self._rendezvous is not None:
                self._rendezvous.drop(key)
            return
        job = self._scheduling.restrict(ElasticJob.from_manifest(manifest))
        observed = self._observe(job)
        queued = self._check_admission(job, observed)
        job = queued.job
        decision = reconcile(job, observed, self._clock())
        self._evidence.record(job, decision.status)
        self._write(job, decision)
        self._memory(job).token = decision.status.token
        self._update_group(job, observed, decision.status)
        log_events(job, decision)
        for event in decision.events:
            self._workload.record_event(job, event.type, event.reason, event.message)
        decided = replace(job, status=decision.status)
        created = self._apply_actions(decided, decision)
        self._deliver_token(decided)
        self._carry_out(queued, decided)
        self._ask_about(decided, decision.unexplained)
        least_s = 0.0 if created else self._refused_pause_s(key)
        for wait_s in (decision.requeue_s, queued.again_s, None if created else least_s):
            if wait_s is not None:
                self._queue.add_after(key, max(wait_s, least_s))

    def _deliver_token(self, job: ElasticJob) -> None:
        """Deliver a new token. A failure is only logged, because the previous token stays valid until that succeeds."""
        token, memory = job.status.token, self._memory(job)
        if token is None or token.former_until is not None or job.status.phase.terminal or job.deleting:
            return
        if memory.delivered_token == token.number:
            return
        try:
            self._workload.deliver_token(job)
        except ElasticctlError as e:
            text = "job %s: its next token cannot be delivered, so the previous one stays valid: %s"
            log.warning(text, job.key, e, extra=log_fields(job))
            self._queue.add_after(job.key, TOKEN_RETRY_S)
        else:
            memory.delivered_token = token.number
            self._queue.add(job.key)

    def _ask_about(self, job: ElasticJob, pod: Pod | None) -> None:
        """Find out why a pod does not start, for the next pass."""
        is_new, again_s = self._cluster.ask_about(job, pod)
        if is_new:
            self._queue.add(job.key)
        if again_s is not None:
            self._queue.add_after(job.key, again_s)

    def _check_admission(self, job: ElasticJob, observed: Observed) -> QueuedJob:
        queueing = self._scheduling.queueing
        if queueing is None or not job.queue or job.deleting:
            return QueuedJob(job)
        if job.over_limit and not job.admitted:
            return QueuedJob(job)  # it must not even wait in the queue
        return queueing.check_admission(job, observed.cluster.pods)

    def _carry_out(self, queued: QueuedJob, job: ElasticJob) -> None:
        if self._scheduling.queueing is None or (queued.step is None and not queued.growth.is_due):
            return
        try:
            self._scheduling.queueing.carry_out(queued, job)
        except ConflictError:
            raise  # the object has changed since: retry
        except ElasticctlError as e:
            self._workload.record_event(job, "Warning", "FailedQueueing", str(e))
            raise

    def _observe(self, job: ElasticJob) -> Observed:
        memory, rendezvous = self._memory(job), self._rendezvous_of(job)
        allotment = self._scheduling.allotment(job)
        cluster = self._cluster.observe(job, memory.refused, memory.taken)
        group, token = GroupView(), TokenView(memory.token, memory.delivered_token)
        if rendezvous is not None:
            group = rendezvous.view(job.key, job.uid)
            cluster = self._cluster.add_notices(job, cluster, group.notices, is_shared=allotment is not None)
            token = replace(token, every_s=rendezvous.token_every_s)
        return Observed(cluster, group, allotment, self._evidence.of(job), token)

    def _rendezvous_of(self, job: ElasticJob) -> Rendezvous | None:
        """The rendezvous service, unless the job brings its own."""
        return None if job.rdzv_endpoint else self._rendezvous

    def _memory(self, job: ElasticJob) -> _Memory:
        """What is remembered about this very job, not about an earlier one of its name."""
        known = self._memories.get(job.key)
        if known is None or known.job_uid != job.uid:
            known = self._memories[job.key] = _Memory(job.uid)
        return known

    def _write(self, job: ElasticJob, decision: Decision) -> None:
        """Write the status if it has changed; progress alone is written at most every `PROGRESS_WRITE_S`."""
        if decision.status == job.status:
            return
        now = self._clock()
        wait_s = self._memory(job).written_at + PROGRESS_WRITE_S - now
        too_soon = 0 < wait_s <= PROGRESS_WRITE_S and not decision.actions
        if too_soon and only_progress_changed(job.status, decision.status):
            self._queue.add_after(job.key, wait_s)
            return
        self._workload.write_status(job, decision.status)
        self._listeners.on_status(job, decision.status)
        self._memory(job).written_at = now

    def _update_group(self, job: ElasticJob, observed: Observed, status: JobStatus) -> None:
        """Report to the rendezvous service which workers are alive, and which of them are being stopped.

        A worker that others delete counts as ended, but stays a member until it is gone.
        """
        rendezvous = self._rendezvous_of(job)
        if rendezvous is None:
            return
        over = job.deleting or status.phase.terminal
        pods, lost, silent = observed.cluster.pods, observed.cluster.lost_nodes, observed.group.silent
        stopped = {pod.uid for pod in pods if pod.ended or pod.node in lost or pod.uid in silent}
        terminating = {pod.uid for pod in pods if pod.deleting} - stopped
        present = [w for w in status.workers if not over and (w.cause is None or w.uid in terminating)]
        if job.sharing.automatic:  # a worker without a node may never start: the others do not wait for it
            present = [w for w in present if w.node or w.phase != PodPhase.PENDING]
        alive = {worker.uid: worker.name for worker in present}
        stopping = {w.uid for w in present if w.removal or job.suspend}
        notices = notices_of(pods, self._workload.node_notices())
        notices |= {pod.uid: _deletion(pod) for pod in pods if pod.deleting}
        unasked = {uid: notice for uid, notice in notices.items() if uid in alive and uid not in stopping}
        if over and all(pod.ended for pod in pods):
            rendezvous.drop(job.key)  # its token ends with it
            return
        rendezvous.set_group(
            job.key,
            status=status,
            job_uid=job.uid,
            alive=alive,
            minimum=job.min,
            leaving=Leaving(frozenset(stopping | (terminating & alive.keys())), unasked),
            rules=GroupRules.of(job, asked=is_asked_for(status)),
        )

    def _apply_actions(self, job: ElasticJob, decision: Decision) -> bool:
        """Carry out what was decided; False if a worker could not be created, which the status will report."""
        outcome = apply_actions(self._workload, self._calls, job, decision)
        refused, memory = outcome.refused, self._memory(job)
        for name in outcome.created:
            memory.taken.pop(name, None)
        if outcome.taken:
            if not outcome.taken <= memory.taken.keys():
                self._queue.add(job.key)  # there may be other names, and the status has to report it
            again_s = self._refused_pause_s(job.key)
            memory.taken |= dict.fromkeys(outcome.taken, self._clock() + again_s)
            self._queue.add_after(job.key, again_s)
        elif decision.status.active >= job.desired:
            memory.taken.clear()
        if refused is None:
            return True
        if refused and not memory.refused:
            log.warning("job %s: a worker cannot be created: %s", job.key, refused, extra=log_fields(job))
            self._queue.add(job.key)  # its status should report it immediately
        memory.refused = refused
        return not refused

    def _refused_pause_s(self, key: str) -> float:
        """Seconds until a worker of this job that could not be created is tried again."""
        refused = [other for other, memory in list(self._memories.items()) if memory.refused or memory.taken]
        return max(REFUSED_RETRY_S, fair_pause_s(refused, key, REFUSED_PER_S))


def _deletion(pod: Pod) -> LeaveNotice:
    """The notice that the deletion of a pod gives its worker; a pod that is deleted without grace has no time left."""
    return LeaveNotice("its node is being drained" if pod.drained else "its pod is being deleted", pod.deadline or 0.0)
