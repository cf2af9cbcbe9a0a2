"""Rules about jobs that train: what disturbs them, and whether their progress is saved."""

from __future__ import annotations

from collections import Counter

from elasticctl.api.objects import as_list, at
from elasticctl.api.observed.history import (
    activity_text,
    knows_groups,
    makes_steps,
    not_finite_text,
    redone_after,
    redone_s,
    reports_steps,
    samples_per_s,
    standstill_s,
    waited_s,
)
from elasticctl.api.observed.usage import idle_text
from elasticctl.api.status import Cause, Interruption, Phase
from elasticctl.api.text import plural, plural_are, shorten, span, times
from elasticctl.diagnosis.findings import Case, Finding, NextStep, Severity, failures_used
from elasticctl.diagnosis.not_training import describe_failure

LATELY_S = 3600.0
"""Older interruptions are not reported."""
MANY_KILLED = 3
"""This many workers killed recently without a reason are no accident."""
LEAST_OVERDUE_S = 60.0
STALE_AFTER = 3.0
"""A checkpoint is overdue if the last one is older than this many times the usual interval."""
FIRST_CHECKPOINT_S = 900.0
"""The first checkpoint is expected by then: `auto` saves at least every ten minutes."""
UNSAVED = "nothing is saved: "
"""How an activity's detail begins while training goes on and nothing is saved."""
MUCH_REDONE = 0.05
"""If more than this share of all steps had to be redone, saving more often pays."""


def training(case: Case) -> Finding:
    """It trains, or its group does something else: workers, progress, speed, last checkpoint."""
    status, progress, count = case.status, case.status.progress, case.headcount
    if count.training and count.starting:
        workers = f"{plural_are(count.training, 'worker')} in the group and {count.starting} starting"
    else:
        workers = f"{plural_are(count.running, 'worker')} running"
    parts = [f"{workers}, of {case.job.desired} wanted"]
    if progress.step is not None:
        parts.append(f"step {progress.step}" + (f" of {progress.total_steps}" if progress.total_steps else ""))
    if (rate := samples_per_s(status)) is not None and makes_steps(status, case.now):
        parts.append(f"{rate:,.0f} samples/s")
    if status.checkpoint.step is not None:
        parts.append(
            f"the last checkpoint, of step {status.checkpoint.step}, is {span(case.since(status.checkpoint.at))} old"
        )
    doing = "" if makes_steps(status, case.now) else activity_text(status, case.now)
    word = "training" if makes_steps(status, case.now) else "running"
    return Finding("training", Severity.INFO, f"It is {word}: {'; '.join(part for part in (doing, *parts) if part)}.")


def hung(case: Case) -> Finding | None:
    """A rank makes no progress, and the others wait for it."""
    activity = case.status.activity
    if activity is None or activity.doing != "hung" or case.status.phase.terminal:
        return None
    where = f": {activity.detail}" if activity.detail else ""
    then = " If this continues, its ranks will be restarted." if case.job.policy.hang_timeout_seconds != 0 else ""
    took = "" if activity.since is None else f" for {span(case.since(activity.since))}"
    step = NextStep("see the ranks' stacks and output", f"elasticctl logs {case.name} --tail 50")
    return Finding("hung", Severity.WARNING, f"It has hung{took}{where}.{then}", (step,), decisive=True)


def standstill(case: Case) -> Finding | None:
    """The group has stopped making steps."""
    idle_s, step_s = standstill_s(case.status, case.now), _step_s(case)
    if idle_s is None or not _trains(case):
        return None
    limit_s = case.job.policy.hang_timeout_seconds
    then = (
        f" If nothing moves for {span(limit_s)}, it restarts from the last checkpoint (--hang-timeout)."
        if limit_s
        else ""
    )
    before = f" Before, a step took {span(step_s)}." if step_s else ""
    return Finding(
        "standstill",
        Severity.WARNING,
        f"No step for {span(idle_s)}; the last was {case.status.progress.step}.{before}{then}",
        (NextStep("see the ranks' output", f"elasticctl logs {case.name} --tail 20"),),
    )


def idle_gpus(case: Case) -> Finding | None:
    """GPUs have been idle for long, and cost money."""
    idle = idle_text(case.status.usage, case.name)
    if not idle:
        return None
    steps = (
        NextStep("see what the ranks are doing", f"elasticctl stacks {case.name}"),
        NextStep("see all machines", f"elasticctl top {case.name} -o wide"),
    )
    return Finding("idle-gpus", Severity.WARNING, f"GPUs are not being used: {idle}.", steps)


def not_finite(case: Case) -> Finding | None:
    """A metric is NaN or infinite: the model has diverged, or a batch is bad."""
    if not case.status.progress.not_finite or case.status.phase is Phase.FAILED:
        return None
    since = min(item.step for item in case.status.progress.not_finite.values())
    committed = case.status.checkpoint.step
    older = NextStep("see which checkpoints are older than that", f"elasticctl checkpoints list {case.name}")
    steps = () if committed is None else (older,)
    if case.status.phase.terminal or (committed is not None and committed < since):
        which = "latest" if committed is not None and committed < since else "STEP"
        start = f" --from-checkpoint {which}" if committed is not None else ""
        again = NextStep("run it again with other settings", f"elasticctl rerun {case.name}{start}")
        steps = (*steps, again)
    return Finding(
        "not-finite", Severity.WARNING, f"A metric is not a finite number: {not_finite_text(case.status)}.", steps
    )


def running_out_of_memory(case: Case) -> Finding | None:
    """Workers were killed because they ran out of memory."""
    count = case.status.restarts.get(Cause.OOM_KILLED, 0)
    if not count or case.status.phase.terminal:
        return None
    again = NextStep("see which, and when", f"elasticctl history {case.name}")
    were = "was" if count == 1 else "were"
    text = f"{plural(count, 'worker')} used more memory than allowed and {were} killed. {_used(case)}"
    return Finding("out-of-memory", _budget_severity(case), text, (again,))


def failing(case: Case) -> Finding | None:
    """The script has failed before, and part of the failure budget is used."""
    status = case.status
    explained = status.backoff.until is not None and status.backoff.until > case.now and case.waiting
    if status.phase.terminal or not status.failures or status.restarts.get(Cause.OOM_KILLED) or explained:
        return None
    last = status.newest_failure
    what = f"; last, {describe_failure(last, case.name)}" if last else ""
    text = f"Its script has failed {times(status.failures)}{what}. {_used(case)}"
    step = NextStep("see why", f"elasticctl logs {case.name} --previous --tail 30")
    return Finding("failing", _budget_severity(case), text, (step,), last.last_lines if last else ())


def stuck(case: Case) -> Finding | None:
    """Workers held up the group and were replaced."""
    count = sum(case.status.restarts.get(cause, 0) for cause in (Cause.STUCK, Cause.UNRESPONSIVE))
    if not count or case.status.phase.terminal:
        return None
    step = NextStep("see which, and when", f"elasticctl history {case.name}")
    return Finding(
        "stuck", Severity.WARNING, f"{plural(count, 'worker')} held up the group and had to be replaced.", (step,)
    )


def killed(case: Case) -> Finding | None:
    """Workers are killed repeatedly, for no known reason."""
    recent = [i for i in case.status.interruptions if i.cause is Cause.KILLED and _is_recent(i, case.now)]
    if case.status.phase.terminal or len(recent) < MANY_KILLED:
        return None
    text = (
        f"{plural(len(recent), 'worker')} were killed from outside in the last hour, for no known reason: perhaps the"
        " machine ran out of memory."
    )
    if any(at(item, "livenessProbe") for item in as_list(at(case.job.template, "spec", "containers"))):
        text = text.removesuffix(".") + ", or their liveness probe failed."
    return Finding("killed", Severity.WARNING, text, (NextStep("see when", f"elasticctl history {case.name}"),))


def interrupted(case: Case) -> Finding | None:
    """Workers lost in the last hour through no fault of the script, and what that cost."""
    if case.status.phase.terminal:
        return None
    recent = [item for item in case.status.interruptions if _is_recent(item, case.now)]
    if not recent:
        return None
    causes = Counter(item.cause.value for item in recent if item.cause)
    named = ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))
    text = f"{plural(len(recent), 'interruption')} in the last hour ({named}){_cost(recent, case)}."
    step = NextStep("see each of them", f"elasticctl history {case.name}")
    return Finding("interrupted", Severity.INFO, text, (step,))


def no_storage(case: Case) -> Finding | None:
    """It has no storage, so its progress is not saved."""
    if not _trains(case) or not case.hardware.launched or case.hardware.storage or case.status.checkpoint.step:
        return None
    text = "It has no storage URL: an interruption restarts it from step 0."
    step = NextStep("give it one", f"elasticctl rerun {case.name} --storage URL")
    return Finding("no-storage", Severity.WARNING, text, (step,))


def no_checkpoint(case: Case) -> Finding | None:
    """It has trained for a long time without a checkpoint."""
    began = _began(case)
    if not _trains(case) or not case.hardware.storage or case.status.checkpoint.step is not None or began is None:
        return None
    trained_s = case.since(began)
    if trained_s < FIRST_CHECKPOINT_S or case.status.progress.step is None:
        return None
    text = (
        f"No checkpoint has been committed in {span(trained_s)} of training: an interruption restarts it from step 0."
    )
    step = NextStep("look for errors while saving", f"elasticctl logs {case.name} --worker 0")
    return Finding("no-checkpoint", Severity.WARNING, text, (step,))


def not_saved(case: Case) -> Finding | None:
    """It trains on without saving, because its storage does not accept checkpoints."""
    activity = case.status.activity
    if not _trains(case) or activity is None or not activity.detail.startswith(UNSAVED):
        return None
    last = case.status.checkpoint.step
    since = "no checkpoint has been committed yet" if last is None else f"the last checkpoint is from step {last}"
    text = f"It is still training, but {shorten(activity.detail)}; {since}."
    step = NextStep("look for errors while saving", f"elasticctl logs {case.name} --worker 0 --since 10m")
    return Finding("not-saved", Severity.WARNING, text, (step,))


def stale_checkpoint(case: Case) -> Finding | None:
    """Checkpoints have stopped although training continues."""
    checkpoint, progress = case.status.checkpoint, case.status.progress
    if not _trains(case) or checkpoint.at is None or progress.at is None or (progress.step or 0) <= (
        checkpoint.step or 0
    ):  # fmt: skip
        return None
    age_s, usual_s = progress.at - checkpoint.at, _usual_interval_s(case)
    if usual_s is None or age_s < max(LEAST_OVERDUE_S, STALE_AFTER * usual_s):
        return None
    steps = plural((progress.step or 0) - (checkpoint.step or 0), "step")
    text = (
        f"The last checkpoint is {span(age_s)} old; there used to be one every {span(usual_s)}. Saves may be failing:"
        f" an interruption now would cost {steps}."
    )
    step = NextStep("look for errors while saving", f"elasticctl logs {case.name} --worker 0 --since 10m")
    return Finding("stale-checkpoint", Severity.WARNING, text, (step,))


def much_done_again(case: Case) -> Finding | None:
    """Interruptions cost so many steps that saving more often would pay off."""
    redone, step = case.status.steps_redone or 0, case.status.progress.step
    if not _trains(case) or not step or redone < MUCH_REDONE * (step + redone):
        return None
    text = (
        f"{plural(redone, 'step')} of {step + redone} had to be repeated: save more often (SavePolicy), or check"
        " whether notice reaches the workers."
    )
    return Finding(
        "steps-done-again", Severity.WARNING, text, (NextStep("see when", f"elasticctl history {case.name}"),)
    )


def begun_again(case: Case) -> Finding | None:
    """A script that reports no steps has started from the beginning again."""
    redone = redone_s(case.status)
    if redone is None or case.hardware.in_launcher_role or case.status.phase is Phase.FAILED:
        return None  # what has failed may not have come to its first report
    text = (
        "The script reports neither steps nor checkpoints: unless it keeps checkpoints of its own, it starts at step 0"
        f" again after each loss and each scaling; {span(redone)} have been repeated so far. FIX: train with Run"
        " (docs/training.md#from-a-ddp-script)."
    )
    return Finding("begun-again", Severity.WARNING, text, (NextStep("see when", f"elasticctl history {case.name}"),))


def _trains(case: Case) -> bool:
    return case.status.phase is Phase.RUNNING and case.status.reason != "Finishing"


def _is_recent(item: Interruption, now: float) -> bool:
    own = item.cause is not None and item.cause.counted
    return item.at is not None and now - item.at < LATELY_S and not own


def _budget_severity(case: Case) -> Severity:
    return Severity.ERROR if failures_used(case) >= case.job.backoff_limit else Severity.WARNING


def _used(case: Case) -> str:
    used, limit = failures_used(case), case.job.backoff_limit
    left = "one more ends the job" if used >= limit else f"{limit - used} left"
    counted = case.status.failures_since_commit is not None and case.status.checkpoint.step is not None
    since = " since the last checkpoint" if counted else ""
    return f"{used} of {plural(limit, 'allowed failure')} used{since}, {left}."


def _cost(items: list[Interruption], case: Case) -> str:
    """`: 12s until training went on, 40 steps done again`, and how many are not yet recovered from."""
    took_s, redone = waited_s(items), redone_after(items)
    still_open = sum(item.recovery_s is None for item in items)
    parts = []
    if took_s is not None:
        back = "training went on" if reports_steps(case.status) else "a group had formed again"
        again = "" if redone is None else f", {plural(redone, 'step')} done again"
        parts.append(f"{span(took_s)} until {back}{again}")
    if still_open and knows_groups(case.status):
        parts.append(f"{still_open} not yet recovered from")
    return f": {'; '.join(parts)}" if parts else ""


def _began(case: Case) -> float | None:
    """When the first step was done, or when the job was created if that is no longer known."""
    generations = case.status.generations
    if generations and generations[0].generation > 1:
        return case.job.created_at
    return next((item.first_step_at for item in generations if item.first_step_at is not None), None)


def _step_s(case: Case) -> float:
    """Seconds per step of this generation; 0 if unknown."""
    group, progress = case.group, case.status.progress
    if group is None or group.first_step_at is None or progress.at is None or progress.step is None:
        return 0.0
    steps = progress.step - (group.resumed_step or 0) - 1
    return max(0.0, progress.at - group.first_step_at) / steps if steps > 0 else 0.0


def _usual_interval_s(case: Case) -> float | None:
    """The average time between two checkpoints in seconds; None before there were two."""
    checkpoint, began = case.status.checkpoint, _began(case)
    if checkpoint.at is None or began is None or checkpoint.committed < 2:
        return None
    return max(0.0, checkpoint.at - began) / checkpoint.committed
