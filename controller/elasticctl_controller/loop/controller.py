"""The controller's loop: observe, reconcile, write the status, act.

One pass over one job does each of these once, in this order; `reconcile` relies on it: nothing is done that the stored
status does not already tell of. Whatever goes wrong ends the pass, is logged, and the job is looked at again after a
pause. The loop knows neither Kubernetes nor processes: `Workload` is what it needs of the place jobs run at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from elasticctl.api.errors import ConflictError, ElasticctlError
from elasticctl.api.spec import ElasticJob, Pod, PodPhase
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.actions import Allotment, CreateWorker, Decision, DeleteJob, DeleteWorker, Observed
from elasticctl_controller.core.history import only_progress_changed
from elasticctl_controller.core.kueue import QueuedJob
from elasticctl_controller.core.manifests import build_pod, prefer_node
from elasticctl_controller.core.reconcile import reconcile
from elasticctl_controller.loop.workqueue import WorkQueue
from elasticctl_controller.rendezvous.service import GroupView

PROGRESS_WRITE_S = 1.0
"""Progress alone is written to a job's status at most this often."""
PROGRESS_SETTLE_S = 0.1
"""How long news of the rendezvous service may gather before a pass: ranks report every step."""
PARALLEL_CALLS = 16
SLOW_PASS_S = 10.0
"""A pass that takes longer is told of: the API server is slow, or this machine."""
OK, CONFLICT, ERROR = "ok", "conflict", "error"

T = TypeVar("T")
log = logging.getLogger(__name__)


class Workload(Protocol):
    """The jobs and pods of one cluster, as the loop reads and changes them; all methods may raise ElasticctlError."""

    @property
    def rendezvous_endpoint(self) -> str:
        """URL of the rendezvous service, as a worker reaches it."""

    def subscribe(self, callback: Callable[[str], None]) -> None:
        """Call `callback(key)` for every job there is, and from now on whenever a job or a pod of it changes."""

    def get_job(self, key: str) -> Mapping[str, Any] | None:
        """Return the job's manifest, or None when it is gone."""

    def list_pods(self, job: ElasticJob) -> Iterable[Mapping[str, Any]]:
        """Return the pods with the job's label, whoever owns them; one that was given out never changes."""

    def lost_nodes(self) -> frozenset[str]:
        """Return the names of nodes that are gone or NotReady."""

    def create_pod(self, job: ElasticJob, manifest: Mapping[str, Any]) -> None:
        """Create a pod of the job; ConflictError when its name is taken."""

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        """Ask for the deletion of this very pod, without its grace period when forced; one that is gone is fine."""

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        """Store the status; ConflictError when the job has changed since it was read, or is gone."""

    def delete_job(self, job: ElasticJob) -> None:
        """Delete this very job and all it has; fine when it is gone."""

    def record_event(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        """Add an event about the job."""


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
        automatic: bool,
    ) -> None:
        """Say which workers are alive (pod uid -> worker name), and which of them have been told to go.

        A group of `automatic` size weighs whether taking newcomers in is worth its cost. `status` seeds a job that is
        not known yet.
        """

    def view(self, key: str) -> GroupView:
        """Return what the workers of a job have reported."""

    def drop(self, key: str) -> None:
        """Forget a job that is gone."""


class Queueing(Protocol):
    """The loop's side of `elasticctl_controller.kube.kueue.KueueQueueing`: who else has to admit jobs; thread-safe."""

    def turn(self, job: ElasticJob, pods: Iterable[Pod]) -> QueuedJob:
        """Return the job as it may be now; raises what keeps that from being known."""

    def carry_out(self, turn: QueuedJob, job: ElasticJob) -> None:
        """Tell who admits it what has become of the job, or the job what was decided."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Who has a say in how many workers a job has: sharing, by its allotments, and the queue that a job names."""

    allotment: Callable[[ElasticJob], Allotment | None] = lambda job: None
    queueing: Queueing | None = None


class Controller:
    """Keeps the jobs of one `Workload` going; `rendezvous` None: jobs bring their own.

    `on_pass(seconds, outcome)` hears of each pass: "ok", "conflict" or "error". With several `threads` that many jobs
    are worked on at once; one job never is.
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
        self._written_at: dict[str, float] = {}
        self._read: dict[str, dict[int, tuple[Mapping[str, Any], Pod]]] = {}
        self._calls = ThreadPoolExecutor(PARALLEL_CALLS, thread_name_prefix="calls")
        self._threads = [threading.Thread(target=self._run, name=f"loop-{n}", daemon=True) for n in range(threads)]

    def start(self) -> None:
        """Look at every job once, then follow the changes, in threads."""
        self._workload.subscribe(self._queue.add)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the passes that run, and end the threads."""
        self._queue.shut_down()
        for thread in self._threads:
            thread.join()
        self._calls.shutdown()

    @property
    def alive(self) -> bool:
        """True from `start` to `stop`, unless a thread has died, which is an error."""
        return all(thread.is_alive() for thread in self._threads)

    def reported(self, key: str) -> None:
        """The rendezvous service has news of a job; from any thread."""
        self._queue.add_after(key, PROGRESS_SETTLE_S)

    def look_at(self, key: str) -> None:
        """Something has changed for a job that no event tells of; from any thread."""
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
        """One pass, and how it went."""
        try:
            self.sync(key)
        except ConflictError as e:
            log.info("job %s: %s; looking again", key, e)
            return CONFLICT
        except ElasticctlError as e:
            log.warning("job %s: %s; trying again", key, e)
            return ERROR
        except Exception:  # the edge of the loop: log, back off, look again
            log.exception("job %s: the pass failed; trying again", key)
            return ERROR
        return OK

    def sync(self, key: str) -> None:
        """One pass over one job; raises what went wrong, and then nothing later in the pass was done."""
        manifest = self._workload.get_job(key)
        if manifest is None:
            self._written_at.pop(key, None)
            self._read.pop(key, None)
            if self._rendezvous is not None:
                self._rendezvous.drop(key)
            return
        job = ElasticJob.from_manifest(manifest)
        observed = self._observe(job)
        turn = self._turn(job, observed)
        job = turn.job
        decision = reconcile(job, observed, self._clock())
        self._write(job, decision)
        self._gather(job, observed, decision.status)
        for event in decision.events:
            self._workload.record_event(job, event.type, event.reason, event.message)
        self._act(job, decision)
        self._carry_out(turn, replace(job, status=decision.status))
        for wait_s in (decision.requeue_s, turn.again_s):
            if wait_s is not None:
                self._queue.add_after(key, wait_s)

    def _turn(self, job: ElasticJob, observed: Observed) -> QueuedJob:
        queueing = self._scheduling.queueing
        return (
            QueuedJob(job) if queueing is None or not job.queue or job.deleting else queueing.turn(job, observed.pods)
        )

    def _carry_out(self, turn: QueuedJob, job: ElasticJob) -> None:
        if self._scheduling.queueing is None or turn.step is None:
            return
        try:
            self._scheduling.queueing.carry_out(turn, job)
        except ConflictError:
            raise  # somebody was faster: there is another look
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
        view = self._rendezvous.view(job.key)
        return replace(
            observed,
            progress=view.progress,
            checkpoint=view.checkpoint,
            generations=view.generations,
            silent=view.silent,
            growth=view.growth,
        )

    def _pods(self, job: ElasticJob) -> tuple[Pod, ...]:
        """The job's pods; only those that have changed since the pass before are read again."""
        known = self._read.get(job.key, {})
        found: dict[int, tuple[Mapping[str, Any], Pod]] = {}
        for manifest in self._workload.list_pods(job):
            before = known.get(id(manifest))  # which the entry keeps from being given to another object
            found[id(manifest)] = before or (manifest, Pod.from_manifest(manifest))
        self._read[job.key] = found
        return tuple(pod for _, pod in found.values())

    def _write(self, job: ElasticJob, decision: Decision) -> None:
        """Store the status if it says anything new; news of progress alone may wait a moment."""
        if decision.status == job.status:
            return
        now = self._clock()
        wait_s = self._written_at.get(job.key, 0.0) + PROGRESS_WRITE_S - now
        too_soon = 0 < wait_s <= PROGRESS_WRITE_S and not decision.actions
        if too_soon and only_progress_changed(job.status, decision.status):
            self._queue.add_after(job.key, wait_s)
            return
        self._workload.write_status(job, decision.status)
        self._written_at[job.key] = now

    def _gather(self, job: ElasticJob, observed: Observed, status: JobStatus) -> None:
        """Tell the rendezvous service who is alive, and who of them is on the way out.

        A worker that somebody else deletes is counted as ended, but it is a member until it has gone.
        """
        if self._rendezvous is None or job.rdzv_endpoint:
            return
        over = job.deleting or status.phase.terminal
        lost = observed.lost_nodes
        stopped = {pod.uid for pod in observed.pods if pod.ended or pod.node in lost or pod.uid in observed.silent}
        terminating = {pod.uid for pod in observed.pods if pod.deleting} - stopped
        here = [w for w in status.workers if not over and (w.cause is None or w.uid in terminating)]
        if job.sharing.automatic:  # one without a place may never come: the others do not wait for it
            here = [w for w in here if w.node or w.phase != PodPhase.PENDING]
        alive = {worker.uid: worker.name for worker in here}
        leaving = {w.uid for w in here if w.removal or job.suspend or w.uid in terminating}
        self._rendezvous.set_group(
            job.key,
            status=status,
            job_uid=job.uid,
            alive=alive,
            minimum=job.min,
            leaving=frozenset(leaving),
            automatic=job.sharing.automatic,
        )

    def _act(self, job: ElasticJob, decision: Decision) -> None:
        deletions = [action for action in decision.actions if isinstance(action, DeleteWorker)]
        creations = [action for action in decision.actions if isinstance(action, CreateWorker)]
        self._all(lambda action: self._workload.delete_pod(job, action.name, action.uid, force=action.force), deletions)
        try:
            slow_start(lambda batch: self._all(lambda action: self._create(job, action), batch), creations)
        except ConflictError:
            raise  # its predecessor of the same name is still there
        except ElasticctlError as e:
            self._workload.record_event(job, "Warning", "FailedCreate", str(e))
            raise
        if any(isinstance(action, DeleteJob) for action in decision.actions):
            self._workload.delete_job(job)

    def _create(self, job: ElasticJob, action: CreateWorker) -> None:
        pod = build_pod(job, action.index, self._workload.rendezvous_endpoint)
        self._workload.create_pod(job, prefer_node(pod, action.node) if action.node else pod)

    def _all(self, call: Callable[[T], None], items: list[T]) -> None:
        """Make all calls, several at a time; raises the first error once all have been made."""
        errors = [future.exception() for future in [self._calls.submit(call, item) for item in items]]
        for error in errors:
            if error is not None:
                raise error


def slow_start(call: Callable[[list[T]], None], items: list[T]) -> None:
    """Give `items` to `call` in batches of 1, 2, 4, …: a call that cannot succeed is not made thousands of times."""
    done, size = 0, 1
    while done < len(items):
        call(items[done : done + size])
        done, size = done + size, size * 2
