"""The events of a job in chronological order, from its status and its pods' events.

An entry never changes (the end of something is an entry of its own), so a reader needs only the new ones. There is one
exception: the loss of an unresponsive worker appears again once its node turns out to be lost. `fold_repeated` is for
readers that see the timeline once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elasticctl.api.codec import Manifest, from_rfc3339
from elasticctl.api.objects import at
from elasticctl.api.observed.changes import Change
from elasticctl.api.observed.history import reports_steps
from elasticctl.api.observed.pod_events import seen_at
from elasticctl.api.observed.workers import WITHOUT_EVENTS
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Condition, ConditionType, GroupGeneration, Interruption, Scaling
from elasticctl.api.text import plural, span, times

_LAST_LINE_CHARS = 200
NOTIFY_FAILED = "NotifyFailed"
"""The reason of the event about a notification that could not be delivered."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One event: when (seconds since the epoch), what happened in a word or two, to which worker, and details."""

    at: float
    what: str
    about: str
    details: str = ""


def timeline(job: ElasticJob, events: Iterable[Manifest] = (), changes: Iterable[Change] = ()) -> list[TimelineEntry]:
    """All events known from the job's status, its pods' events and the records of its changes, oldest first.

    A status keeps only the latest interruptions, scalings and generations, and only the newest checkpoint.
    """
    status = job.status
    entries = [
        *_entry_at(job.created_at, "created", job.name, f"{plural(job.desired, 'worker')} wanted ({job.bounds})"),
        *(entry for item in status.conditions for entry in _condition(job, item)),
        *(entry for item in status.generations for entry in _generation(item)),
        *(entry for item in status.interruptions for entry in _interruption(item, reports_steps(status))),
        *(entry for item in status.scalings for entry in _scaling(job, item)),
        *_checkpoint(job),
        *(entry for event in events for entry in _event(event)),
        *(entry for change in changes for entry in _change(job, change)),
    ]
    return sorted(entries, key=lambda entry: entry.at)


def fold_repeated(
    entries: Iterable[TimelineEntry], events: Iterable[Manifest], *, counted: bool = True
) -> list[TimelineEntry]:
    """Merge equal warnings about pods into one entry, at the time of the first.

    With `counted`, the entry gives their number, the number of workers and the time between first and last, and so
    changes with the next warning.
    """
    warnings = _count_warnings(events)
    alike: dict[tuple[str, str], list[TimelineEntry]] = {}
    for entry in entries:
        alike.setdefault((entry.what, entry.details), []).append(entry)
    folded: list[TimelineEntry] = []
    for key, equal in alike.items():
        count, last = warnings.get(key, (0, 0.0))
        if not count:
            folded += equal
        elif counted and count > 1:
            about = equal[0].about
            workers = len({entry.about for entry in equal})
            whole = f"{key[1]} ({times(count)} in {span(last - equal[0].at)})"
            folded.append(
                TimelineEntry(equal[0].at, key[0], plural(workers, "worker") if workers > 1 else about, whole)
            )
        else:
            folded.append(equal[0])
    return sorted(folded, key=lambda entry: entry.at)


def _count_warnings(events: Iterable[Manifest]) -> dict[tuple[str, str], tuple[int, float]]:
    """`what` and `details` of each warning about pods -> how often it occurred, and when last."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for event in events:
        if at(event, "type") != "Warning":
            continue
        number = at(event, "series", "count") or at(event, "count")
        for entry in _event(event):
            count, until = found.get((entry.what, entry.details), (0, entry.at))
            more = number if isinstance(number, int) and number > 0 else 1
            found[(entry.what, entry.details)] = (count + more, max(until, seen_at(event) or entry.at))
    return found


def _entry_at(moment: float | None, what: str, about: str, details: str = "") -> Iterator[TimelineEntry]:
    if moment is not None:
        yield TimelineEntry(moment, what, about, details)


def _condition(job: ElasticJob, item: Condition) -> Iterator[TimelineEntry]:
    if item.type == "Created" or (item.status != "True" and item.type != "Suspended"):
        return  # its creation time and its current condition say it already
    if item.type == ConditionType.WORKERS_WAITING:
        if item.reason in WITHOUT_EVENTS:  # otherwise Kubernetes' own events say it
            yield from _entry_at(item.last_transition_time, item.reason, job.name, item.message)
        return
    word = item.type.lower() if item.status == "True" else "resumed"
    yield from _entry_at(item.last_transition_time, word, job.name, item.message)


SOURCES = {
    "memory": ", which ranks still had in memory",
    "copies": ", from copies in workers' memory",
    "storage": ", from storage",
}


def _generation(item: GroupGeneration) -> Iterator[TimelineEntry]:
    about = f"generation {item.generation}"
    yield from _entry_at(item.formed_at, "group formed", about, f"{plural(len(item.workers), 'worker')}: {item.reason}")
    source = SOURCES.get(item.resumed_from, "") + (f" ({item.resumed_because})" if item.resumed_because else "")
    details = "" if item.resumed_step is None else f"from step {item.resumed_step}{source}"
    yield from _entry_at(item.first_step_at, "first step", about, details)


def _interruption(item: Interruption, reports: bool) -> Iterator[TimelineEntry]:
    cause = item.cause.value if item.cause else "lost"
    code = "" if item.exit_code is None else f"exit code {item.exit_code}"
    said = ": ".join(part for part in (cause, code, item.message[:_LAST_LINE_CHARS]) if part)
    yield from _entry_at(item.at, "interruption" if item.uid else "ranks failed", item.worker, said)
    cost = "" if item.recovery_s is None else f"after {span(item.recovery_s)}"
    if item.steps_redone is not None:
        cost = ", ".join(part for part in (cost, f"{plural(item.steps_redone, 'step')} done again") if part)
    yield from _entry_at(item.recovered_at, "recovered" if reports else "formed again", item.worker, cost)


def _scaling(job: ElasticJob, item: Scaling) -> Iterator[TimelineEntry]:
    change = f"{item.from_workers} -> {item.to_workers} workers"
    wish = f", by {item.by}" if item.by else ""
    why = f": {item.message}" if item.message else ""
    yield from _entry_at(item.at, "scaling", job.name, f"{change}{wish}{why}")
    took = "" if item.recovery_s is None else f"{plural(item.to_workers, 'worker')} after {span(item.recovery_s)}"
    yield from _entry_at(item.done_at, "scaled", job.name, took)


def _checkpoint(job: ElasticJob) -> Iterator[TimelineEntry]:
    item = job.status.checkpoint
    if item.step is None:
        return
    took = "" if item.duration_s is None else f", in {span(item.duration_s)}"
    yield from _entry_at(item.at, "checkpoint", f"step {item.step}", f"number {item.committed}{took}")


def _change(job: ElasticJob, item: Change) -> Iterator[TimelineEntry]:
    said = f": {item.words}" if item.words else ""
    yield from _entry_at(item.at, item.verb or "change", job.name, f"by {item.by} with {item.client}{said}")


def _event(event: Manifest) -> Iterator[TimelineEntry]:
    """The entry of a cluster's event about a pod. The status contains all of the controller's events but one."""
    if at(event, "involvedObject", "kind") != "Pod" and at(event, "reason") != NOTIFY_FAILED:
        return
    moment = from_rfc3339(at(event, "firstTimestamp")) or from_rfc3339(at(event, "eventTime"))
    about, message = str(at(event, "involvedObject", "name")), str(at(event, "message") or "")
    yield from _entry_at(moment, str(at(event, "reason")), about, " ".join(message.split()))
