"""Derive what an event cost from the steps that a training script recorded. No clock, no files.

The training script appends one JSON line per rank and optimizer step. A *group* is one incarnation of the process
group: its ranks agree on a random name when they start, so a new name is a group that did not exist before. All figures
of a recovery are derived from these lines and the time of the event, in the same way for every contender.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One optimizer step on one rank; `at` is in seconds since the epoch, `pid` the process that made it.

    `samples` of the data's pass `epoch` were trained on in it, if that is recorded.
    """

    at: float
    rank: int
    world: int
    step: int
    group: str
    pid: int
    epoch: int = 0
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpectedGroup:
    """What an event leads to: a group of `world` ranks in the end.

    `smaller_counts`: a group of another size is a recovery, too, as after the loss of a worker, which the others need
    not wait for; after a scaling only the requested size is.
    """

    world: int
    smaller_counts: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened after an event; times are seconds after it, None: it did not happen.

    first_step_s   the first optimizer step by any rank of a group that did not exist before the event (and that is of
                   the expected size, where only that counts)
    standstill_s   from the last step of the group before it to that step: how long no rank trained
    whole_s        the first step of a new group of the expected size
    steps_redone   steps that were done again, summed over every re-forming since the event: for each new group, the
                   highest step recorded before its first step, less the step it resumed from
    last_step_s    the last step recorded
    samples_lost, samples_doubled
                   how many samples were not trained on, and how many once too often, in steps that count, until the end
                   of the epoch in which the event fell; None while that has not ended, or is not known
    """

    first_step_s: float | None = None
    standstill_s: float | None = None
    whole_s: float | None = None
    steps_redone: int = 0
    last_step_s: float | None = None
    samples_lost: int | None = None
    samples_doubled: int | None = None


def parse(text: str) -> list[RecordedStep]:
    """Parse recorded lines; a last line without its newline was cut off by its writer's end and is left out."""
    whole = text[: text.rfind("\n") + 1]
    return [_step(json.loads(line)) for line in whole.splitlines()]


def _step(row: dict[str, Any]) -> RecordedStep:
    return RecordedStep(**{**row, "samples": tuple(row.get("samples", ()))})


def current_group(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Return the steps of the group that was the last to make its first step; empty if there is none."""
    begun: dict[str, float] = {}
    for step in sorted(steps, key=lambda s: s.at):
        begun.setdefault(step.group, step.at)
    newest = max(begun, key=lambda group: begun[group], default=None)
    return [step for step in steps if step.group == newest]


def outcome(steps: Iterable[RecordedStep], event_at: float, expected: ExpectedGroup) -> Outcome:
    """Return what the event at `event_at` (seconds since the epoch) cost."""
    ordered = sorted(steps, key=lambda s: s.at)
    before = {step.group for step in ordered if step.at <= event_at}
    news = [step for step in ordered if step.group not in before]
    samples = _samples(ordered, event_at)
    whole = next((step for step in news if step.world == expected.world), None)
    first = news[0] if news and expected.smaller_counts else whole
    standstill_s = None
    if first is not None:
        last = max((step.at for step in ordered if step.group != first.group and step.at <= first.at), default=event_at)
        standstill_s = first.at - last
    return Outcome(
        first_step_s=first.at - event_at if first else None,
        standstill_s=standstill_s,
        whole_s=whole.at - event_at if whole else None,
        steps_redone=_redone(ordered, before),
        last_step_s=ordered[-1].at - event_at if ordered else None,
        samples_lost=samples[0],
        samples_doubled=samples[1],
    )


def _samples(ordered: Sequence[RecordedStep], event_at: float) -> tuple[int | None, int | None]:
    """Return how many samples were lost, and trained on once too often. A step counts in the last group that made
    it."""
    struck = max((step.epoch for step in ordered if step.at <= event_at), default=0)
    before = {step.pid for step in ordered if step.at <= event_at}
    stayed = {step.pid for step in ordered if step.group == ordered[-1].group} & before
    last: dict[int, tuple[float, str]] = {}
    begun: dict[str, float] = {}
    for step in ordered:
        begun.setdefault(step.group, step.at)
        last[step.step] = max(last.get(step.step, (0.0, "")), (begun[step.group], step.group))
    counted = [step for step in ordered if step.group == last[step.step][1]]
    of_all = {name for step in counted for name in step.samples}
    ahead = {step.pid for step in counted if step.epoch > struck}
    if not of_all or not ahead or not stayed <= ahead:
        return None, None
    times = Counter((step.epoch, name) for step in counted if step.epoch <= struck for name in step.samples)
    wanted = len(of_all) * (struck + 1)
    return wanted - len(times) - _unwritten(counted, struck), times.total() - len(times)


def _unwritten(counted: Sequence[RecordedStep], epoch: int) -> int:
    """Return on how many samples, until the end of `epoch`, ranks trained that were killed before they could record
    it."""
    steps: dict[int, list[RecordedStep]] = {}
    for step in counted:
        if step.epoch <= epoch and step.samples:
            steps.setdefault(step.step, []).append(step)
    return sum((ranks[0].world - len(ranks)) * len(ranks[0].samples) for ranks in steps.values())


def _redone(ordered: Sequence[RecordedStep], before: set[str]) -> int:
    seen, highest, total = set(before), 0, 0
    for step in ordered:
        if step.group not in seen:
            seen.add(step.group)
            total += max(0, highest - step.step + 1)
        highest = max(highest, step.step)
    return total
