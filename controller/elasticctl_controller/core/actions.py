"""What `reconcile` decides: plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from elasticctl.api.observed.workers import Pod
from elasticctl.api.status import JobStatus


@dataclass(frozen=True, slots=True)
class CreateWorker:
    """Create the pod (and Service) with this index: on `node` if one is named, on none of the nodes to `avoid`, and on
    a machine of `pool` if the job's plan or order of pools names one.
    """

    index: int
    node: str = ""
    avoid: tuple[str, ...] = ()
    pool: str = ""


@dataclass(frozen=True, slots=True)
class DeleteWorker:
    """Delete the pod with this uid; `force` skips the grace period (its node is gone, or it has ended)."""

    name: str
    uid: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job object: its time to live has passed."""


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event about the job; `type` is "Normal" or "Warning", and `worker` the worker concerned, if any."""

    type: str
    reason: str
    message: str
    worker: str = ""


Action = CreateWorker | DeleteWorker | DeleteJob


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. The loop writes `status` first, and runs `actions` only if that write succeeded.

    `requeue_s`: reconcile again after this many seconds even if nothing changes (None: no need). `unexplained`: a pod
    that has not started for a reason that only events give.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_s: float | None = None
    unexplained: Pod | None = None
