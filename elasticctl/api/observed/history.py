"""A job's activity, pace, goodput and curve, from its status."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import Activity, Cause, Curve, GroupGeneration, Interruption, JobStatus, Phase, Scaling
from elasticctl.api.text import span

T = TypeVar("T")

LEAST_STEPS, LEAST_S = 10, 1.0
"""Over less time, the steps of a group say little about its pace; with fewer, little about the rate of its size."""
STANDSTILL_S, STANDSTILL_STEPS = 60.0, 20
"""A standstill: no step and no checkpoint for STANDSTILL_S, and for as long as STANDSTILL_STEPS steps used to take."""
STEADY = ("training", "running")
"""What a group does without an end in sight."""
_FIRST_STEP = "first step"
_WITH_REASON = ("hung", "draining", "training")
"""What is said about these next to the word is a sentence of its own."""


def reports_steps(status: JobStatus) -> bool:
    """True once a rank has reported a step, or the one it continues from. Plain scripts never do."""
    stepped = any(g.first_step_at is not None or g.resumed_step is not None for g in status.generations)
    return stepped or status.progress.step is not None


def waited_s(changes: Iterable[Interruption | Scaling]) -> float | None:
    """Seconds that training waited for these changes, overlaps counted once; None if all are unknown."""
    waits = []
    for change in changes:
        back_at = change.recovered_at if isinstance(change, Interruption) else change.done_at
        took_s = change.recovery_s
        if took_s is not None and (back_at is not None or change.at is not None):
            end = back_at if back_at is not None else (change.at or 0.0) + took_s
            waits.append((end - took_s, end))
    if not waits:
        return None
    total_s, until = 0.0, -math.inf
    for since, end in sorted(waits):
        total_s += max(0.0, end - max(since, until))
        until = max(until, end)
    return total_s


def unplanned_ends(status: JobStatus) -> dict[str, int]:
    """The number of workers that ended unexpectedly, by cause."""
    planned = (Cause.SCALED_IN, Cause.COMPLETED)
    return {cause: count for cause, count in status.restarts.items() if count and cause not in planned}


def redone_after(interruptions: Iterable[Interruption]) -> int | None:
    """Steps repeated after these losses; None: unknown. Losses that ended the same group count once."""
    redone = {
        item.recovered_at if item.recovered_at is not None else id(item): item.steps_redone
        for item in interruptions
        if item.steps_redone is not None
    }
    return sum(redone.values()) if redone else None


def redone_s(status: JobStatus) -> float | None:
    """Seconds of training that a script which reports no steps repeated from the start; None if none are known.

    Only the groups that the status still lists count: in a very long job, the newest.
    """
    if reports_steps(status) or status.checkpoint.step is not None:
        return None
    spans = [
        max(0.0, later.opened_at - group.formed_at)
        for group, later in itertools.pairwise(status.generations)
        if group.formed_at is not None and later.opened_at is not None
    ]
    return sum(spans) if spans else None


def unkept_s(status: JobStatus, now: float) -> float | None:
    """Seconds that the group has run a script which reports neither steps nor checkpoints; None for other scripts."""
    newest = status.generations[-1] if status.generations else None
    if reports_steps(status) or status.checkpoint.step is not None or newest is None or newest.formed_at is None:
        return None
    return max(0.0, now - newest.formed_at) if status.phase is Phase.RUNNING else None


def knows_groups(status: JobStatus) -> bool:
    """False for a job with its own rendezvous, where nothing reports when its workers have formed a group."""
    return bool(status.generations) or reports_steps(status)


def is_training(status: JobStatus) -> bool:
    """True if the newest group has made a step, and has since neither stopped nor lost a member."""
    if status.phase is not Phase.RUNNING or not status.generations:
        return status.phase is Phase.RUNNING and status.progress.step is not None
    group = status.generations[-1]
    if group.first_step_at is None:
        return False
    if status.activity is not None:
        return status.activity.doing in ("training", "draining")
    there = {worker.name for worker in status.workers if worker.cause is None and not worker.removal}
    return there.issuperset(group.workers)  # a job of an older controller, which reports no activity


def standstill_s(status: JobStatus, now: float) -> float | None:
    """Seconds since the last step of a group that trains, if that is longer than its steps take; else None."""
    pace, last, group = steps_per_s(status), status.progress.at, status.generations[-1:]
    if status.phase is not Phase.RUNNING or last is None or not group or group[0].first_step_at is None:
        return None
    if status.activity is not None and status.activity.doing != "training":
        return None
    idle_s = now - max(last, status.checkpoint.at or 0.0)
    return idle_s if idle_s >= max(STANDSTILL_S, STANDSTILL_STEPS / pace if pace else 0.0) else None


def makes_steps(status: JobStatus, now: float) -> bool:
    """True while steps are being made, so that their pace is the current one."""
    return is_training(status) and standstill_s(status, now) is None


def current_activity(status: JobStatus) -> Activity | None:
    """What the group is doing; None while there is no group, or if no rank has reported it."""
    if status.phase is Phase.SUSPENDED or status.phase.terminal:
        return None
    return status.activity if status.activity is not None and status.activity.doing else None


def activity_text(status: JobStatus, now: float) -> str:
    """`first step (4m00s so far; last time 6m00s)`: what the group is doing, and for how long; "" if unknown."""
    doing = current_activity(status)
    if doing is None:
        return ""
    words = activity_words(doing)
    if doing.since is None:
        return words
    took = span(max(0.0, now - doing.since))
    idle_s = standstill_s(status, now)
    if doing.doing in STEADY:
        still = "" if idle_s is None else f", but no step for {span(idle_s)}"
        return f"{doing.doing} for {took}{still}{'; ' * bool(doing.detail)}{doing.detail}"
    last_s = first_step_took_s(status, doing)
    last = "" if last_s is None else f"; last time {span(last_s)}"
    return f"{words} ({took} so far{last})"


def activity_words(doing: Activity) -> str:
    """`loading step 657`, without how long it has taken."""
    return f"{doing.doing}{':' if doing.doing in _WITH_REASON else ''} {doing.detail}".rstrip(": ")


def first_step_took_s(status: JobStatus, doing: Activity) -> float | None:
    """Seconds that an earlier group took to its first step, if the present group is working towards its own."""
    if doing.doing != _FIRST_STEP:
        return None
    for group in reversed(status.generations[:-1]):
        if group.formed_at is not None and group.first_step_at is not None:
            return max(0.0, group.first_step_at - group.formed_at)
    return None


def not_finite_text(status: JobStatus) -> str:
    """`loss NaN since step 81`: the metrics that are not finite; "" if all are."""
    lost = status.progress.not_finite.items()
    return ", ".join(f"{name} {item.value} since step {item.step}" for name, item in lost)


def steps_per_s(status: JobStatus) -> float | None:
    """Steps per second of the current group since its first step; None while that is unknown.

    Earlier groups do not count, as their size and so their pace may have been different.
    """
    group = status.generations[-1] if status.generations else None
    step, at = status.progress.step, status.progress.at
    if status.phase is not Phase.RUNNING or group is None or group.first_step_at is None or step is None or at is None:
        return None
    took_s = at - group.first_step_at
    done = step - (group.resumed_step or 0) - 1  # the first step had ended by then
    return done / took_s if done > 0 and took_s >= LEAST_S else None


def samples_per_s(status: JobStatus) -> float | None:
    """Samples per second of the whole group, or its last value once the job has ended; None while it does not train."""
    return status.progress.samples_per_s if status.phase is Phase.RUNNING or status.phase.terminal else None


def fraction_done(status: JobStatus) -> float | None:
    """The share of all steps that is done, from 0 to 1; None if the script does not report their total."""
    step, total = status.progress.step, status.progress.total_steps
    if step is None or not total or total < 0:
        return None
    return min(1.0, max(0.0, step / total))


def remaining_s(status: JobStatus) -> float | None:
    """Seconds until the last step at the current pace; None if that is unknown."""
    pace, step, total = steps_per_s(status), status.progress.step, status.progress.total_steps
    if pace is None or step is None or total is None:
        return None
    return max(0, total - step) / pace


@dataclass(frozen=True, slots=True)
class Goodput:
    """Wall time in seconds, and how much of it moved training forward or was spent on steps that were lost.

    `whole` is True if this covers the job's whole life, False if only the groups that its status still lists.
    """

    wall_s: float
    forward_s: float
    redone_s: float
    whole: bool = True

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return min(1.0, self.forward_s / self.wall_s) if self.wall_s > 0 else 0.0


def goodput(status: JobStatus, now: float) -> Goodput | None:
    """The goodput of a job up to `now` (seconds since the epoch) or its end; None before the first step."""
    groups = status.generations
    end = status.completion_time if status.completion_time is not None else now
    begin = _measured_from(status)
    if begin is None or end <= begin or not any(group.first_step_at is not None for group in groups):
        return None
    forward_s = redone_s = 0.0
    for position, group in enumerate(groups):
        spent_s = training_s(status, position, end)
        lost_s = spent_s * _lost_share(group, groups[position + 1 :])
        forward_s += spent_s - lost_s
        redone_s += lost_s
    return Goodput(end - begin, forward_s, redone_s, whole=groups[0].generation <= 1)


def _measured_from(status: JobStatus) -> float | None:
    """When the measured time begins: with the job, or with the oldest group that is still listed."""
    if not status.generations:
        return None
    first = status.generations[0]
    moments = [first.opened_at, first.formed_at, first.first_step_at]
    if first.generation <= 1:
        moments.append(status.start_time)  # a resumed job's is later than its first group
    return min((moment for moment in moments if moment is not None), default=None)


def training_s(status: JobStatus, position: int, end: float) -> float:
    """Seconds from the first step of a group until it was stopped, or hung, or until `end`; 0 before that step."""
    group, later = status.generations[position], status.generations[position + 1 :]
    if group.first_step_at is None:
        return 0.0
    moments: tuple[float | None, ...] = (end if status.progress.at is None else min(end, status.progress.at),)
    if later:
        begun = later[0]
        moments = (group.last_step_at, begun.opened_at, begun.formed_at, begun.first_step_at, group.first_step_at)
    stop = next(moment for moment in moments if moment is not None)
    return max(0.0, stop - group.first_step_at)


def _lost_share(group: GroupGeneration, later: Sequence[GroupGeneration]) -> float:
    """The share of a group's steps that a later group redid."""
    resumed = next((item.resumed_step for item in later if item.resumed_step is not None), None)
    if resumed is None or group.last_step is None:
        return 0.0
    taken = group.last_step - (group.resumed_step or 0)
    return min(1.0, max(0, group.last_step - resumed) / taken) if taken > 0 else 0.0


MAX_POINTS = 120
"""Some 4 KB of JSON with two metrics, and as many points as a small chart can show apart."""
MAX_METRICS = 6


def add_point(
    curve: Curve,
    at: Timestamp | None,
    step: int | None,
    samples_per_s: float | None,
    metrics: Mapping[str, float],
    not_finite: Collection[str] = (),
) -> Curve:
    """Return the curve with one more point, or the same curve if the point is not later or has no values.

    `not_finite` are the metrics that are not finite at this point; their columns have a gap there.
    Beyond `MAX_POINTS`, the point whose neighbours are closest in time is removed, so that the others stay evenly
    spread, however the points arrived. The first and the last always stay.
    """
    if at is None or step is None:
        return curve
    since = at if curve.since is None else curve.since
    at_s = round(at - since, 1)
    if curve.at_s and at_s < curve.at_s[-1]:
        return curve
    if curve.at_s and at_s == curve.at_s[-1]:
        curve = _drop_point(curve, len(curve.at_s) - 1)
    known = {name: values for name, values in curve.metrics.items() if values}
    reported: dict[str, float | None] = {**metrics, **dict.fromkeys(not_finite)}
    names = [*known, *(name for name in reported if name not in known)][:MAX_METRICS]
    longer = Curve(
        since=since,
        at_s=(*curve.at_s, at_s),
        step=(*curve.step, step),
        samples_per_s=_append(curve.samples_per_s, samples_per_s),
        metrics={name: _append_or_gap(known.get(name, ()), metrics.get(name), name in not_finite) for name in names},
    )
    return longer if len(longer.at_s) <= MAX_POINTS else _drop_point(longer, least_point(longer.at_s))


def _append(column: tuple[float, ...], value: float | None) -> tuple[float, ...]:
    """Return the column with one more value; a number that was not reported this time keeps its last value."""
    if value is None:
        return (*column, *column[-1:])
    return (*column, rounded(value))


def _append_or_gap(column: tuple[float | None, ...], value: float | None, gap: bool) -> tuple[float | None, ...]:
    if gap or value is None:
        return (*column, None) if gap else (*column, *column[-1:])
    return (*column, rounded(value))


def rounded(value: float) -> float:
    """Round to five digits, which is more than a chart shows."""
    nearest = float(f"{value:.5g}")
    # The largest floats round up to infinity, which JSON cannot hold; scripts begin a best loss with them.
    return nearest if math.isfinite(nearest) else value


def least_point(at_s: tuple[float, ...]) -> int:
    """The index of the inner point that matters least among ascending moments: its neighbours are closest together."""
    return min(range(1, len(at_s) - 1), key=lambda i: at_s[i + 1] - at_s[i - 1])


def _drop_point(curve: Curve, point: int) -> Curve:
    from_end = point - len(curve.at_s)
    return Curve(
        since=curve.since,
        at_s=_drop_value(curve.at_s, from_end),
        step=_drop_value(curve.step, from_end),
        samples_per_s=_drop_value(curve.samples_per_s, from_end),
        metrics={name: _drop_value(values, from_end) for name, values in curve.metrics.items()},
    )


def _drop_value(column: tuple[T, ...], from_end: int) -> tuple[T, ...]:
    """Return the column without the value at this distance from its end, or unchanged if it is shorter."""
    if -from_end > len(column):
        return column
    return column[:from_end] + column[len(column) + from_end + 1 :]


def steps_per_s_by_size(status: JobStatus, now: float) -> dict[int, float]:
    """Number of workers -> steps per second, over all groups of that size."""
    steps: dict[int, int] = {}
    seconds: dict[int, float] = {}
    end = status.completion_time if status.completion_time is not None else now
    for position, group in enumerate(status.generations):
        size, trained = len(group.workers), training_s(status, position, end)
        if size and group.last_step is not None and trained > 0:
            steps[size] = steps.get(size, 0) + max(0, group.last_step - (group.resumed_step or 0))
            seconds[size] = seconds.get(size, 0.0) + trained
    return {
        size: steps[size] / seconds[size] for size in steps if steps[size] >= LEAST_STEPS and seconds[size] >= LEAST_S
    }


def rate_text(status: JobStatus, now: float, *, long: bool = False) -> str:
    """Samples per second, or steps if their size is unknown; the last value, once the job has ended."""
    if not (status.phase.terminal or makes_steps(status, now)):
        return ""
    samples, steps = samples_per_s(status), steps_per_s(status)
    if samples is not None:
        return f"{samples:,.0f}{' samples' if long else ''}/s"
    return "" if steps is None else f"{steps:,.3g} steps/s"
