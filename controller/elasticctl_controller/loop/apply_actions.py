"""Applies what was decided about a job: deletes pods, then creates pods, several at a time.

`Workload` is what the loop needs from the place where jobs run; the loop knows neither Kubernetes nor processes.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import (
    BusyError,
    ClusterError,
    ConflictError,
    CredentialsError,
    ElasticctlError,
    UnreachableError,
)
from elasticctl.api.spec import ElasticJob, worker_name
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.actions import CreateWorker, Decision, DeleteJob, DeleteWorker
from elasticctl_controller.core.goal.placement import (
    ask_for_pool,
    asks_karpenter,
    avoid_nodes,
    prefer_node,
    require_node_types,
)
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.core.manifests import build_pod
from elasticctl_controller.core.notifications import WARNING


class NameTakenError(ClusterError):
    """A pod that is not the job's has this worker's name, and no watch will report when it is gone."""


_OF_THE_SERVER = (ConflictError, BusyError, UnreachableError, CredentialsError)
"""Errors that do not concern the worker that was to be created."""
_REQUEST = re.compile(r" \([A-Z]+ /[^ )]*\)$|^the cluster refused [A-Z]+ /[^ ]*: ")
"""What our client adds to the message of an API server."""

PARALLEL_CALLS = 16
"""How many pods are created or deleted at a time."""

T = TypeVar("T")

PodCreator = Callable[[Manifest], None]

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
        """Return the pods with the job's label, of any owner. A returned manifest is never modified."""

    def list_pod_events(self, job: ElasticJob, uid: str) -> list[Manifest]:
        """Return some events about the job's pod with this uid; none if there are none, or if they may not be read."""

    def lost_nodes(self) -> frozenset[str]:
        """Return the names of nodes that are gone or NotReady."""

    def node_notices(self) -> Mapping[str, LeaveNotice]:
        """Return the nodes that workers will have to leave, and why."""

    def nodes_may_be_named(self) -> bool:
        """Return False where pods that name nodes to avoid would get no machine."""

    def pod_creator(self, job: ElasticJob) -> PodCreator:
        """Return what creates the job's pods in this pass. It raises ConflictError if a pod that `list_pods` returns,
        or will return, has the new pod's name, and NameTakenError if any other pod does. Thread-safe.
        """

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        """Delete the pod with this uid, without its grace period if forced. Does nothing if it is gone."""

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        """Store the status. Raises ConflictError if the job has changed since it was read, or is gone."""

    def deliver_token(self, job: ElasticJob) -> None:
        """Put the job's current token into the files of its workers, soon."""

    def delete_job(self, job: ElasticJob) -> None:
        """Delete the job with this uid and all it owns. Does nothing if it is gone."""

    def record_event(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        """Record an event about the job."""


@dataclass(frozen=True, slots=True)
class AppliedActions:
    """The outcome of a pass: why a worker was `refused` ("": none was; None: none was to be created), the names of the
    workers that were `created`, and the names that are `taken` by pods of others.
    """

    refused: str | None
    created: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()


def apply_actions(workload: Workload, calls: Executor, job: ElasticJob, decision: Decision) -> AppliedActions:
    """Delete and create pods, or delete the job.

    A worker that the cluster refuses is part of the outcome. Any other error is raised, and the remaining actions are
    not carried out.
    """

    def delete(action: DeleteWorker) -> None:
        workload.delete_pod(job, action.name, action.uid, force=action.force)
        log.info("job %s: deleted worker %s", job.key, action.name, extra=log_fields(job, action.name))

    call_all(calls, delete, [action for action in decision.actions if isinstance(action, DeleteWorker)])
    creations = [action for action in decision.actions if isinstance(action, CreateWorker)]
    outcome = _create_workers(workload, calls, job, creations) if creations else AppliedActions(refused=None)
    if any(isinstance(action, DeleteJob) for action in decision.actions):
        workload.delete_job(job)
    return outcome


def _create_workers(
    workload: Workload, calls: Executor, job: ElasticJob, creations: list[CreateWorker]
) -> AppliedActions:
    created: list[str] = []
    taken: list[str] = []
    create_pod = workload.pod_creator(job)

    def create(action: CreateWorker) -> None:
        worker = worker_name(job.name, action.index)
        try:
            create_pod(_pod_of(job, action, workload.rendezvous_endpoint))
        except NameTakenError:
            taken.append(worker)
            return
        created.append(worker)
        log.info("job %s: created worker %s", job.key, worker, extra=log_fields(job, worker))

    refused = ""
    try:
        slow_start(lambda batch: call_all(calls, create, batch), creations)
    except _OF_THE_SERVER:
        raise  # for example because the predecessor of the same name still exists
    except ElasticctlError as e:
        refused = _REQUEST.sub("", str(e))
    return AppliedActions(refused, frozenset(created), frozenset(taken))


def _pod_of(job: ElasticJob, action: CreateWorker, rendezvous_endpoint: str) -> Manifest:
    """The manifest of a new worker's pod, with the nodes that it has to run on, should run on or should avoid."""
    pod = build_pod(job, action.index, rendezvous_endpoint)
    pod = ask_for_pool(pod, action.pool, insist=job.pools is not None) if action.pool else pod
    pod = require_node_types(pod, job.node_types) if job.node_types else pod
    if not asks_karpenter(pod):
        pod = avoid_nodes(pod, action.avoid) if action.avoid else pod
        pod = prefer_node(pod, action.node) if action.node else pod
    return pod


def log_events(job: ElasticJob, decision: Decision) -> None:
    """Log what has happened to a job: its events, and each new group."""
    generation = decision.status.generation
    if generation > job.status.generation:
        workers = len(decision.status.generations[-1].workers) if decision.status.generations else 0
        text = f"generation {generation} has {workers} workers"
        log.info("job %s: %s", job.key, text, extra={**log_fields(job), "generation": generation})
    for event in decision.events:
        level = logging.WARNING if event.type == WARNING else logging.INFO
        fields = {**log_fields(job, event.worker), "generation": generation, "reason": event.reason}
        log.log(level, "job %s: %s: %s", job.key, event.reason, event.message, extra=fields)


def log_fields(job: ElasticJob, worker: str = "") -> dict[str, Any]:
    """The fields by which logs are searched: the `job`, the `generation` of its group, and the `worker`, if any."""
    return {"job": job.key, "generation": job.status.generation, **({"worker": worker} if worker else {})}


def call_all(calls: Executor, call: Callable[[T], None], items: list[T]) -> None:
    """Make all calls, at most `PARALLEL_CALLS` at a time; raises the first error after all have been made.

    The others are not submitted yet, so that calls of other jobs come between them.
    """
    errors: list[BaseException | None] = []
    pending: deque[Future[None]] = deque()
    for item in items:
        if len(pending) == PARALLEL_CALLS:
            errors.append(pending.popleft().exception())
        pending.append(calls.submit(call, item))
    errors += [future.exception() for future in pending]
    for error in errors:
        if error is not None:
            raise error


def slow_start(call: Callable[[list[T]], None], items: list[T]) -> None:
    """Pass `items` to `call` in batches of 1, 2, 4, …: a call that cannot succeed is not made thousands of times."""
    done, size = 0, 1
    while done < len(items):
        call(items[done : done + size])
        done, size = done + size, size * 2
