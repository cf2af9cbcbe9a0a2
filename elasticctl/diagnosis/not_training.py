"""Rules about jobs that do not train: how a job ended and how to continue from there, or what it waits for."""

from __future__ import annotations

import shlex

from elasticctl.api.goal import PlanStatus
from elasticctl.api.objects import as_mapping, as_text, at
from elasticctl.api.observed.plan_text import pools_outlook
from elasticctl.api.observed.timeline import NOTIFY_FAILED
from elasticctl.api.observed.workers import DEADLINE_EXCEEDED, Pod
from elasticctl.api.status import Cause, Phase, RankFailure
from elasticctl.api.text import join_some, plural, plural_are, shorten, span, times
from elasticctl.diagnosis.findings import Case, Finding, NextStep, Severity, failures_used, short_worker_name

_SAYS_NOTHING = (Cause.APPLICATION, "Error")
"""Our placeholder and Kubernetes' for a worker that left no error message."""


def deadline_exceeded(case: Case) -> Finding | None:
    """It failed because its deadline passed."""
    if case.status.phase is not Phase.FAILED or case.status.reason != DEADLINE_EXCEEDED:
        return None
    limit = "" if case.job.deadline_s is None else f" of {span(case.job.deadline_s)}"
    return Finding(
        "deadline-exceeded",
        Severity.ERROR,
        f"It failed because its deadline{limit} passed{_how_far(case)}.",
        (_rerun(case, "--set spec.activeDeadlineSeconds=SECONDS", "continue from there with more time"),),
        decisive=True,
    )


def failed(case: Case) -> Finding | None:
    """It failed because its script did: which rank failed, how, and how many failures were allowed."""
    status = case.status
    if status.phase is not Phase.FAILED or status.reason == DEADLINE_EXCEEDED:
        return None
    last = status.newest_failure
    steps = [NextStep("see all of its output", _logs(case, last))]
    if last is not None and (status.restarts.get(Cause.OOM_KILLED) or _ran_out_of_memory(last)):
        then = "continue from its last checkpoint" if status.checkpoint.step is not None else "run it again"
        steps.append(_rerun(case, "", f"with a smaller batch or more memory, {then}"))
    elif status.checkpoint.step is not None:
        steps.append(_rerun(case, "", "after fixing that, continue from its last checkpoint"))
    else:
        steps.append(NextStep("after fixing that, run it again", f"elasticctl rerun {case.name}"))
    why = describe_failure(last, case.name) if last else status.message or status.reason
    return Finding(
        "failed",
        Severity.ERROR,
        f"It failed: {why}{'' if why.endswith(('…', '.')) else '.'} {_budget(case)}",
        tuple(steps),
        last.last_lines if last else (),
        decisive=True,
    )


def _ran_out_of_memory(failure: RankFailure) -> bool:
    """True for what Python, torch and CUDA say of it; the kernel says it in another way."""
    return failure.error.startswith("MemoryError") or "out of memory" in failure.error.lower()


def cancelled(case: Case) -> Finding | None:
    """A user cancelled it."""
    if case.status.phase is not Phase.CANCELLED:
        return None
    text = f"It was cancelled on request{_how_far(case)}."
    return Finding("cancelled", Severity.INFO, text, _again(case), decisive=True)


def succeeded(case: Case) -> Finding | None:
    """It has finished."""
    status = case.status
    if status.phase is not Phase.SUCCEEDED:
        return None
    took = ""
    if status.start_time is not None and status.completion_time is not None:
        took = f" after {span(status.completion_time - status.start_time)}"
    lost = sum(item.cause is not None for item in status.interruptions)
    text = f"It succeeded{took}" + (f", over {plural(lost, 'interruption')}" if lost else "") + "."
    steps = (NextStep("see what interruptions cost", f"elasticctl history {case.name}"),) if lost else ()
    return Finding("succeeded", Severity.INFO, text, steps, decisive=True)


def describe_failure(failure: RankFailure, job: str) -> str:
    """`rank 1 of worker-1 ended with exit code 1: ValueError: bad learning rate`."""
    who = short_worker_name(failure.worker, job) or "a worker"
    if failure.rank is not None:
        who = f"rank {failure.rank} of {who}"
    how = "failed"
    if failure.is_hang:
        return shorten(failure.error)
    if failure.error == Cause.OOM_KILLED:
        return f"{who} was killed because it used more memory than allowed"
    if failure.signal:
        how = f"was ended by {failure.signal}"
    elif failure.exit_code is not None:
        how = f"ended with exit code {failure.exit_code}"
    error = "" if failure.error in _SAYS_NOTHING else shorten(failure.error)
    return f"{who} {how}: {error}" if error else f"{who} {how}"


def _budget(case: Case) -> str:
    """Why the job did not tolerate that failure."""
    status, limit = case.status, case.job.backoff_limit
    if status.reason == "RestartPolicyNever":
        return "Its restart policy, Never, allows no failure."
    if status.reason == "PermanentExitCode":
        return "With the restart policy ExitCode, exit codes below 128 are final."
    if status.reason == "PermanentError":
        return "Retrying would not help."
    if status.failures_since_commit is None:
        return f"That was failure {status.failures}; --backoff-limit allows {limit}."
    since = "since the last checkpoint" if status.checkpoint.step is not None else "before its first checkpoint"
    return f"That was failure {status.failures_since_commit} {since}; --backoff-limit allows {limit}."


def _how_far(case: Case) -> str:
    progress, checkpoint = case.status.progress, case.status.checkpoint
    if progress.step is None:
        return ""
    whole = f" of {progress.total_steps}" if progress.total_steps else ""
    kept = f"; its last checkpoint is from step {checkpoint.step}" if checkpoint.step is not None else ""
    return f" at step {progress.step}{whole}{kept}"


def _again(case: Case) -> tuple[NextStep, ...]:
    if case.status.checkpoint.step is None:
        return (NextStep("run it again", f"elasticctl rerun {case.name}"),)
    return (_rerun(case, "", "continue from its last checkpoint"),)


def _rerun(case: Case, more: str, advice: str) -> NextStep:
    words = ["elasticctl rerun", case.name]
    if case.status.checkpoint.step is not None:
        words.append("--from-checkpoint latest")
    return NextStep(advice, " ".join([*words, more]).strip())


def _logs(case: Case, failure: RankFailure | None) -> str:
    worker = short_worker_name(failure.worker, case.name).removeprefix("worker-") if failure else ""
    return f"elasticctl logs {case.name}" + (f" --worker {shlex.quote(worker)}" if worker else "")


_ON_REQUEST, _NOT_ADMITTED, _OVER_LIMIT = "Suspended", "NotAdmitted", "OverLimit"
"""Reasons of a suspended job: by its owner, until Kueue admits it, or by the limits of its project."""


def waiting_for_its_share(case: Case) -> Finding | None:
    """It gets no workers, because jobs with precedence hold the GPUs that it needs."""
    share = case.status.share
    if share is None or share.workers or case.status.phase.terminal or case.job.suspend:
        return None
    step = case.status.checkpoint.step
    kept = "" if step is None else f" Its progress is kept: step {step}."
    ran = step is not None or case.status.generation > 0
    lost = f" Last change: {share.change}." if share.change else ""
    steps = [NextStep("see who uses what", "elasticctl quota list")]
    if case.job.desired > max(1, case.job.min) and not case.job.sharing.automatic:
        steps.append(NextStep("let it start with fewer", f"elasticctl scale {case.name} --auto"))
    text = f"It {share.message}.{lost}{kept} It {'resumes' if ran else 'starts'} by itself."
    return Finding("waiting-for-its-share", Severity.INFO, text, tuple(steps), decisive=True)


def out_of_money(case: Case) -> Finding | None:
    """Its budget is spent, and its goal has stopped it."""
    plan = _plan(case)
    if plan is None or plan.reason != "Spent":
        return None
    step = case.status.checkpoint.step
    kept = "" if step is None else f" Its progress is kept: step {step}."
    more = NextStep("let it go on", f"elasticctl scale {case.name} --budget USD")
    text = f"It has no workers: {plan.message}.{kept}"
    return Finding("out-of-money", Severity.WARNING, text, (more,), decisive=True)


def why_this_size(case: Case) -> Finding | None:
    """Its goal determines the number of workers and where they run."""
    plan = _plan(case)
    if plan is None or plan.reason == "Spent":
        return None
    late = plan.reason == "Late"
    wants = f"{plan.words}" if plan.workers > plan.probing else "no workers until spot machines are available"
    promise = " Its goal will be met even if all spot machines are lost." if plan.promised else ""
    step = NextStep("see each decision", f"elasticctl history {case.name}")
    more = NextStep("change its goal", f"elasticctl scale {case.name} --finish-by TIME")
    return Finding(
        "goal",
        Severity.WARNING if late else Severity.INFO,
        f"Its goal asks for {wants}: {plan.message}.{promise}",
        (step, more) if late else (step,),
    )


def which_pool(case: Case) -> Finding | None:
    """Which pool of its order its workers request machines from, and when that changes."""
    pools = case.status.pools
    if pools is None or case.job.pools is None or case.status.phase.terminal or case.job.suspend:
        return None
    words = pools_outlook(pools, case.now)
    if not words:
        return None
    text = f"Its workers ask for machines in this order: {case.job.pools.words}. Now: {words}."
    return Finding("pools", Severity.INFO, text)


def _plan(case: Case) -> PlanStatus | None:
    over = case.job.goal is None or case.status.phase.terminal or case.job.suspend
    return None if over else case.status.plan


def fewer_than_wanted(case: Case) -> Finding | None:
    """It trains with fewer workers than it may have."""
    share = case.status.share
    if share is None or not 0 < share.workers < case.job.desired or case.status.phase.terminal:
        return None
    step = NextStep("see who uses what", "elasticctl quota list")
    return Finding("fewer-than-wanted", Severity.INFO, f"It {share.message}.", (step,))


def waiting_to_grow(case: Case) -> Finding | None:
    """Workers are ready, but the group does not let them join yet."""
    if not case.status.growth or case.status.phase.terminal:
        return None
    return Finding("waiting-to-grow", Severity.INFO, f"It could grow: {case.status.growth}.")


def borrowing(case: Case) -> Finding | None:
    """It uses more than its project's guarantee."""
    share = case.status.share
    if share is None or not share.borrowed or case.status.phase.terminal:
        return None
    text = f"{plural_are(share.borrowed, 'worker')} borrowed and can be taken back at any time, with notice."
    return Finding("borrowing", Severity.INFO, text)


def moving(case: Case) -> Finding | None:
    """Its move to another context was interrupted."""
    if not case.job.is_moving or case.status.phase.terminal:
        return None
    here, _, to = case.job.moving_from.partition(" ")
    instead = NextStep("continue it here instead", f"elasticctl resume {case.name} --here")
    if here:
        places = f"--context {shlex.quote(here)} --to {shlex.quote(to)}"
        finish = NextStep("finish it", f"elasticctl move {case.name} {places}")
        text = f"Its move from context {here} is not finished: its state has arrived, but the job has not been started."
    else:
        there, _, _ = case.job.moving_to.partition(" ")
        finish = NextStep("finish it", f"elasticctl move {case.name} --to {shlex.quote(there)}")
        text = f"Its move to context {there} is not finished, or is still in progress."
    return Finding("moving", Severity.WARNING, text, (finish, instead), decisive=case.job.suspend)


def over_limit(case: Case) -> Finding | None:
    """The limits of its project do not allow it."""
    if case.status.phase is not Phase.SUSPENDED or case.status.reason != _OVER_LIMIT:
        return None
    step = case.status.checkpoint.step
    kept = "" if step is None else f" Its progress is kept: step {step}."
    text = f"{case.status.message.removesuffix('.')}.{kept}"
    steps = (
        NextStep("see what is allowed", "elasticctl quota list"),
        NextStep("submit it again with an allowed value", f"elasticctl rerun {case.name} --set PATH=VALUE"),
    )
    return Finding("over-limit", Severity.ERROR, text[:1].upper() + text[1:], steps, decisive=True)


def suspended(case: Case) -> Finding | None:
    """It was suspended, or moved to another context."""
    if over_limit(case) is not None:
        return None
    given_nothing = case.status.share is not None and not case.job.suspend
    if case.status.phase is not Phase.SUSPENDED and not (case.job.suspend and not case.status.phase.terminal):
        return None
    if given_nothing:
        return None  # `waiting_for_its_share` reports it
    if case.job.is_moving:
        return None  # `moving` reports it
    context = case.job.moved_to.partition(" ")[0]
    if context:
        there = NextStep("see its status", f"elasticctl status {case.name} --context {shlex.quote(context)}")
        text = f"It was moved to context {context} and runs only there."
        return Finding("moved", Severity.INFO, text, (there,), decisive=True)
    step = case.status.checkpoint.step
    kept = "" if step is None else f" Its progress is kept: step {step}."
    if case.job.queue and case.status.reason != _ON_REQUEST:
        waits = f"waits to be admitted to Kueue's queue {case.job.queue}"
        text = f"It {case.status.message.removesuffix('.') if case.status.reason == _NOT_ADMITTED else waits}.{kept}"
        return Finding("waiting-for-admission", Severity.INFO, text, decisive=True)
    resume = NextStep("resume it", f"elasticctl resume {case.name}")
    return Finding("suspended", Severity.INFO, f"It was suspended on request.{kept}", (resume,), decisive=True)


def cleaning_up(case: Case) -> Finding | None:
    """Workers that are not wanted any more have not ended yet."""
    if not (case.job.suspend or case.status.phase is Phase.SUSPENDED or case.status.phase.terminal):
        return None
    left = [
        pod
        for pod in map(Pod.from_manifest, map(as_mapping, case.pods))
        if pod.deleting and not (pod.ended or pod.has_stopped)
    ]
    if not left:
        return None
    names = join_some([short_worker_name(pod.name, case.name) for pod in left], "worker")
    until = max((pod.deadline for pod in left if pod.deadline is not None), default=None)
    rest = "" if until is None or until <= case.now else f", and may take {span(until - case.now)} more"
    text = f"{names} {'has' if len(left) == 1 else 'have'} been asked to end and still clean{'s' * (len(left) == 1)} up"
    return Finding("cleaning-up", Severity.INFO, f"{text}{rest}.")


def no_workers_wanted(case: Case) -> Finding | None:
    """It was scaled to zero workers."""
    if case.status.phase.terminal or case.job.suspend or case.job.desired > 0:
        return None
    step = NextStep("give it workers", f"elasticctl scale {case.name} --to {max(1, case.job.min)}")
    return Finding("no-workers-wanted", Severity.WARNING, "It is scaled to 0 workers.", (step,), decisive=True)


def backing_off(case: Case) -> Finding | None:
    """It waits before it retries after failures."""
    status = case.status
    until = status.backoff.until
    if not case.waiting or until is None or until <= case.now:
        return None
    failure = status.newest_failure
    last = f" ({describe_failure(failure, case.name)})" if failure else ""
    what = "failed" if failure else "ended right after they started"
    return Finding(
        "back-off",
        Severity.WARNING,
        f"Its workers have {what} {times(status.backoff.failures)} in a row{last}; it tries again in"
        f" {span(until - case.now)}. {failures_used(case)} of {plural(case.job.backoff_limit, 'allowed failure')}"
        " used.",
        (NextStep("see why", f"elasticctl logs {case.name} --previous --tail 30"),),
        failure.last_lines if failure else (),
        decisive=True,
    )


def not_notified(case: Case) -> Finding | None:
    """A notification about it could not be delivered."""
    failed = [
        event
        for event in case.seen.events
        if at(event, "reason") == NOTIFY_FAILED and at(event, "involvedObject", "uid") == case.job.uid
    ]
    if not failed:
        return None
    last = max(failed, key=lambda event: as_text(at(event, "lastTimestamp")))
    text = f"Notifications fail: {shorten(as_text(at(last, 'message'))).removesuffix('.')}."
    step = NextStep("see which ones failed, and when", f"elasticctl events {case.name}")
    return Finding("not-notified", Severity.WARNING, text, (step,))
