"""What a pass has to tell a person: an event for each interruption, scaling, change of phase, and for bounds amiss."""

from __future__ import annotations

from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase
from elasticctl_controller.core.actions import Event

MAX_EVENTS = 10  # of interruptions per pass: the loss of a whole rack is one piece of news
NORMAL, WARNING = "Normal", "Warning"


def events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Return the events that tell `new` from `old`."""
    return (*_interruptions(old, new), *_scalings(old, new), *_phase(old, new))


def contradictions(job: ElasticJob) -> tuple[Event, ...]:
    """Bounds that do not go together, told once of each edit of the job: of servers without CEL nobody else has."""
    if not job.contradiction or job.status.observed_generation == job.generation:
        return ()
    message = f"{job.contradiction} do not go together: taken for {job.bounds} workers, {job.desired} of them wanted"
    return (Event(WARNING, "ContradictoryBounds", message),)


def _interruptions(old: JobStatus, new: JobStatus) -> list[Event]:
    known = {(item.uid, item.cause) for item in old.interruptions}  # a cause may be found out later
    fresh = [item for item in new.interruptions if (item.uid, item.cause) not in known]
    told = []
    for item in fresh[:MAX_EVENTS]:
        details = [f"exit code {item.exit_code}" if item.exit_code is not None else "", item.message]
        message = ": ".join(part for part in (f"lost worker {item.worker}", *details) if part)
        told.append(Event(WARNING, item.cause.value if item.cause else "Lost", message))
    if len(fresh) > MAX_EVENTS:
        told.append(Event(WARNING, "WorkersLost", f"lost {len(fresh) - MAX_EVENTS} more workers"))
    return told


def _scalings(old: JobStatus, new: JobStatus) -> list[Event]:
    if not new.scalings or (old.scalings and old.scalings[-1].at == new.scalings[-1].at):
        return []
    last = new.scalings[-1]
    by = f" by {last.by}" if last.by else ""
    why = f": {last.message}" if last.message else ""
    return [Event(NORMAL, "Scaled", f"scaled from {last.from_workers} to {last.to_workers} workers{by}{why}")]


def _phase(old: JobStatus, new: JobStatus) -> list[Event]:
    if old.phase is new.phase and old.conditions:
        return []
    kind = WARNING if new.phase in (Phase.FAILED, Phase.RESTARTING) else NORMAL
    return [Event(kind, f"ElasticJob{new.phase.value}", new.message)]
