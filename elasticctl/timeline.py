"""What happened to a job, in order of time, from its status and its pods' events. Pure.

An entry never changes once it is told (what ends later is an entry of its own), so that a reader can be told only what
is new. But for one: the loss of a worker that did not answer is told again when its node is found lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elasticctl.codec import Manifest, from_rfc3339
from elasticctl.podtemplate import at
from elasticctl.spec import ElasticJob
from elasticctl.status import Condition, Generation, Interruption, Scaling
from elasticctl.wording import counted, span

_LAST_LINE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened: when (seconds since the epoch), what in a word or two, to whom, and the rest."""

    at: float
    what: str
    about: str
    details: str = ""


def timeline(job: ElasticJob, events: Iterable[Manifest] = ()) -> list[Entry]:
    """Everything that the job's status and its pods' events tell, in order of time.

    Of interruptions, scalings and generations a status keeps the last ones only, and of checkpoints the newest.
    """
    status = job.status
    entries = [
        *_of(job.created_at, "created", job.name, f"{counted(job.desired, 'worker')} wanted ({job.bounds})"),
        *(entry for item in status.conditions for entry in _condition(job, item)),
        *(entry for item in status.generations for entry in _generation(item)),
        *(entry for item in status.interruptions for entry in _interruption(item)),
        *(entry for item in status.scalings for entry in _scaling(job, item)),
        *_checkpoint(job),
        *(entry for event in events for entry in _event(event)),
    ]
    return sorted(entries, key=lambda entry: entry.at)


def _of(moment: float | None, what: str, about: str, details: str = "") -> Iterator[Entry]:
    if moment is not None:
        yield Entry(moment, what, about, details)


def _condition(job: ElasticJob, item: Condition) -> Iterator[Entry]:
    if item.type == "Created" or (item.status != "True" and item.type != "Suspended"):
        return  # told otherwise: by its creation, and by what it is now
    word = item.type.lower() if item.status == "True" else "resumed"
    yield from _of(item.last_transition_time, word, job.name, item.message)


def _generation(item: Generation) -> Iterator[Entry]:
    about = f"generation {item.generation}"
    yield from _of(item.formed_at, "group formed", about, f"{counted(len(item.workers), 'worker')}: {item.reason}")
    behind = "" if item.resumed_step is None else f"from step {item.resumed_step}"
    yield from _of(item.first_step_at, "first step", about, behind)


def _interruption(item: Interruption) -> Iterator[Entry]:
    cause = item.cause.value if item.cause else "lost"
    code = "" if item.exit_code is None else f"exit code {item.exit_code}"
    said = ": ".join(part for part in (cause, code, item.message[:_LAST_LINE_CHARS]) if part)
    yield from _of(item.at, "interruption", item.worker, said)
    cost = "" if item.recovery_s is None else f"after {span(item.recovery_s)}"
    if item.steps_redone is not None:
        cost = ", ".join(part for part in (cost, f"{counted(item.steps_redone, 'step')} done again") if part)
    yield from _of(item.recovered_at, "recovered", item.worker, cost)


def _scaling(job: ElasticJob, item: Scaling) -> Iterator[Entry]:
    change = f"{item.from_workers} -> {item.to_workers} workers"
    wish = f", by {item.by}" if item.by else ""
    why = f": {item.message}" if item.message else ""
    yield from _of(item.at, "scaling", job.name, f"{change}{wish}{why}")
    took = "" if item.recovery_s is None else f"{counted(item.to_workers, 'worker')} after {span(item.recovery_s)}"
    yield from _of(item.done_at, "scaled", job.name, took)


def _checkpoint(job: ElasticJob) -> Iterator[Entry]:
    item = job.status.checkpoint
    if item.step is None:
        return
    took = "" if item.duration_s is None else f", in {span(item.duration_s)}"
    yield from _of(item.at, "checkpoint", f"step {item.step}", f"number {item.committed}{took}")


def _event(event: Manifest) -> Iterator[Entry]:
    """What the cluster says about pods; what the controller says about the job is in the status already."""
    if at(event, "involvedObject", "kind") != "Pod":
        return
    moment = from_rfc3339(at(event, "firstTimestamp")) or from_rfc3339(at(event, "eventTime"))
    about, message = str(at(event, "involvedObject", "name")), str(at(event, "message") or "")
    yield from _of(moment, str(at(event, "reason")), about, " ".join(message.split()))
