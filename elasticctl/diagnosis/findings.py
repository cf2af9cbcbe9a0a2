"""A case is what is known about a job; a finding is a conclusion about it, with the commands to type next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elasticctl.api.codec import Manifest, from_rfc3339
from elasticctl.api.objects import as_list, as_mapping, at
from elasticctl.api.observed.workers import Headcount, count_workers, read_wait
from elasticctl.api.podtemplate import Hardware, hardware
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import Condition, ConditionType, GroupGeneration, JobStatus, Phase


class Severity(StrEnum):
    """How much a finding matters."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class NextStep:
    """What to do next: a few words, and the command to type."""

    advice: str
    command: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about a job. `text` is a sentence or two; `details` are lines to print verbatim.

    `decisive` is True if the job does not train because of this (it waits, or has ended).
    """

    rule: str
    severity: Severity
    text: str
    mends: tuple[NextStep, ...] = ()
    details: tuple[str, ...] = ()
    decisive: bool = False


@dataclass(frozen=True, slots=True)
class WorkerWait:
    """Why a worker's pod has not started: Kubernetes' reason in one word, and its message."""

    worker: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Observations:
    """Observations other than a job's pods: events about them, the nodes requested from Karpenter, and the
    PodDisruptionBudgets of their namespace.

    `claims` is None where they are unknown: there is no Karpenter, or its objects may not be read.
    """

    events: tuple[Manifest, ...] = ()
    claims: tuple[Manifest, ...] | None = None
    budgets: tuple[Manifest, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A job, its pods, and the time (seconds since the epoch).

    `holders` maps other jobs to the number of GPUs that each holds. It and `seen` are only set if they were queried.
    """

    job: ElasticJob
    pods: tuple[Manifest, ...] = ()
    now: float = 0.0
    holders: Mapping[str, int] = field(default_factory=dict)
    seen: Observations = Observations()

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    @property
    def status(self) -> JobStatus:
        """The job's status."""
        return self.job.status

    @property
    def hardware(self) -> Hardware:
        """The hardware in the pod template."""
        return hardware(self.job)

    @property
    def waiting(self) -> bool:
        """True while too few workers run to train."""
        return self.status.phase in (Phase.PENDING, Phase.RESTARTING)

    @property
    def group(self) -> GroupGeneration | None:
        """The newest generation of the training group."""
        return self.status.generations[-1] if self.status.generations else None

    @property
    def headcount(self) -> Headcount:
        """The number of workers in each state, as counted by the controller."""
        return count_workers(self.status)

    @property
    def running(self) -> int:
        """The number of workers that run and are not being removed."""
        staying = (pod for pod in self.pods if at(pod, "metadata", "deletionTimestamp") is None)
        return sum(at(pod, "status", "phase") == PodPhase.RUNNING for pod in staying)

    def pod_waits(self) -> Iterator[WorkerWait]:
        """The pods that have not started, with the reason that the cluster gives."""
        for pod in self.pods:
            wait = read_wait(as_mapping(pod))
            if wait is not None:
                yield WorkerWait(str(at(pod, "metadata", "name")), wait.reason, wait.message)

    @property
    def wait(self) -> Condition | None:
        """The condition that says what wanted workers wait for; None if they do not."""
        found = self.status.condition(ConditionType.WORKERS_WAITING)
        return found if found is not None and found.status == "True" else None

    def since(self, moment: float | None) -> float:
        """Seconds since a moment; 0 if it is unknown or in the future (clocks differ)."""
        return 0.0 if moment is None else max(0.0, self.now - moment)

    @property
    def starting_since(self) -> float | None:
        """Since when workers are on their way: the oldest pod that has not started has had a place, or, before there is
        one, the job has been without workers and free to make them.
        """
        pending = [_placed_at(pod) for pod in self.pods if at(pod, "status", "phase") in (None, PodPhase.PENDING)]
        known = [moment for moment in pending if moment is not None]
        if known:
            return min(known)
        status = self.status
        moments = [
            self.job.created_at,
            status.start_time,
            status.share.since if status.share is not None else None,
            status.backoff.until,
            *(worker.ended_at for worker in status.workers),
            *(item.at for item in status.interruptions),
            *(item.last_transition_time for item in status.conditions if item.type in ("Restarting", "Suspended")),
        ]
        return max((moment for moment in moments if moment is not None and moment <= self.now), default=None)


Rule = Callable[[Case], Finding | None]


def failures_used(case: Case) -> int:
    """The number of failures that count towards the backoff limit: those since the last checkpoint, if known."""
    since = case.status.failures_since_commit
    return case.status.failures if since is None else since


def short_worker_name(worker: str, job: str) -> str:
    """`worker-2` for `digits-worker-2`: the job's name is clear from the context."""
    return worker.removeprefix(f"{job}-")


def _placed_at(pod: Manifest) -> float | None:
    """When a pod was placed or, if that is unknown, created; None while it still waits for a place."""
    made = from_rfc3339(at(pod, "metadata", "creationTimestamp"))
    for condition in as_list(at(pod, "status", "conditions")):
        if at(condition, "type") == "PodScheduled":
            placed = from_rfc3339(at(condition, "lastTransitionTime"))
            return (placed or made) if at(condition, "status") == "True" else None
    return made
