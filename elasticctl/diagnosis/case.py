"""A case: what is known of a job. A finding: what the diagnosis says about it, and what to type next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elasticctl.api.codec import Manifest, from_rfc3339
from elasticctl.api.objects import as_list, at
from elasticctl.api.podtemplate import Hardware, hardware
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import GroupGeneration, JobStatus, Phase

_WAITING_IS_NORMAL = frozenset({"", "ContainerCreating", "PodInitializing"})


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
class PodWait:
    """Why a worker's pod has not started: Kubernetes' reason in one word, and its message."""

    worker: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Case:
    """A job, its pods, and the time (seconds since the epoch).

    `holders` maps other jobs to the number of GPUs that each holds, if that was queried.
    """

    job: ElasticJob
    pods: tuple[Manifest, ...] = ()
    now: float = 0.0
    holders: Mapping[str, int] = field(default_factory=dict)

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
        """What the pod template says."""
        return hardware(self.job)

    @property
    def waiting(self) -> bool:
        """True while too few workers run to train with."""
        return self.status.phase in (Phase.PENDING, Phase.RESTARTING)

    @property
    def group(self) -> GroupGeneration | None:
        """The newest generation of the training group."""
        return self.status.generations[-1] if self.status.generations else None

    @property
    def running(self) -> int:
        """How many workers run."""
        return sum(at(pod, "status", "phase") == PodPhase.RUNNING for pod in self.pods)

    def pod_waits(self) -> Iterator[PodWait]:
        """The pods that have not started, with the reason that the cluster gives."""
        for pod in self.pods:
            name = str(at(pod, "metadata", "name"))
            if at(pod, "status", "phase") not in (None, PodPhase.PENDING):
                continue
            yield from (PodWait(name, reason, message) for reason, message in _reasons(pod) if reason)

    def since(self, moment: float | None) -> float:
        """Seconds since a moment; 0 if it is unknown or in the future (clocks differ)."""
        return 0.0 if moment is None else max(0.0, self.now - moment)

    @property
    def pending_since(self) -> float | None:
        """When the oldest pod that has not started was created."""
        made = [
            from_rfc3339(at(pod, "metadata", "creationTimestamp"))
            for pod in self.pods
            if at(pod, "status", "phase") in (None, PodPhase.PENDING)
        ]
        return min((moment for moment in made if moment is not None), default=None)


Rule = Callable[[Case], Finding | None]


def failures_used(case: Case) -> int:
    """How many failures count against the job's budget now: those since its last checkpoint, where that is known."""
    since = case.status.failures_since_commit
    return case.status.failures if since is None else since


def short_worker_name(worker: str, job: str) -> str:
    """`worker-2` for `digits-worker-2`: the job's name is clear from the context."""
    return worker.removeprefix(f"{job}-")


def _reasons(pod: Manifest) -> Iterator[tuple[str, str]]:
    """(reason, message) of what keeps a pod from starting."""
    for condition in as_list(at(pod, "status", "conditions")):
        if at(condition, "type") == "PodScheduled" and at(condition, "status") == "False":
            yield str(at(condition, "reason") or "Unschedulable"), str(at(condition, "message") or "")
            return
    for container in as_list(at(pod, "status", "containerStatuses")):
        reason = str(at(container, "state", "waiting", "reason") or "")
        if reason not in _WAITING_IS_NORMAL:
            yield reason, str(at(container, "state", "waiting", "message") or "")
            return
    reason = at(pod, "status", "reason")
    if isinstance(reason, str):
        yield reason, str(at(pod, "status", "message") or "")
