"""What people are notified of when a job's status changes: notifications for webhooks, and Kubernetes events.

There are fewer notifications than events: a job starts, is interrupted, recovers, waits for long, or ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.goal import pool_words
from elasticctl.api.observed.history import not_finite_text, reports_steps
from elasticctl.api.observed.workers import WITHOUT_EVENTS
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import ConditionType, Interruption, JobStatus, Phase
from elasticctl.api.text import plural, shorten, span, times
from elasticctl_controller.core.actions import Event
from elasticctl_controller.core.phase import find_condition

WAITING = (Phase.PENDING, Phase.RESTARTING)
LASTING_STEPS = 3
MAX_EVENTS = 10  # of interruptions per pass: the loss of a whole rack is reported as one event
NORMAL, WARNING = "Normal", "Warning"


class NotificationKind(StrEnum):
    """What has happened."""

    STARTED = "started"
    INTERRUPTED = "interrupted"
    RECOVERED = "recovered"
    WAITS = "waits"
    NOT_FINITE = "not-finite"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"


_ENDS = {
    Phase.FAILED: NotificationKind.FAILED,
    Phase.SUCCEEDED: NotificationKind.SUCCEEDED,
    Phase.CANCELLED: NotificationKind.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Notification:
    """One notification about a job; `text` follows its name, `at` is seconds since the epoch, `more` is JSON."""

    kind: NotificationKind
    namespace: str
    job: str
    uid: str
    at: float
    text: str
    phase: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """`namespace/job`."""
        return f"{self.namespace}/{self.job}"

    def as_data(self) -> dict[str, Any]:
        """The notification as JSON."""
        return {
            "event": self.kind.value,
            "namespace": self.namespace,
            "job": self.job,
            "uid": self.uid,
            "at": to_rfc3339(self.at),
            "phase": self.phase,
            "message": self.text,
            **self.more,
        }


def list_notifications(job: ElasticJob, new: JobStatus, now: float) -> tuple[Notification, ...]:
    """The notifications that the status `new` gives rise to; `job` holds the status before it."""
    old = job.status
    contents = [
        _started(old, new),
        _interrupted(old, new),
        _recovered(old, new),
        _not_finite(old, new),
        _ended(old, new),
    ]
    return tuple(_build(job, new, now, *content) for content in contents if content is not None)


def build_waiting_notification(job: ElasticJob, status: JobStatus, waited_s: float, now: float) -> Notification:
    """The notification that a job has not had enough workers for `waited_s`."""
    text = f"has been waiting for {span(waited_s)}: {shorten(status.message) or status.phase.value}"
    return _build(job, status, now, NotificationKind.WAITS, text, {"waitedSeconds": round(waited_s)})


_Content = tuple[NotificationKind, str, Mapping[str, Any]]


def _build(
    job: ElasticJob, status: JobStatus, now: float, kind: NotificationKind, text: str, more: Mapping[str, Any]
) -> Notification:
    workers = {"activeWorkers": status.active, "desiredWorkers": status.desired}
    step = {} if status.progress.step is None else {"step": status.progress.step}
    return Notification(
        kind, job.namespace, job.name, job.uid, now, text, status.phase.value, {**workers, **step, **more}
    )


def _started(old: JobStatus, new: JobStatus) -> _Content | None:
    if new.phase is not Phase.RUNNING or old.phase not in (Phase.PENDING, Phase.SUSPENDED):
        return None
    verb = "resumed" if old.generations else "started"
    return NotificationKind.STARTED, f"{verb} with {plural(new.active, 'worker')}", {}


def _interrupted(old: JobStatus, new: JobStatus) -> _Content | None:
    known = set(map(_identity, old.interruptions))
    fresh = [item for item in new.interruptions if _identity(item) not in known]
    if not fresh:
        return None
    causes = Counter(_cause(item) for item in fresh)
    data = {"lostWorkers": [item.worker for item in fresh if item.uid][:20], "causes": dict(causes)}
    if len(fresh) == 1:
        why = f": {shorten(fresh[0].message)}" if fresh[0].message else ""
        return NotificationKind.INTERRUPTED, f"{_what(fresh[0])} ({_cause(fresh[0])}{why})", data
    by_cause = ", ".join(f"{cause} {times(count)}" for cause, count in causes.most_common())
    lost = sum(bool(item.uid) for item in fresh)
    what = f"lost {lost} workers" if lost == len(fresh) else f"was interrupted {times(len(fresh))}"
    return NotificationKind.INTERRUPTED, f"{what} ({by_cause})", data


def _recovered(old: JobStatus, new: JobStatus) -> _Content | None:
    before = {_identity(item) for item in old.interruptions if item.recovered_at is not None}
    recovered = [item for item in new.interruptions if item.recovered_at is not None and _identity(item) not in before]
    if recovered:
        took_s = max(item.recovery_s or 0.0 for item in recovered)
        data: dict[str, Any] = {"recoverySeconds": round(took_s, 3)}
        if not reports_steps(new):
            members = len(new.generations[-1].workers) if new.generations else new.active
            text = f"formed its group again {took_s:.1f} s after the loss, with {plural(members, 'worker')}"
            return NotificationKind.RECOVERED, text, data
        known = [item.steps_redone for item in recovered if item.steps_redone is not None]
        redone = f", {plural(max(known), 'step')} repeated" if known else ""
        data |= {"stepsRedone": max(known)} if known else {}
        return NotificationKind.RECOVERED, f"recovered {took_s:.1f} s after the loss{redone}", data
    if old.phase is Phase.RESTARTING and new.phase is Phase.RUNNING and new.progress.step is None:
        return NotificationKind.RECOVERED, f"runs again with {plural(new.active, 'worker')}", {}
    return None


def _not_finite(old: JobStatus, new: JobStatus) -> _Content | None:
    fresh = _lasting(new) - _lasting(old)
    if not fresh:
        return None
    data = {name: new.progress.not_finite[name].step for name, _ in sorted(fresh)}
    return NotificationKind.NOT_FINITE, f"diverges: {not_finite_text(new)}", {"notFiniteSinceStep": data}


def _lasting(status: JobStatus) -> set[tuple[str, int]]:
    """The metrics that have not been numbers for some steps: with mixed precision, single ones often overflow."""
    progress = status.progress
    return {
        (name, item.step)
        for name, item in progress.not_finite.items()
        if status.phase.terminal or (progress.step or 0) - item.step >= LASTING_STEPS
    }


def _ended(old: JobStatus, new: JobStatus) -> _Content | None:
    kind = _ENDS.get(new.phase)
    if kind is None or old.phase is new.phase:
        return None
    took = (
        ""
        if new.start_time is None or new.completion_time is None
        else f" after {span(new.completion_time - new.start_time)}"
    )
    step = "" if new.progress.step is None else f", at step {new.progress.step}"
    why = f": {shorten(new.message)}" if kind is NotificationKind.FAILED and new.message else ""
    return kind, f"{kind.value}{took}{step}{why}", {"restarts": dict(new.restarts)}


def _identity(item: Interruption) -> tuple[str, Any]:
    """What identifies an interruption: the worker that was lost or, if it stayed and its ranks failed, when they
    did."""
    return item.uid, None if item.uid else (item.generation, item.at)


def _what(item: Interruption) -> str:
    return f"lost {item.worker}" if item.uid else f"the ranks of {item.worker} failed, and start again"


def _cause(item: Interruption) -> str:
    return item.cause.value if item.cause else "Lost"


def list_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Return the events for the change from `old` to `new`."""
    changes = (_interruptions, _scalings, _divergences, _phase_changes, _waits, _pool_changes)
    return tuple(event for list_changes in changes for event in list_changes(old, new))


def list_contradictions(job: ElasticJob) -> tuple[Event, ...]:
    """An event about contradictory bounds, once per edit: a job may be older than the rule that forbids them."""
    if not job.contradiction or job.status.observed_generation == job.generation:
        return ()
    message = (
        f"{job.contradiction} contradict each other: the job gets {job.bounds} workers, {job.desired} of them wanted"
    )
    return (Event(WARNING, "ContradictoryBounds", message),)


def _interruptions(old: JobStatus, new: JobStatus) -> list[Event]:
    known = {(_identity(item), item.cause) for item in old.interruptions}  # a cause may be corrected later
    fresh = [item for item in new.interruptions if (_identity(item), item.cause) not in known]
    events = []
    for item in fresh[:MAX_EVENTS]:
        details = [f"exit code {item.exit_code}" if item.exit_code is not None else "", item.message]
        what = f"lost worker {item.worker}" if item.uid else _what(item)
        message = ": ".join(part for part in (what, *details) if part)
        events.append(Event(WARNING, item.cause.value if item.cause else "Lost", message, item.worker))
    if len(fresh) > MAX_EVENTS:
        events.append(Event(WARNING, "WorkersLost", f"lost {len(fresh) - MAX_EVENTS} more workers"))
    return events


def _scalings(old: JobStatus, new: JobStatus) -> list[Event]:
    if not new.scalings or (old.scalings and old.scalings[-1].at == new.scalings[-1].at):
        return []
    last = new.scalings[-1]
    by = f" by {last.by}" if last.by else ""
    why = f": {last.message}" if last.message else ""
    return [Event(NORMAL, "Scaled", f"scaled from {last.from_workers} to {last.to_workers} workers{by}{why}")]


def _divergences(old: JobStatus, new: JobStatus) -> list[Event]:
    found = _not_finite(old, new)
    return [] if found is None else [Event(WARNING, "NotFinite", found[1])]


def _phase_changes(old: JobStatus, new: JobStatus) -> list[Event]:
    if old.phase is new.phase and old.conditions:
        return []
    kind = WARNING if new.phase in (Phase.FAILED, Phase.RESTARTING) else NORMAL
    return [Event(kind, f"ElasticJob{new.phase.value}", new.message)]


def _waits(old: JobStatus, new: JobStatus) -> list[Event]:
    """An event for what workers wait for, if Kubernetes records none about a pod."""
    found = find_condition(new.conditions, ConditionType.WORKERS_WAITING)
    if found is None or found.status != "True" or found.reason not in WITHOUT_EVENTS or found in old.conditions:
        return []
    return [Event(WARNING, found.reason, found.message)]


def _pool_changes(old: JobStatus, new: JobStatus) -> list[Event]:
    """Workers that have given up a pool, and workers that have gone back to a better one."""
    if old.pools is None or new.pools is None:
        return []
    before, after = ({one.name: one.at for one in pools.seen} for pools in (old.pools, new.pools))
    given_up = [name for name, at in after.items() if before.get(name) != at]
    tried = old.pools.pool if old.pools.trying is not None else ""
    if tried:
        back = new.pools.trying is None and new.pools.back_to != tried and tried not in after
        there = any(worker.pool == tried and worker.node and not worker.removal for worker in new.workers)
        message = f"workers have gone back to {pool_words(tried)}"
        return [Event(NORMAL, "PoolRegained", message)] if back and there else []
    asks = pool_words(new.pools.pool)
    return [
        Event(NORMAL, "PoolGivenUp", f"no machine of {pool_words(name)} came in time; asks for {asks}")
        for name in given_up
    ]
