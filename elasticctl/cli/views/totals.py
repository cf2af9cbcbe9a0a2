"""What a job's disturbances came to in all, as data and as a few calm lines. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elasticctl.api.cost import cost
from elasticctl.api.history import Goodput, goodput
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import counted, span
from elasticctl.cli.views.cost import saved_line
from elasticctl.cli.views.job import restarts


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
        lost = f"{span(found.recovery_s)} until training went on, {counted(found.steps_redone, 'step')} done again"
        what = counted(found.interruptions, "interruption") + _open_end(job)
        yield f"{what}, {counted(found.scalings, 'scaling')}: {lost}"
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
