"""The history of training: what ranks have reported, in the rendezvous service and in the status of a job.

The service keeps a `TrainingHistory` in memory and may be restarted. Only the status lasts, so `fold_reports` keeps
everything that the status once had, and counts nothing twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from elasticctl.api.codec import Timestamp, from_json, to_json
from elasticctl.api.observed.history import add_point, reports_steps
from elasticctl.api.observed.usage import add_usage
from elasticctl.api.spec import PodPhase
from elasticctl.api.status import (
    Activity,
    CheckpointStatus,
    Curve,
    GroupGeneration,
    Interruption,
    JobStatus,
    ProgressStatus,
    RankFailure,
    Scaling,
    ScalingPhase,
)
from elasticctl.api.usage import UsageHistory
from elasticctl_controller.core.observation import GroupView
from elasticctl_protocol.reports import StateSource

MAX_GENERATIONS = 20
MAX_NAMES, LEAST_GENERATIONS = 10_000, 3
"""How many names of workers all generations that are kept may have together, because the status has to fit in an object
and a group may have 2,000 members, and how many generations are kept in any case."""
NOT_YET_AGAIN = "no copy has been made since the last loss"
"""Until the next copy, some shares may be in the memory of one worker only."""
_REASONS = {"copies_lack": "copied_every_steps", "restarts_because": "stays", "resumed_because": "resumed_from"}
"""Fields of a generation that explain another one, and are empty if there is nothing to explain."""
MAX_METRICS = 64
"""The newest metrics that are kept: a script that makes up a name for each step must not fill the job's status."""
WARMUP_S = 10.0
"""How long the rate of a new generation is ignored: its first steps are slow at any size."""
RATE_WEIGHT = 0.1
"""The weight of the newest report in a rate: one slow step is little evidence about a size."""

T = TypeVar("T", GroupGeneration, ProgressStatus, CheckpointStatus, Activity)


@dataclass(slots=True)
class TrainingHistory:
    """What the ranks of a job have reported to this service. `rates` are samples per second by number of workers.

    `newest_commit` is the generation and the number of the newest checkpoint. `reports`: the script reports steps.
    `stepped_at` is when the newest generation last reported a new step, in seconds since the epoch (None: not yet), and
    `longest_step_s` the longest time between two such reports.
    """

    generations: list[GroupGeneration] = field(default_factory=list)
    progress: ProgressStatus | None = None
    checkpoint: CheckpointStatus = CheckpointStatus()
    newest_commit: tuple[int, int] = (0, 0)
    reports: bool = False
    rates: dict[int, float] = field(default_factory=dict)
    stepped_at: float | None = None
    longest_step_s: float = 0.0

    @property
    def newest(self) -> GroupGeneration | None:
        """The newest generation; None before the first."""
        return self.generations[-1] if self.generations else None

    def add_generation(self, generation: GroupGeneration) -> None:
        """Add a generation that has formed."""
        self.generations.append(generation)
        del self.generations[:-MAX_GENERATIONS]
        self.stepped_at = None

    @property
    def has_stepped(self) -> bool:
        """True once a rank has reported a step."""
        return self.progress is not None or any(item.last_step is not None for item in self.generations)

    def has_failed(self, generation: int) -> bool:
        """True for a generation that is known to have ended by a failure."""
        return any(item.generation == generation and item.failure is not None for item in self.generations)

    def note_failure(self, generation: int, failure: RankFailure) -> None:
        """A generation has ended with this failure, and its ranks have restarted or are about to.

        A generation that formed and ended while nothing could be stored is not known yet. It is assumed to have had the
        workers of the generation before it.
        """
        before = [item for item in self.generations if item.generation <= generation]
        if not before or before[-1].generation < generation:
            workers = before[-1].workers if before else ()
            self.generations.insert(len(before), GroupGeneration(generation, workers, "service restarted"))
            del self.generations[:-MAX_GENERATIONS]
        # All lines are in the workers' logs; twenty such failures would fill the job's status.
        short = replace(failure, last_lines=failure.last_lines[-5:])
        is_newest = self.newest is not None and self.newest.generation == generation
        hung_at = Timestamp(self.stepped_at) if failure.is_hang and is_newest and self.stepped_at is not None else None
        self.generations = [
            replace(each, failure=short, last_step_at=each.last_step_at if hung_at is None else hung_at)
            if each.generation == generation
            else each
            for each in self.generations
        ]

    def note_step(self, generation: int, progress: ProgressStatus, now: float) -> bool:
        """Record the progress of a rank; False if it does not belong to the newest generation."""
        newest = self.newest
        if newest is None or newest.generation != generation or progress.step is None:
            return False
        self.reports = True
        first = newest.first_step_at is None
        if progress.step > (newest.last_step or -1):
            if self.stepped_at is not None:
                self.longest_step_s = max(self.longest_step_s, now - self.stepped_at)
            self.stepped_at = now
        last_step = max(progress.step, newest.last_step or 0)
        newest = replace(newest, first_step_at=Timestamp(now) if first else newest.first_step_at, last_step=last_step)
        self.generations[-1] = newest
        if self.progress is None or first or progress.step >= (self.progress.step or 0):
            self.progress = _add_metrics(self.progress or ProgressStatus(), progress, Timestamp(now), is_first=first)
        warm = not first and newest.first_step_at is not None and now >= newest.first_step_at + WARMUP_S
        if warm and progress.samples_per_s is not None and progress.samples_per_s > 0:
            rate = self.rates.setdefault(len(newest.workers), progress.samples_per_s)
            self.rates[len(newest.workers)] += (progress.samples_per_s - rate) * RATE_WEIGHT
        return True

    def note_resumed(
        self,
        generation: int,
        step: int,
        source: str = "",
        stays: bool | None = None,
        why_not: str = "",
        source_because: str = "",
    ) -> None:
        """A rank has restored the state of `step` (0: there was none).

        `source`: the state came from the `memory` of other ranks, from `copies` in the memory of launchers, or from
        `storage`; `source_because` says why not from a better source. `stays`: the rank will stay in its process when
        this generation ends (None: unknown); `why_not` says why it will not.
        """
        self.reports = True
        if self.newest is not None and self.newest.generation == generation:
            source = self.newest.resumed_from if self.newest.resumed_from == StateSource.MEMORY else source
            self.generations[-1] = replace(
                self._with_former_copies(self.newest) if source == StateSource.COPIES else self.newest,
                resumed_step=step,
                resumed_from=source,
                resumed_because="" if source == StateSource.MEMORY else source_because,
                stays=stays,
                restarts_because=why_not,
            )

    def _with_former_copies(self, newest: GroupGeneration) -> GroupGeneration:
        """The newest generation with the copies that it was restored from, until it reports its own."""
        if newest.copied_every_steps is not None or newest.copies_lack:
            return newest
        former = (each.copied_every_steps for each in reversed(self.generations[:-1]))
        every_steps = next((steps for steps in former if steps is not None), None)
        return replace(newest, copied_every_steps=every_steps, copies_lack=NOT_YET_AGAIN if every_steps else "")

    def note_copied(self, generation: int, every_steps: int, lack: str) -> None:
        """Ranks copy their state to the memory of launchers every `every_steps` steps (0: unknown, or not any more)."""
        if self.newest is not None and self.newest.generation == generation:
            self.generations[-1] = replace(self.newest, copied_every_steps=every_steps or None, copies_lack=lack)

    def note_commit(
        self, generation: int, number: int, step: int, url: str, size_bytes: int, duration_s: float, now: float
    ) -> None:
        """A generation has committed a checkpoint, its `number`-th at the URL; a repeated report counts once."""
        if (generation, number) <= self.newest_commit:
            return
        first_report, self.newest_commit = self.newest_commit == (0, 0), (generation, number)
        if first_report and (url, step) == (self.checkpoint.url, self.checkpoint.step):
            return  # a service before this one has counted it
        self.checkpoint = CheckpointStatus(
            step=step,
            at=Timestamp(now),
            committed=self.checkpoint.committed + 1,
            url=url,
            size_bytes=size_bytes,
            duration_s=duration_s,
        )


def fold_reports(status: JobStatus, group: GroupView) -> JobStatus:
    """Merge what the group has reported into the status, and count the steps that each new generation has repeated."""
    generations = _merge_generations(status.generations, group.generations, status.generation)
    stepped = {item.generation for item in status.generations if _has_stepped(item)}
    redone = (steps_redone(generations, item) or 0 for item in generations if item.generation not in stepped)
    progress = _merge_progress(status.progress, group.progress)
    reports = reports_steps(replace(status, generations=generations, progress=progress))
    return replace(
        status,
        generations=_limit(generations),
        generation=max((item.generation for item in generations), default=status.generation),
        steps_redone=(status.steps_redone or 0) + sum(redone) if reports else status.steps_redone,
        progress=progress,
        curve=add_point(
            status.curve,
            progress.at,
            progress.step,
            progress.samples_per_s,
            progress.metrics,
            progress.not_finite.keys(),
        ),
        checkpoint=_merge_checkpoint(status.checkpoint, group.checkpoint),
        growth=group.growth,
        activity=None if group.activity is None else _as_stored(group.activity),
        usage=group.usage,
        usage_history=add_usage(status.usage_history, group.usage),
    )


def close_recovered(status: JobStatus) -> JobStatus:
    """Close the interruptions and scalings after which a generation has taken its first step.

    If the script has not reported any step, all that can be known is that the group has formed. That closes them until
    there is a first step.
    """
    return replace(
        status,
        interruptions=tuple(_close_interruption(item, status) for item in status.interruptions),
        scalings=(*status.scalings[:-1], *(_close_scaling(item, status) for item in status.scalings[-1:])),
    )


def steps_redone(generations: Sequence[GroupGeneration], current: GroupGeneration) -> int | None:
    """Steps that `current` repeats: from the step it resumed at to the last one taken before it.

    None until it has resumed and taken its first step. A generation that ended before its first step is skipped: the
    one before it counts.
    """
    if not _has_stepped(current):
        return None
    before = [g for g in generations if g.generation < current.generation and g.last_step is not None]
    last_step = max(before, key=lambda g: g.generation).last_step if before else None
    return max(0, (last_step or 0) - (current.resumed_step or 0))


def only_progress_changed(old: JobStatus, new: JobStatus) -> bool:
    """True if `new` differs from `old` only by the progress of training, so that writing it can wait."""

    def without_progress(status: JobStatus) -> JobStatus:
        generations = tuple(replace(item, last_step=None) for item in status.generations)
        return replace(
            status,
            progress=ProgressStatus(),
            curve=Curve(),
            checkpoint=CheckpointStatus(),
            usage=None,
            usage_history=UsageHistory(),
            generations=generations,
            last_reconcile_time=None,
        )

    return old != new and without_progress(old) == without_progress(new)


def _merge_generations(
    stored: Sequence[GroupGeneration], seen: Sequence[GroupGeneration], newest: int
) -> tuple[GroupGeneration, ...]:
    """Merge by number. A number that is neither stored nor new was counted, and then dropped, long ago."""
    merged = {item.generation: item for item in stored}
    for item in map(_as_stored, seen):
        known = merged.get(item.generation)
        if known is not None:
            merged[item.generation] = _overlay(known, item)
        elif item.generation > newest:
            merged[item.generation] = item
    return tuple(merged[number] for number in sorted(merged))


def _limit(generations: Sequence[GroupGeneration]) -> tuple[GroupGeneration, ...]:
    """The newest generations, as many as may be kept: fewer if the group is large."""
    names = list(itertools.accumulate(len(item.workers) for item in reversed(generations)))
    fitting = sum(count <= MAX_NAMES for count in names[:MAX_GENERATIONS])
    return tuple(generations[-max(LEAST_GENERATIONS, fitting) :])


def _overlay(known: GroupGeneration, seen: GroupGeneration) -> GroupGeneration:
    """`seen` merged into `known`: fields that the service no longer knows stay, and steps only increase."""
    unknown = {f.name for f in fields(GroupGeneration) if getattr(seen, f.name) in (None, "", ())}
    unknown -= {reason for reason, of in _REASONS.items() if of not in unknown}
    kept = {name: getattr(known, name) for name in unknown}
    merged = replace(seen, **kept)
    steps = [step for step in (known.last_step, seen.last_step) if step is not None]
    return replace(merged, last_step=max(steps, default=None))


def _as_stored(item: T) -> T:
    """The value as it will be read back, for comparisons: times are stored in microseconds."""
    return from_json(type(item), to_json(item))


def _has_stepped(item: GroupGeneration) -> bool:
    return item.first_step_at is not None and item.resumed_step is not None


def _add_metrics(known: ProgressStatus, seen: ProgressStatus, now: Timestamp, *, is_first: bool) -> ProgressStatus:
    """`seen`, with the metrics that were known and are not in it; `is_first`: it is the first step of a generation.

    If ranks differ about since when a metric has not been finite, the earliest step counts.
    """
    lost = {} if is_first else {name: item for name, item in known.not_finite.items() if name not in seen.metrics}
    for name, item in seen.not_finite.items():
        before = lost.get(name)
        earlier = before is not None and before.step <= item.step
        lost[name] = replace(before, value=item.value) if before is not None and earlier else replace(item, at=now)
    reported = {**seen.metrics, **lost}
    older = [(name, value) for name, value in known.metrics.items() if name not in reported]
    metrics = [*older, *((name, value) for name, value in seen.metrics.items() if name not in lost)]
    return replace(
        seen, at=now, metrics=dict(metrics[-MAX_METRICS:]), not_finite=dict(list(lost.items())[-MAX_METRICS:])
    )


def _merge_progress(stored: ProgressStatus, seen: ProgressStatus | None) -> ProgressStatus:
    if seen is None or seen.step is None:
        return stored
    rate = seen.samples_per_s
    before = stored.not_finite  # a restarted service does not know when each metric was first reported
    same = {name for name, item in seen.not_finite.items() if name in before and before[name].step == item.step}
    return _as_stored(
        replace(
            seen,
            # JSON has no NaN, and NaN never equals itself: it would be written again in every pass.
            metrics={key: value for key, value in seen.metrics.items() if math.isfinite(value)},
            not_finite={
                name: replace(item, at=before[name].at) if name in same else item
                for name, item in seen.not_finite.items()
            },
            samples_per_s=rate if rate is not None and math.isfinite(rate) else None,
        )
    )


def _merge_checkpoint(stored: CheckpointStatus, seen: CheckpointStatus | None) -> CheckpointStatus:
    if seen is None or seen.step is None or (stored.at or 0.0) > (seen.at or 0.0):
        return stored
    return replace(_as_stored(seen), committed=max(stored.committed, seen.committed))


def _close_interruption(item: Interruption, status: JobStatus) -> Interruption:
    after = [g for g in status.generations if g.generation > item.generation]
    back = next((g for g in after if _back_at(g, status) is not None), None)
    back_at = None if back is None else _back_at(back, status)
    if item.at is None or back is None or back_at is None or _is_recovery_known(item.recovered_at, after):
        return item
    opened_at = after[0].opened_at
    # The group may notice a loss before the controller sees the pod end.
    since = item.at if opened_at is None else min(item.at, opened_at)
    return replace(
        item,
        recovered_at=back_at,
        recovery_s=max(0.0, back_at - since),
        steps_redone=steps_redone(status.generations, back),
    )


def _close_scaling(item: Scaling, status: JobStatus) -> Scaling:
    """A scaling is done with the first step at that size or, if no generation is known, once that many workers run."""
    newest = status.generations[-1] if status.generations else None
    if newest is None and item.phase is ScalingPhase.IN_PROGRESS:
        running = sum(worker.phase == PodPhase.RUNNING and worker.cause is None for worker in status.workers)
        return replace(item, phase=ScalingPhase.DONE) if running == item.to_workers else item
    if item.phase is ScalingPhase.DONE and item.done_at is None:
        return item  # while it was suspended, or to no workers
    back_at = None if newest is None else _back_at(newest, status)
    if item.at is None or newest is None or back_at is None or len(newest.workers) != item.to_workers:
        return item
    if item.done_at is not None and (newest.first_step_at is None or item.done_at != _later(item, newest.formed_at)):
        return item
    done_at = _later(item, back_at)
    return replace(
        item,
        phase=ScalingPhase.DONE,
        done_at=done_at,
        recovery_s=done_at - item.at,
        steps_redone=steps_redone(status.generations, newest),
    )


def _back_at(group: GroupGeneration, status: JobStatus) -> Timestamp | None:
    """When this group began to train, as far as is known: with its first step or, without steps, when it formed."""
    return group.first_step_at if reports_steps(status) else group.formed_at


def _is_recovery_known(recovered_at: Timestamp | None, after: Sequence[GroupGeneration]) -> bool:
    """True once the recovery is known. If it was only known when the group formed, its first step replaces that."""
    if recovered_at is None:
        return False
    return not any(g.formed_at == recovered_at and g.first_step_at is not None for g in after)


def _later(item: Scaling, moment: Timestamp | None) -> Timestamp:
    """The moment, or the scaling itself if that was later."""
    return max(moment for moment in (item.at, moment) if moment is not None)
