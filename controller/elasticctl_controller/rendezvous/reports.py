"""Records the reports of ranks and launchers in their group: sizes and ranges are limited, invalid ones are skipped."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import NOT_FINITE_VALUES, NotFiniteMetric, ProgressStatus
from elasticctl.api.usage import WorkerUsage
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.history import MAX_METRICS
from elasticctl_controller.rendezvous.requests import clean, is_whole
from elasticctl_protocol.reports import (
    CommittedReport,
    CopiedReport,
    GpuUsage,
    HangReport,
    InputsReport,
    NotFiniteValue,
    ProgressReport,
    RankPlace,
    Report,
    ResumedReport,
    StepShares,
    UnsavedReport,
    UsageReport,
    WaitingReport,
    decode_report,
)
from elasticctl_protocol.requests import MAX_SLOTS, MAX_TEXT, WIRE

MAX_RANKS = 100_000
MAX_GPUS = 32
MAX_PLACE = 80
MAX_EXAMPLES = 8000


def newest_generation(messages: Iterable[Any]) -> int:
    """The newest generation that any of these reports is about; -1 if none is about a generation."""
    found = (_whole(WIRE.decode(Report, message).generation) for message in messages)
    return max((generation for generation in found if generation is not None), default=-1)


def note_report(group: Group, message: object, now: float) -> bool:
    """Record one report of a rank or a launcher; True if the job's status should show it. Invalid ones are skipped."""
    report = decode_report(message)
    match report:
        case WaitingReport(reason=reason):
            group.reports.set_obstacle(_short(reason))
            return True
        case UnsavedReport(reason=reason):
            group.reports.set_obstacle("", _short(reason))
            return True
        case UsageReport():
            return _note_usage(group, report, now)
    if report is None or not is_whole(report.generation) or not is_whole(report.step):
        return False
    if isinstance(report, HangReport):
        return _note_places(group, report.generation, report)
    group.reports.clear_obstacle()
    return _note_training(group, report, report.generation, report.step, now)


def _note_training(group: Group, report: Report, generation: int, step: int, now: float) -> bool:
    match report:
        case ProgressReport():
            group.note_step(generation, _progress(report), now)
        case ResumedReport():
            _note_resumed(group, generation, step, report)
        case CopiedReport():
            group.history.note_copied(generation, _whole(report.every_steps) or 0, _short(report.lack))
        case CommittedReport():
            return _note_commit(group, generation, step, report, now)
        case InputsReport():
            group.reports.set_examples(_examples(report.examples))
            return False
        case _:
            return False
    return True


def _note_commit(group: Group, generation: int, step: int, report: CommittedReport, now: float) -> bool:
    number = _whole(report.committed)
    if number is None:
        return False
    size_bytes, duration_s = _whole(report.size_bytes) or 0, report.duration_s or 0.0
    group.note_commit(generation, number, step, _short(report.url), size_bytes, duration_s, now)
    return True


def _note_resumed(group: Group, generation: int, step: int, report: ResumedReport) -> None:
    group.reports.set_stays(report.stays is True)
    group.history.note_resumed(
        generation,
        step,
        report.source or "",
        report.stays,
        _short(report.restarts_because),
        _short(report.source_because),
    )


def _examples(text: str) -> str:
    """A JSON list of what ranks call their model with, as text; newcomers find it in their environment."""
    if len(text) > MAX_EXAMPLES:
        return ""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return json.dumps(found) if isinstance(found, list) else ""


def _note_usage(group: Group, report: UsageReport, now: float) -> bool:
    """Record what a worker uses of its machine."""
    if report.uid not in group.members.alive:
        return False
    gpus = report.gpus or GpuUsage()
    usage = WorkerUsage(
        worker=group.members.alive[report.uid],
        at=Timestamp(now),
        cpus_used=report.cpus_used,
        cpus=report.cpus,
        memory_bytes=report.memory_bytes,
        memory_total_bytes=report.memory_total_bytes,
        received_bytes_per_s=report.received_bytes_per_s,
        sent_bytes_per_s=report.sent_bytes_per_s,
        gpus=GpuUsage(*(getattr(gpus, each.name)[:MAX_GPUS] for each in fields(gpus))),
        no_gpus=_short(report.no_gpus),
        step_times=StepShares(*map(_share, report.step_times.shares)),
    )
    return group.usage.add_usage(report.uid, usage, now)


def _share(value: float | None) -> float | None:
    """A part of a whole."""
    return None if value is None else min(1.0, max(0.0, value))


def _note_places(group: Group, generation: int, report: HangReport) -> bool:
    """Record where ranks that do not move are; a rank without a place moves again."""
    if generation != group.generation:
        return False
    for place in report.ranks[:MAX_SLOTS]:
        rank = _whole(place.rank)
        if rank is None or rank >= MAX_RANKS:
            continue
        where = clean(place.where[:MAX_PLACE])
        group.reports.set_place(rank, RankPlace(rank, where, waits=place.waits) if where else None)
    return True


def _progress(report: ProgressReport) -> ProgressStatus:
    step, metrics = _whole(report.step), report.metrics or {}
    found = {clean(name[:64]): value for name, value in list(metrics.items())[:MAX_METRICS]}
    finite = {name: _finite(value) for name, value in found.items()}
    lost = {name: _not_finite(value, step or 0) for name, value in found.items()}
    return ProgressStatus(
        step=step,
        total_steps=_whole(report.total_steps),
        epoch=_whole(report.epoch),
        total_epochs=_whole(report.total_epochs),
        samples_per_s=report.samples_per_s,
        metrics={name: value for name, value in finite.items() if value is not None},
        not_finite={name: item for name, item in lost.items() if item is not None},
    )


def _not_finite(value: object, step: int) -> NotFiniteMetric | None:
    """A metric that a rank reports as not finite; None for anything else."""
    if isinstance(value, float) and not math.isfinite(value):
        return NotFiniteMetric("NaN" if math.isnan(value) else "inf" if value > 0 else "-inf", step)
    found = WIRE.decode(NotFiniteValue, value)
    if found.value not in NOT_FINITE_VALUES:
        return None
    since = _whole(found.since_step)
    return NotFiniteMetric(found.value, step if since is None else min(since, step))


def _whole(value: int | None) -> int | None:
    return value if is_whole(value) else None


def _finite(value: object) -> float | None:
    """The value if it is a number that JSON can represent; None for anything else, such as a huge integer."""
    if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
        return None
    return float(value)


def _short(text: str | None) -> str:
    return clean((text or "")[:MAX_TEXT])
