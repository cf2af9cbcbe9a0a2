"""Why a worker ended: one cause per worker, from the evidence that the cluster and the launcher left.

Exit codes alone do not distinguish a preemption from a bug: a torchrun agent that gets SIGTERM exits with 1, and so
does a script that raises. So the evidence is considered in a fixed order, the strongest first: what the controller did
itself, what the cluster says about pod and node, what the kernel did, what happened to peers, and only then the
application.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from elasticctl.api.codec import Timestamp, from_rfc3339
from elasticctl.api.observed.workers import DEADLINE_EXCEEDED, PROBE_FAILED, Pod
from elasticctl.api.spec import PodPhase
from elasticctl.api.status import Cause, RankFailure, WorkerStatus
from elasticctl_protocol.failures import KILLED_EXIT_CODE, TERMINATED_EXIT_CODE, FailureVerdict, TerminationMessage

COLLATERAL_WINDOW_S = 30.0  # how long after a peer's loss a survivor's failure is attributed to it
CLOCK_SKEW_S = 5.0  # end times come from the clocks of several nodes and from lagging watches
MAX_MESSAGE_CHARS = 65_536
MAX_LINES, MAX_LINE_CHARS = 20, 400

_SHUTDOWN_REASONS = frozenset({"Terminated", "Shutdown", "NodeShutdown", "Preempting"})
_KILLED_CODES = frozenset({KILLED_EXIT_CODE, TERMINATED_EXIT_CODE})


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of a peer, which can make others fail. `exact`: the time is a container's, so no skew is allowed for."""

    at: Timestamp
    exact: bool


def classify(
    pod: Pod, worker: WorkerStatus | None, lost_nodes: Collection[str], losses: Iterable[Loss], now: float
) -> Cause | None:
    """Return why this worker ended, or None if it has not.

    `worker` is its entry in the job's status, `losses` are the ends of its peers; `now` is used where no end time was
    recorded. A pod that others delete, or whose node is gone, counts as ended: it cannot be saved.
    """
    over, lost = is_over(pod), is_lost(pod, lost_nodes)
    if worker is not None and worker.removal:
        return Cause.SCALED_IN if over or lost else None
    if not (over or lost or pod.deleting):
        return None
    failure = parse_failure(pod.message)
    verdict = failure.verdict if failure else ""
    cause = _from_cluster(pod, lost) or _from_exit(pod, verdict)
    if cause is not None:
        return cause
    if verdict == FailureVerdict.STUCK:
        return Cause.STUCK  # detected on the worker itself: no peer's loss makes a process hang
    if verdict == FailureVerdict.COLLATERAL or _failed_with_peer(pod, losses, now):
        return Cause.COLLATERAL
    return Cause.APPLICATION


def classify_vanished(worker: WorkerStatus, lost_nodes: Collection[str]) -> Cause:
    """Return why a worker that the cluster no longer lists has ended."""
    if worker.removal:
        return Cause.SCALED_IN
    return Cause.NODE_LOST if worker.node in lost_nodes else Cause.DELETED


def is_unannounced_kill(pod: Pod, lost_nodes: Collection[str], now: float) -> bool:
    """True if the worker was killed or asked to stop, and neither its pod nor its node shows who did it."""
    announced = pod.disruption_target or pod.deleting
    return not announced and classify(pod, None, lost_nodes, (), now) in (Cause.KILLED, Cause.PREEMPTED)


def is_explained(worker: WorkerStatus, lost_nodes: Collection[str]) -> bool:
    """True for a worker that was replaced because it did not answer, and whose node has turned out to be lost.

    Peers miss a worker within seconds; Kubernetes notices a lost node only after 40 s by default.
    """
    return worker.cause is Cause.UNRESPONSIVE and worker.node in lost_nodes


def is_over(pod: Pod) -> bool:
    """True once the worker's container has ended, whether or not a sidecar still runs."""
    return pod.ended or pod.exit_code is not None


def is_lost(pod: Pod, lost_nodes: Collection[str]) -> bool:
    """True when the pod's node can no longer answer for it."""
    return pod.node in lost_nodes or pod.phase is PodPhase.UNKNOWN


def ended_at(pod: Pod, now: float) -> Timestamp:
    """When the worker ended, as far as is known; never in the future."""
    return Timestamp(now if pod.finished_at is None else min(pod.finished_at, now))


def parse_failure(message: str) -> RankFailure | None:
    """Read the launcher's report from a termination message; None if it is anything else. Never raises."""
    if not message.startswith("{") or len(message) > MAX_MESSAGE_CHARS:
        return None
    found = TerminationMessage.from_text(message)
    if found is None:
        return None
    return clean_failure(
        RankFailure(
            verdict=found.verdict or "",
            worker=found.worker or "",
            rank=found.rank,
            exit_code=found.exit_code,
            signal=found.signal or "",
            error=found.error or "",
            last_lines=found.last_lines,
            generation=found.generation,
            at=from_rfc3339(found.at),
            permanent=found.permanent is True,
        )
    )


def clean_failure(found: RankFailure) -> RankFailure:
    """A worker's report of a failure, with texts and numbers that can be stored."""
    return replace(
        found,
        worker=clean_text(found.worker),
        rank=_small(found.rank),
        exit_code=_small(found.exit_code),
        signal=clean_text(found.signal),
        error=clean_text(found.error),
        last_lines=tuple(clean_text(line) for line in found.last_lines[-MAX_LINES:]),
        generation=_small(found.generation) or 0,
    )


def read_failure(pod: Pod) -> RankFailure:
    """How the worker failed: as its launcher reported, or else as far as the pod shows."""
    report = parse_failure(pod.message)
    if report is not None:
        return replace(report, exit_code=pod.exit_code if report.exit_code is None else report.exit_code)
    lines = [clean_text(line) for line in pod.message[-MAX_MESSAGE_CHARS:].splitlines() if line.strip()][-MAX_LINES:]
    error = lines[-1].strip() if lines else clean_text(pod.reason)
    return RankFailure(exit_code=pod.exit_code, error=error, last_lines=tuple(lines))


def clean_text(text: str) -> str:
    """Cut to `MAX_LINE_CHARS` and replace what UTF-8 cannot encode, so that it can always be stored."""
    return text[:MAX_LINE_CHARS].encode("utf-8", "replace").decode("utf-8")


def _from_cluster(pod: Pod, lost: bool) -> Cause | None:
    """The cause that the cluster gives: disruption conditions, pod reasons, nodes, deletions."""
    if pod.disruption_target:
        return Cause.DRAINED if pod.drained else Cause.PREEMPTED
    if pod.reason == "Evicted":
        # The kubelet's words for the pod's own ephemeral storage or emptyDir limit.
        own_limit = "exceed" in pod.message and "limit" in pod.message
        return Cause.APPLICATION if own_limit else Cause.EVICTED
    if pod.reason in (DEADLINE_EXCEEDED, PROBE_FAILED):
        return Cause.APPLICATION  # the template's own limit or probe: no machine was taken away
    if pod.reason in _SHUTDOWN_REASONS:
        return Cause.PREEMPTED
    if pod.reason.startswith("OutOf") or pod.reason == "UnexpectedAdmissionError":
        return Cause.EVICTED
    if pod.reason == "NodeLost" or (lost and not _succeeded(pod)):
        return Cause.NODE_LOST
    return Cause.DELETED if pod.deleting else None


def _from_exit(pod: Pod, verdict: str) -> Cause | None:
    """The cause that the process's exit gives by itself, if any."""
    if pod.reason == "OOMKilled":
        return Cause.OOM_KILLED
    if verdict == FailureVerdict.PREEMPTED:
        return Cause.PREEMPTED
    if _succeeded(pod):
        return Cause.COMPLETED
    if verdict == FailureVerdict.APPLICATION:
        return None  # also where the rank was killed: its launcher lives, so the worker was not taken away
    unobserved = pod.exit_code is None and not pod.reason
    return Cause.KILLED if pod.exit_code in _KILLED_CODES or unobserved else None


def _succeeded(pod: Pod) -> bool:
    return pod.phase is PodPhase.SUCCEEDED or pod.exit_code == 0


def _failed_with_peer(pod: Pod, losses: Iterable[Loss], now: float) -> bool:
    """True if the worker was alive at a peer's loss and failed shortly after it.

    A worker created after the loss is not excused by it: otherwise a script that crashes immediately would never count.
    """
    end = ended_at(pod, now)
    start = pod.started_at if pod.started_at is not None else pod.created_at
    return any(
        loss.at - (0.0 if loss.exact else CLOCK_SKEW_S) <= end <= loss.at + COLLATERAL_WINDOW_S
        and start is not None
        and start < loss.at
        for loss in losses
    )


def _small(number: int | None) -> int | None:
    return number if number is not None and -(2**31) <= number < 2**31 else None
