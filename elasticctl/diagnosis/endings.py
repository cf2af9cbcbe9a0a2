"""Rules about jobs that have ended: how, by whose fault, and how to go on from there."""

from __future__ import annotations

from elasticctl.api.status import Cause, Failure, Phase
from elasticctl.api.text import counted, span
from elasticctl.diagnosis.case import Case, Finding, Mend, Severity, short

_DEADLINE = "DeadlineExceeded"
_SAYS_NOTHING = (Cause.APPLICATION, "Error")
"""Our word and Kubernetes' for a worker that has left none of its own."""


def deadline_exceeded(case: Case) -> Finding | None:
    """It failed because its time was up."""
    if case.status.phase is not Phase.FAILED or case.status.reason != _DEADLINE:
        return None
    limit = "" if case.job.deadline_s is None else f" of {span(case.job.deadline_s)}"
    return Finding(
        "deadline-exceeded",
        Severity.ERROR,
        f"It failed because its deadline{limit} was over{_how_far(case)}.",
        (_go_on(case, "--set spec.activeDeadlineSeconds=SECONDS", "go on from there with more time"),),
        decisive=True,
    )


def failed(case: Case) -> Finding | None:
    """It failed because its script did: who was first, how, and how much was allowed."""
    status = case.status
    if status.phase is not Phase.FAILED or status.reason == _DEADLINE:
        return None
    first = status.first_failure
    mends = [Mend("see all that it printed", _logs(case, first))]
    if first is not None and status.restarts.get(Cause.OOM_KILLED):
        mends.append(_go_on(case, "", "with a smaller batch or more memory, go on from its last checkpoint"))
    elif status.checkpoint.step is not None:
        mends.append(_go_on(case, "", "when that is mended, go on from its last checkpoint"))
    else:
        mends.append(Mend("when that is mended, run it again", f"elasticctl rerun {case.name}"))
    return Finding(
        "failed",
        Severity.ERROR,
        f"It failed: {tell_failure(first, case.name) if first else status.message or status.reason}. {_budget(case)}",
        tuple(mends),
        first.last_lines if first else (),
        decisive=True,
    )


def cancelled(case: Case) -> Finding | None:
    """Somebody stopped it."""
    if case.status.phase is not Phase.CANCELLED:
        return None
    text = f"It was cancelled on request{_how_far(case)}."
    return Finding("cancelled", Severity.INFO, text, _again(case), decisive=True)


def succeeded(case: Case) -> Finding | None:
    """All is well, and over."""
    status = case.status
    if status.phase is not Phase.SUCCEEDED:
        return None
    took = ""
    if status.start_time is not None and status.completion_time is not None:
        took = f" after {span(status.completion_time - status.start_time)}"
    lost = sum(item.cause is not None for item in status.interruptions)
    text = f"It succeeded{took}" + (f", over {counted(lost, 'interruption')}" if lost else "") + "."
    mends = (Mend("see what interruptions cost", f"elasticctl history {case.name}"),) if lost else ()
    return Finding("succeeded", Severity.INFO, text, mends, decisive=True)


def tell_failure(failure: Failure, job: str) -> str:
    """`rank 1 of worker-1 ended with exit code 1: ValueError: bad learning rate`."""
    who = short(failure.worker, job) or "a worker"
    if failure.rank is not None:
        who = f"rank {failure.rank} of {who}"
    how = "failed"
    if failure.error == Cause.OOM_KILLED:
        return f"{who} was killed because it used more memory than it may"
    if failure.signal:
        how = f"was ended by {failure.signal}"
    elif failure.exit_code is not None:
        how = f"ended with exit code {failure.exit_code}"
    error = "" if failure.error in _SAYS_NOTHING else failure.error
    return f"{who} {how}: {error}" if error else f"{who} {how}"


def _budget(case: Case) -> str:
    """Why that was too much."""
    status, limit = case.status, case.job.backoff_limit
    if status.reason == "RestartPolicyNever":
        return "Its restart policy, Never, allows no failure."
    if status.reason == "PermanentExitCode":
        return "With the restart policy ExitCode, exit codes below 128 are final."
    return f"That was failure {status.failures}; its budget allows {limit} (--backoff-limit)."


def _how_far(case: Case) -> str:
    progress, checkpoint = case.status.progress, case.status.checkpoint
    if progress.step is None:
        return ""
    whole = f" of {progress.total_steps}" if progress.total_steps else ""
    kept = f"; its last checkpoint is of step {checkpoint.step}" if checkpoint.step is not None else ""
    return f" at step {progress.step}{whole}{kept}"


def _again(case: Case) -> tuple[Mend, ...]:
    if case.status.checkpoint.step is None:
        return (Mend("run it again", f"elasticctl rerun {case.name}"),)
    return (_go_on(case, "", "go on from its last checkpoint"),)


def _go_on(case: Case, more: str, advice: str) -> Mend:
    words = ["elasticctl rerun", case.name]
    if case.status.checkpoint.step is not None:
        words.append("--from-checkpoint latest")
    return Mend(advice, " ".join([*words, more]).strip())


def _logs(case: Case, failure: Failure | None) -> str:
    worker = short(failure.worker, case.name).removeprefix("worker-") if failure else ""
    return f"elasticctl logs {case.name}" + (f" --worker {worker}" if worker else "")
