"""The disturbances of a job: interruptions, scalings and its last failure, one by one and in total.

`now` is in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from elasticctl.api.codec import from_json
from elasticctl.api.objects import as_text
from elasticctl.api.observed.changes import Change
from elasticctl.api.observed.cost import Cost, cost
from elasticctl.api.observed.history import Goodput, goodput, knows_groups, reports_steps, unplanned_ends, waited_s
from elasticctl.api.observed.plan_text import step_words
from elasticctl.api.observed.timeline import TimelineEntry
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Interruption, JobStatus, Scaling, ScalingPhase
from elasticctl.api.text import dollars, plural, shorten, span
from elasticctl.cli.framework.output import Table, joined
from elasticctl.operations.prices import region_and_date


def causes(status: JobStatus) -> str:
    """`NodeLost 1  Preempted 2`: the workers that ended unexpectedly, by cause."""
    return joined(f"{cause} {count}" for cause, count in sorted(unplanned_ends(status).items()))


def history_table(job: ElasticJob, changes: Sequence[Change] = ()) -> Table:
    """The interruptions and scalings of a job, and the changes by users, in chronological order."""
    rows = [
        (item.at, _kind(item), item.worker, _cause(item), _seconds(item.recovery_s), _count(item.steps_redone))
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
    plan = job.status.plan
    rows += [(step.at, "plan", step_words(step), step.message, "", "") for step in (plan.steps if plan else ())]
    rows += [(item.at, item.verb, item.words, f"{item.by}, {item.client}", "", "") for item in changes]
    table = [(clock(at), *cells) for at, *cells in sorted(rows, key=lambda row: row[0] or 0.0)]
    return Table(("AT", "WHAT", "WORKER", "CAUSE", "RECOVERED IN", "REDONE"), table, spare=("WHAT",), cut="CAUSE")


def audit_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each line of a record of changes, whatever it contains."""
    rows = []
    for line in lines:
        change, name = from_json(Change, line), as_text(line.get("name"))
        place = "/".join(filter(None, (as_text(line.get("context")), as_text(line.get("namespace")))))
        outcome = "" if line.get("outcome") == "done" else as_text(line.get("outcome"))
        who = f"{change.by}, {change.client}"
        rows.append((clock(change.at), change.verb, name, place, who, joined((change.words, outcome))))
    return Table(("AT", "WHAT", "NAME", "PLACE", "WHO", "DETAILS"), rows, wraps=True)


def events_table(entries: Sequence[TimelineEntry]) -> Table:
    """A row for each event."""
    rows = [(clock(entry.at), entry.what, entry.about, entry.details) for entry in entries]
    return Table(("AT", "WHAT", "ABOUT", "DETAILS"), rows, wraps=True)


def interruptions(status: JobStatus) -> list[str]:
    """One line per interruption: when, which worker, why, and its cost."""
    back = "training again" if reports_steps(status) else "group formed again"
    return [
        joined(
            (
                clock(item.at),
                item.worker,
                item.cause or "",
                f"{back} after {span(item.recovery_s)}" if item.recovery_s is not None else _open_end(status),
                f"{plural(item.steps_redone, 'step')} done again" if item.steps_redone is not None else "",
            )
        )
        for item in status.interruptions
    ]


def scalings(status: JobStatus) -> list[str]:
    """One line per scaling: when, from and to which number of workers, requested by whom, and how long it took."""
    done = "training" if reports_steps(status) else "group formed"
    return [
        joined(
            (
                clock(item.at),
                f"{item.from_workers} -> {item.to_workers} workers",
                f"by {_requester(item)}" if item.by else "",
                f"{done} after {span(item.recovery_s)}" if item.recovery_s is not None else _unfinished(item),
            )
        )
        for item in status.scalings
    ]


def _kind(item: Interruption) -> str:
    """Whether a worker was lost, or stayed and restarted its ranks."""
    return "interruption" if item.uid else "ranks failed"


def _cause(item: Interruption) -> str:
    """The cause of an interruption, with its message if the script failed; other messages only repeat the cause."""
    has_own_cause = not item.uid or (item.cause is not None and item.cause.counted)
    return ": ".join(filter(None, (item.cause or "", shorten(item.message) if has_own_cause else "")))


def _requester(item: Scaling) -> str:
    """Who requested a scaling, and why."""
    return f"{item.by}: {item.message}" if item.message else item.by


def _unfinished(item: Scaling) -> str:
    """`in progress` or `superseded`; "" for a scaling that is done."""
    words = {ScalingPhase.IN_PROGRESS: "in progress", ScalingPhase.SUPERSEDED: "superseded"}
    return words.get(item.phase, "") if item.phase is not None else ""


def failure_lines(status: JobStatus) -> list[str]:
    """The rank that failed last, and the last lines it printed."""
    failure = status.newest_failure
    if failure is None:
        return []
    rank = "" if failure.rank is None else f"rank {failure.rank} of "
    code = "" if failure.exit_code is None else f"exit code {failure.exit_code}"
    end = "" if failure.is_hang else failure.signal or code
    head = f"{rank}{failure.worker or 'a worker'}: " + (
        ", ".join(part for part in (end, failure.error) if part) or "failed"
    )
    return [head, *(f"  {line}" for line in failure.last_lines)]


def clock(at: float | None) -> str:
    """A time in the reader's time zone."""
    return "" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


@dataclass(frozen=True, slots=True)
class Totals:
    """`interruptions` and `steps_redone` cover the job's whole life, the others what its status still lists.

    `recovery_s` is from losses to the next step, or to the next group of a script that has reported no step;
    `scaling_s` is from scalings until that many workers trained. Overlapping times count once. `steps_redone` is None
    if unknown. Both costs, as run and on demand, are estimates.
    """

    interruptions: int
    scalings: int
    recovery_s: float
    scaling_s: float
    steps_redone: int | None
    goodput_share: float | None = None
    wall_s: float | None = None
    cost_usd: float | None = None
    on_demand_usd: float | None = None


def totals(job: ElasticJob, now: float) -> Totals:
    """Add up the disturbances of a job; `now` is in seconds since the epoch."""
    status = job.status
    part, spent = goodput(status, now), cost(job, now)
    return Totals(
        interruptions=sum(unplanned_ends(status).values()),
        scalings=len(status.scalings),
        recovery_s=waited_s(status.interruptions) or 0.0,
        scaling_s=waited_s(status.scalings) or 0.0,
        steps_redone=status.steps_redone,
        goodput_share=part.share if part else None,
        wall_s=part.wall_s if part else None,
        cost_usd=round(spent.spent, 4) if spent else None,
        on_demand_usd=round(spent.on_demand, 4) if spent else None,
    )


def totals_lines(job: ElasticJob, now: float) -> Iterator[str]:
    """A line about the disturbances, and one each about goodput and cost, if known."""
    found = totals(job, now)
    if not found.interruptions and not found.scalings:
        yield f"{job.name}: no interruptions, no scalings"
    else:
        what = plural(found.interruptions, "interruption") + _still_open(job.status)
        yield f"{what}, {plural(found.scalings, 'scaling')}{_going_on(job.status)}{_lost(job.status, found)}"
    part = goodput(job.status, now)
    if part is not None:
        yield goodput_line(part)
    spent = cost(job, now)
    if spent is not None:
        yield saved_line(spent)


def _lost(status: JobStatus, found: Totals) -> str:
    """`: 12s until training went on, 3 steps done again`, as far as known."""
    if not knows_groups(status):
        return ""  # it brings its own rendezvous
    back = "training went on" if reports_steps(status) else "a group had formed again"
    redone = "an unknown number of steps" if found.steps_redone is None else plural(found.steps_redone, "step")
    took_s = waited_s((*status.interruptions, *status.scalings))
    took = "" if took_s is None else f"{span(took_s)} until {back}, "
    return f": {took}{redone} done again"


def _open_end(status: JobStatus) -> str:
    """A remark on a loss without a known recovery; "" if none could ever be known."""
    if not knows_groups(status):
        return ""
    return "never recovered" if status.phase.terminal else "not yet recovered"


def _still_open(status: JobStatus) -> str:
    """` (1 not yet recovered from)`, whose seconds are missing from the sum."""
    still_open = sum(item.recovery_s is None for item in status.interruptions)
    when = "never" if status.phase.terminal else "not yet"
    return f" ({still_open} {when} recovered from)" if still_open and knows_groups(status) else ""


def _going_on(status: JobStatus) -> str:
    """` (1 in progress)`, likewise."""
    going_on = sum(item.phase is ScalingPhase.IN_PROGRESS for item in status.scalings)
    return f" ({going_on} in progress)" if going_on and not status.phase.terminal and knows_groups(status) else ""


def goodput_line(part: Goodput) -> str:
    """`training moved forward 94.2 % of 1h02m (goodput)`."""
    since = "" if part.whole else ", the groups that are still known"
    return f"training moved forward {100 * part.share:.1f} % of {span(part.wall_s)}{since} (goodput)"


def _seconds(value: float | None) -> str:
    return "" if value is None else span(value)


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def cost_text(job: ElasticJob, now: float) -> str:
    """The cost of a job so far, and what it would have been on demand; "" if no price is known."""
    found = cost(job, now)
    if found is None:
        return ""
    against = f"; on demand it would be {dollars(found.on_demand)}" if found.saved > 0 else ""
    return f"about {dollars(found.spent)} so far{against} ({_basis(found)})"


def saved_line(found: Cost) -> str:
    """`spot saved about $2.87 of $4.10 (…)`, or the cost if there was no spot capacity."""
    if found.saved > 0:
        return f"spot saved about {dollars(found.saved)} of {dollars(found.on_demand)} ({_basis(found)})"
    return f"it cost about {dollars(found.spent)} ({_basis(found)})"


def _basis(found: Cost) -> str:
    spot = f", spot at {found.rate.prices.spot_share:.0%} of them" if found.saved > 0 else ""
    if not found.rate.prices.region:  # prices that the job's goal says
        dated = f", {found.rate.prices.date}" if found.rate.prices.date else ""
        return f"prices: {found.rate.instances[0]}{dated}"
    return f"{found.rate.instances[0]} at list prices of {region_and_date(found.rate)}{spot}"
