"""The controller's loop: observe, reconcile, write the status, act.

A pass over a job does each of these once, in this order. `reconcile` relies on that: nothing is done that the stored
status does not already say. Any error ends the pass, is logged, and the job is retried after a pause. The loop knows
neither Kubernetes nor processes: `Workload` is what it needs of the place where jobs run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from elasticctl.api.errors import ConflictError, ElasticctlError
from elasticctl.api.spec import ElasticJob, Pod, PodPhase
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.actions import Allotment, CreateWorker, Decision, DeleteJob, DeleteWorker, Observed
from elasticctl_controller.core.blame import GroupRules
from elasticctl_controller.core.history import only_progress_changed
from elasticctl_controller.core.kueue import QueuedJob
from elasticctl_controller.core.manifests import build_pod, prefer_node
from elasticctl_controller.core.reconcile import reconcile
from elasticctl_controller.loop.workqueue import WorkQueue
from elasticctl_controller.rendezvous.service import GroupView

PROGRESS_WRITE_S = 1.0
"""Progress alone is written to a job's status at most this often."""
PROGRESS_SETTLE_S = 0.1
"""How long to collect reports of the rendezvous service before a pass: ranks report every step."""
PARALLEL_CALLS = 16
SLOW_PASS_S = 10.0
"""A longer pass is logged: the API server is slow, or this machine."""
OK, CONFLICT, ERROR = "ok", "conflict", "error"

T = TypeVar("T")
log = logging.getLogger(__name__)


class Workload(Protocol):
    """The jobs and pods of a cluster, as the loop reads and changes them. All methods may raise ElasticctlError."""

    @property
    def rendezvous_endpoint(self) -> str:
        """The URL at which workers reach the rendezvous service."""

    def subscribe(self, callback: Callable[[str], None]) -> None:
        """Call `callback(key)` for every job now, and from now on whenever a job or one of its pods changes."""

    def get_job(self, key: str) -> Mapping[str, Any] | None:
        """Return the job's manifest, or None if it is gone."""

    def list_pods(self, job: ElasticJob) -> Iterable[Mapping[str, Any]]:
        """Return the pods with the job's label, whoever owns them. A returned manifest is never modified."""

    def lost_nodes(self) -> frozenset[str]:
        """Return the names of nodes that are gone or NotReady."""

    def create_pod(self, job: ElasticJob, manifest: Mapping[str, Any]) -> None:
        """Create a pod of the job. Raises ConflictError if its name is taken."""

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        """Delete the pod with this uid, without its grace period if forced. Does nothing if it is gone."""

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        """Store the status. Raises ConflictError if the job has changed since it was read, or is gone."""

    def delete_job(self, job: ElasticJob) -> None:
        """Delete the job with this uid and all it owns. Does nothing if it is gone."""

    def record_event(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        """Record an event about the job."""


class Rendezvous(Protocol):
    """The loop's side of `elasticctl_controller.rendezvous.service.RendezvousService`; thread-safe."""

    def set_group(
        self,
        key: str,
        *,
        status: JobStatus,
        job_uid: str,
        alive: Mapping[str, str],
        minimum: int,
        leaving: frozenset[str],
        rules: GroupRules,
    ) -> None:
        """Set which workers are alive (pod uid -> worker name), which of them have been told to stop, and the rules.

        `status` initialises the group of a job that is not known yet.
        """

    def view(self, key: str, job_uid: str) -> GroupView:
        """Return what the workers of the job with this uid have reported."""

    def drop(self, key: str) -> None:
        """Forget a job that is gone."""


class Queueing(Protocol):
    """An external queue that admits jobs, such as Kueue's. Thread-safe."""

    def check_admission(self, job: ElasticJob, pods: Iterable[Pod]) -> QueuedJob:
        """Return the job as it may run now. Raises ElasticctlError if that cannot be found out."""

    def carry_out(self, queued: QueuedJob, job: ElasticJob) -> None:
        """Take the step that is due: change the queue's object, or the job."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What limits the number of a job's workers: sharing, by its allotments, and the queue that the job names."""

    allotment: Callable[[ElasticJob], Allotment | None] = lambda job: None
    queueing: Queueing | None = None


@dataclass(slots=True)
class _Memory:
    """What the loop remembers of one job between passes.

    `written_at` is when its status was last written, in seconds since the epoch; `pods` are its pods as they were
    parsed, by the id of their manifests.
    """

    job_uid: str
    written_at: float = 0.0
    pods: dict[int, tuple[Mapping[str, Any], Pod]] = field(default_factory=dict)


class Controller:
    """Reconciles the jobs of a `Workload`; `rendezvous` None: jobs bring their own.

    `on_pass(seconds, outcome)` is called after each pass with "ok", "conflict" or "error". Up to `threads` jobs are
    worked on at once, but never one job by two threads.
    """

    def __init__(
        self,
        workload: Workload,
        rendezvous: Rendezvous | None,
        clock: Callable[[], float] = time.time,
        queue: WorkQueue | None = None,
        on_pass: Callable[[float, str], None] = lambda seconds, outcome: None,
        threads: int = 1,
        scheduling: Scheduling | None = None,
    ) -> None:
        self._scheduling = scheduling or Scheduling()
        self._workload, self._rendezvous, self._clock = workload, rendezvous, clock
        self._queue, self._on_pass = queue or WorkQueue(), on_pass
        self._memories: dict[str, _Memory] = {}
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
        for thread in self._threads:
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
                log.warning("job %s: the pass took %.0f s", key, took_s)
            self._on_pass(took_s, outcome)
            if outcome == OK:
                self._queue.forget(key)
            else:
                self._queue.add_rate_limited(key)
            self._queue.done(key)

    def _attempt(self, key: str) -> str:
        """Make one pass, and return its outcome."""
        try:
            self.sync(key)
        except ConflictError as e:
            log.info("job %s: %s; retrying", key, e)
            return CONFLICT
        except ElasticctlError as e:
            log.warning("job %s: %s; retrying", key, e)
            return ERROR
        except Exception:  # the edge of the loop: log, back off, retry
            log.exception("job %s: the pass failed; retrying", key)
            return ERROR
        return OK

    def sync(self, key: str) -> None:
        """Make one pass over a job. Raises the first error, after which the rest of the pass is skipped."""
        manifest = self._workload.get_job(key)
        if manifest is None:
            self._memories.pop(key, None)
            if self._rendezvous is not None:
                self._rendezvous.drop(key)
            return
        job = ElasticJob.from_manifest(manifest)
        observed = self._observe(job)
        queued = self._check_admission(job, observed)
        job = queued.job
        decision = reconcile(job, observed, self._clock())
        self._write(job, decision)
        self._update_group(job, observed, decision.status)
        for event in decision.events:
            self._workload.record_event(job, event.type, event.reason, event.message)
        self._run_actions(job, decision)
        self._carry_out(queued, replace(job, status=decision.status))
        for wait_s in (decision.requeue_s, queued.again_s):
            if wait_s is not None:
                self._queue.add_after(key, wait_s)

    def _check_admission(self, job: ElasticJob, observed: Observed) -> QueuedJob:
        queueing = self._scheduling.queueing
        if queueing is None or not job.queue or job.deleting:
            return QueuedJob(job)
        return queueing.check_admission(job, observed.pods)

    def _carry_out(self, queued: QueuedJob, job: ElasticJob) -> None:
        if self._scheduling.queueing is None or queued.step is None:
            return
        try:
            self._scheduling.queueing.carry_out(queued, job)
        except ConflictError:
            raise  # the object has changed since: retry
        except ElasticctlError as e:
            self._workload.record_event(job, "Warning", "FailedQueueing", str(e))
            raise

    def _observe(self, job: ElasticJob) -> Observed:
        pods = self._pods(job)
        given = self._scheduling.allotment(job)
        observed = Observed(
            pods=pods,
            lost_nodes=self._workload.lost_nodes(),
            share=given.share if given is not None else None,
            leave=given.leave if given is not None else frozenset(),
            moves=given.moves if given is not None else frozenset(),
            nodes=given.nodes if given is not None else (),
        )
        if self._rendezvous is None or job.rdzv_endpoint:
            return observed
        view = self._rendezvous.view(job.key, job.uid)
        return replace(
            observed,
            progress=view.progress,
            checkpoint=view.checkpoint,
            generations=view.generations,
            silent=view.silent,
            growth=view.growth,
            activity=view.activity,
        )

    def _pods(self, job: ElasticJob) -> tuple[Pod, ...]:
        """The job's pods; only those that have changed since the last pass are parsed again."""
        known = self._memory(job).pods
        found: dict[int, tuple[Mapping[str, Any], Pod]] = {}
        for manifest in self._workload.list_pods(job):
            before = known.get(id(manifest))  # the entry keeps the manifest alive, so that no other object gets its id
            found[id(manifest)] = before or (manifest, Pod.from_manifest(manifest))
        self._memory(job).pods = found
        return tuple(pod for _, pod in found.values())

    def _memory(self, job: ElasticJob) -> _Memory:
        """What is remembered of this very job, not of one that had its name before."""
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
        self._memory(job).written_at = now

    def _update_group(self, job: ElasticJob, observed: Observed, status: JobStatus) -> None:
        """Tell the rendezvous service which workers are alive, and which of them are being stopped.

        A worker that somebody else deletes counts as ended, but it is a member until it is gone.
        """
        if self._rendezvous is None or job.rdzv_endpoint:
            return
        over = job.deleting or status.phase.terminal
        lost = observed.lost_nodes
        stopped = {pod.uid for pod in observed.pods if pod.ended or pod.node in lost or pod.uid in observed.silent}
        terminating = {pod.uid for pod in observed.pods if pod.deleting} - stopped
        present = [w for w in status.workers if not over and (w.cause is None or w.uid in terminating)]
        if job.sharing.automatic:  # a worker without a node may never start: the others do not wait for it
            present = [w for w in present if w.node or w.phase != PodPhase.PENDING]
        alive = {worker.uid: worker.name for worker in present}
        leaving = {w.uid for w in present if w.removal or job.suspend or w.uid in terminating}
        self._rendezvous.set_group(
            job.key,
            status=status,
            job_uid=job.uid,
            alive=alive,
            minimum=job.min,
            leaving=frozenset(leaving),
            rules=GroupRules.of(job),
        )

    def _run_actions(self, job: ElasticJob, decision: Decision) -> None:
        deletions = [action for action in decision.actions if isinstance(action, DeleteWorker)]
        creations = [action for action in decision.actions if isinstance(action, CreateWorker)]

        def delete(action: DeleteWorker) -> None:
            self._workload.delete_pod(job, action.name, action.uid, force=action.force)

        def create(action: CreateWorker) -> None:
            pod = build_pod(job, action.index, self._workload.rendezvous_endpoint)
            self._workload.create_pod(job, prefer_node(pod, action.node) if action.node else pod)

        self._call_all(delete, deletions)
        try:
            slow_start(lambda batch: self._call_all(create, batch), creations)
        except ConflictError:
            raise  # its predecessor of the same name still exists
        except ElasticctlError as e:
            self._workload.record_event(job, "Warning", "FailedCreate", str(e))
            raise
        if any(isinstance(action, DeleteJob) for action in decision.actions):
            self._workload.delete_job(job)

    def _call_all(self, call: Callable[[T], None], items: list[T]) -> None:
        """Make all calls, several in parallel; raises the first error after all have been made."""
        errors = [future.exception() for future in [self._calls.submit(call, item) for item in items]]
        for error in errors:
            if error is not None:
                raise error


def slow_start(call: Callable[[list[T]], None], items: list[T]) -> None:
    """Pass `items` to `call` in batches of 1, 2, 4, …: a call that cannot succeed is not made thousands of times."""
    done, size = 0, 1
    while done < len(items):
        call(items[done : done + size])
        done, size = done + size, size * 2
