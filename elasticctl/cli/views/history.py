"""What disturbed a job: interruptions, scalings and its first failure, one by one and in total.

`now` is in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from elasticctl.api.cost import cost
from elasticctl.api.history import Goodput, TimelineEntry, goodput
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Cause, JobStatus, Scaling, ScalingPhase
from elasticctl.api.text import plural, span
from elasticctl.cli.framework.output import Table, joined
from elasticctl.cli.views.cost import saved_line

_PLANNED = (Cause.SCALED_IN, Cause.COMPLETED)


def causes(status: JobStatus) -> str:
    """`NodeLost 1  Preempted 2`: the workers that ended otherwise than as planned."""
    return joined(f"{cause} {count}" for cause, count in _restarts(status))


def restarts(status: JobStatus) -> int:
    """How many workers ended otherwise than as planned."""
    return sum(count for _, count in _restarts(status))


def _restarts(status: JobStatus) -> list[tuple[str, int]]:
    return sorted((cause, count) for cause, count in status.restarts.items() if count and cause not in _PLANNED)


def history_table(job: ElasticJob) -> Table:
    """The interruptions and scalings of a job in order of time."""
    rows = [
        (item.at, "interruption", item.worker, item.cause or "", _seconds(item.recovery_s), _count(item.steps_redone))
        for item in job.status.interruptions
    ]
    rows += [
        (
            item.at,
            "scaling",
            f"{item.from_workers} -> {item.to_workers}",
            _requester(item),
            _seconds(item.recovery_s) or _unfinished(item),
            _count(item.steps_redone),
        )
        for item in job.status.scalings
    ]
    told = [(clock(at), *cells) for at, *cells in sorted(rows, key=lambda row: row[0] or 0.0)]
    return Table(("AT", "WHAT", "WORKER", "CAUSE", "RECOVERED IN", "REDONE"), told, spare=("WHAT",))


def events_table(entries: Sequence[TimelineEntry]) -> Table:
    """A row for each thing that happened."""
    rows = [(clock(entry.at), entry.what, entry.about, entry.details) for entry in entries]
    return Table(("AT", "WHAT", "ABOUT", "DETAILS"), rows, wraps=True)


def interruptions(status: JobStatus) -> list[str]:
    """Each interruption on a line: when, who, why, what it cost."""
    open_end = "never recovered" if status.phase.terminal else "not yet recovered"
    return [
        joined(
            (
                clock(item.at),
                item.worker,
                item.cause or "",
                f"training again after {span(item.recovery_s)}" if item.recovery_s is not None else open_end,
                f"{item.steps_redone} steps done again" if item.steps_redone is not None else "",
            )
        )
        for item in status.interruptions
    ]


def scalings(status: JobStatus) -> list[str]:
    """Each scaling on a line: when, from how many to how many, on whose wish, how long it took."""
    return [
        joined(
            (
                clock(item.at),
                f"{item.from_workers} -> {item.to_workers} workers",
                f"by {_requester(item)}" if item.by else "",
                f"training after {span(item.recovery_s)}" if item.recovery_s is not None else _unfinished(item),
            )
        )
        for item in status.scalings
    ]


def _requester(item: Scaling) -> str:
    """On whose wish it was, and what for."""
    return f"{item.by}: {item.message}" if item.message else item.by


def _unfinished(item: Scaling) -> str:
    """`in progress` or `superseded`; nothing of one that is done."""
    words = {ScalingPhase.IN_PROGRESS: "in progress", ScalingPhase.SUPERSEDED: "superseded"}
    return words.get(item.phase, "") if item.phase is not None else ""


def failure_lines(status: JobStatus) -> list[str]:
    """The first failing rank and the last lines it printed."""
    failure = status.first_failure
    if failure is None:
        return []
    rank = "" if failure.rank is None else f"rank {failure.rank} of "
    code = "" if failure.exit_code is None else f"exit code {failure.exit_code}"
    end = failure.signal or code
    head = f"{rank}{failure.worker or 'a worker'}: " + (
        ", ".join(part for part in (end, failure.error) if part) or "failed"
    )
    return [head, *(f"  {line}" for line in failure.last_lines)]


def clock(at: float | None) -> str:
    """A moment in the reader's own time zone."""
    return "" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


@dataclass(frozen=True, slots=True)
class Totals:
    """`interruptions` and `steps_redone` are of the job's life, the other numbers of what its status still knows.

    `recovery_s` is from each loss to the next step, added up. What it cost is an estimate, as is what it would have
    cost on demand.
    """

    interruptions: int
    scalings: int
    recovery_s: float
    steps_redone: int
    goodput_share: float | None = None
    wall_s: float | None = None
    cost_usd: float | None = None
    on_demand_usd: float | None = None


def totals(job: ElasticJob, now: float) -> Totals:
    """Add it up; `now` is seconds since the epoch."""
    status = job.status
    part, spent = goodput(status, now), cost(job, now)
    return Totals(
        interruptions=restarts(status),
        scalings=len(status.scalings),
        recovery_s=sum(item.recovery_s or 0.0 for item in status.interruptions),
        steps_redone=status.steps_redone,
        goodput_share=part.share if part else None,
        wall_s=part.wall_s if part else None,
        cost_usd=round(spent.spent, 4) if spent else None,
        on_demand_usd=round(spent.on_demand, 4) if spent else None,
    )


def totals_lines(job: ElasticJob, now: float) -> Iterator[str]:
    """A line about the disturbances, and one each about what came of the time and the money, where that is known."""
    found = totals(job, now)
    if not found.interruptions and not found.scalings:
        yield f"{job.name}: no interruptions, no scalings"
    else:
        lost = f"{span(found.recovery_s)} until training went on, {plural(found.steps_redone, 'step')} done again"
        what = plural(found.interruptions, "interruption") + _open_end(job)
        yield f"{what}, {plural(found.scalings, 'scaling')}: {lost}"
    part = goodput(job.status, now)
    if part is not None:
        yield goodput_line(part)
    spent = cost(job, now)
    if spent is not None:
        yield saved_line(spent)


def _open_end(job: ElasticJob) -> str:
    """` (1 not yet recovered from)`, so that their seconds are not missed in the sum."""
    still_open = sum(item.recovery_s is None for item in job.status.interruptions)
    when = "never" if job.status.phase.terminal else "not yet"
    return f" ({still_open} {when} recovered from)" if still_open else ""


def goodput_line(part: Goodput) -> str:
    """`training moved forward 94.2 % of 1h02m (goodput)`."""
    since = "" if part.whole else ", the groups that are still known"
    return f"training moved forward {100 * part.share:.1f} % of {span(part.wall_s)}{since} (goodput)"


def _seconds(value: float | None) -> str:
    return "" if value is None else span(value)


def _count(value: int | None) -> str:
    return "" if value is None else str(value)
