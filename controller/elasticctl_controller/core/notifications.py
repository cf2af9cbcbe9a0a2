"""What of a change of status somebody wants to be told who is not looking; pure.

Less than what becomes an event: a job starts, is disturbed, trains again, waits for long, ends.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Interruption, JobStatus, Phase
from elasticctl.api.text import counted, span, times
from elasticctl_controller.core.actions import Event

MAX_TEXT_CHARS = 300
"""Of the words of others (an error's message) in a text."""
WAITING = (Phase.PENDING, Phase.RESTARTING)


class NotificationKind(StrEnum):
    """What has happened."""

    STARTED = "started"
    INTERRUPTED = "interrupted"
    RECOVERED = "recovered"
    WAITS = "waits"
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
    """One piece of news about a job; `text` follows its name, `at` is seconds since the epoch, `more` is JSON."""

    kind: NotificationKind
    namespace: str
    job: str
    uid: str
    at: float
    text: str
    phase: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """The same for programs."""
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
    """The news that `new` is, beside the status that `job` was read with."""
    old = job.status
    found = [_started(old, new), _interrupted(old, new), _recovered(old, new), _ended(old, new)]
    return tuple(_build(job, new, now, *piece) for piece in found if piece is not None)


def build_waiting_notification(job: ElasticJob, status: JobStatus, waited_s: float, now: float) -> Notification:
    """The news that a job has not had enough workers for so long."""
    text = f"has been waiting for {span(waited_s)}: {_short(status.message) or status.phase.value}"
    return _build(job, status, now, NotificationKind.WAITS, text, {"waitedSeconds": round(waited_s)})


_Piece = tuple[NotificationKind, str, Mapping[str, Any]]


def _build(
    job: ElasticJob, status: JobStatus, now: float, kind: NotificationKind, text: str, more: Mapping[str, Any]
) -> Notification:
    workers = {"activeWorkers": status.active, "desiredWorkers": status.desired}
    step = {} if status.progress.step is None else {"step": status.progress.step}
    return Notification(
        kind, job.namespace, job.name, job.uid, now, text, status.phase.value, {**workers, **step, **more}
    )


def _started(old: JobStatus, new: JobStatus) -> _Piece | None:
    if new.phase is not Phase.RUNNING or old.phase not in (Phase.PENDING, Phase.SUSPENDED):
        return None
    verb = "goes on" if old.generations else "started"
    return NotificationKind.STARTED, f"{verb} with {counted(new.active, 'worker')}", {}


def _interrupted(old: JobStatus, new: JobStatus) -> _Piece | None:
    known = {item.uid for item in old.interruptions}
    fresh = [item for item in new.interruptions if item.uid not in known]
    if not fresh:
        return None
    causes = Counter(_cause(item) for item in fresh)
    data = {"lostWorkers": [item.worker for item in fresh][:20], "causes": dict(causes)}
    if len(fresh) == 1:
        why = f": {_short(fresh[0].message)}" if fresh[0].message else ""
        return NotificationKind.INTERRUPTED, f"lost {fresh[0].worker} ({_cause(fresh[0])}{why})", data
    by_cause = ", ".join(f"{cause} {times(count)}" for cause, count in causes.most_common())
    return NotificationKind.INTERRUPTED, f"lost {len(fresh)} workers ({by_cause})", data


def _recovered(old: JobStatus, new: JobStatus) -> _Piece | None:
    before = {item.uid for item in old.interruptions if item.recovered_at is not None}
    back = [item for item in new.interruptions if item.recovered_at is not None and item.uid not in before]
    if back:
        took_s = max(item.recovery_s or 0.0 for item in back)
        redone = max(item.steps_redone or 0 for item in back)
        text = f"trains again {took_s:.1f} s after the loss, {counted(redone, 'step')} done again"
        return NotificationKind.RECOVERED, text, {"recoverySeconds": round(took_s, 3), "stepsRedone": redone}
    if old.phase is Phase.RESTARTING and new.phase is Phase.RUNNING and new.progress.step is None:
        return NotificationKind.RECOVERED, f"runs again with {counted(new.active, 'worker')}", {}
    return None


def _ended(old: JobStatus, new: JobStatus) -> _Piece | None:
    kind = _ENDS.get(new.phase)
    if kind is None or old.phase is new.phase:
        return None
    took = "" if new.start_time is None or new.completion_time is None else _took(new.completion_time - new.start_time)
    step = "" if new.progress.step is None else f", at step {new.progress.step}"
    why = f": {_short(new.message)}" if kind is NotificationKind.FAILED and new.message else ""
    return kind, f"{kind.value}{took}{step}{why}", {"restarts": dict(new.restarts)}


def _took(seconds: float) -> str:
    return f" after {span(seconds)}"


def _cause(item: Interruption) -> str:
    return item.cause.value if item.cause else "Lost"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT_CHARS else f"{line[: MAX_TEXT_CHARS - 1]}…"


FORMAT = 1
MAX_ITEMS = 20
"""In one message; of more, their number is said."""
MAX_URL_CHARS = 2048


class WebhookError(ElasticctlError):
    """A webhook's URL cannot be had or used, or its other end did not take what was sent."""


def check_url(text: str) -> str:
    """The URL in a secret, without the blanks around it. Raises WebhookError for one that is not to be called."""
    url = text.strip()
    try:
        parts = urlsplit(url)
        host, port_is_one = parts.hostname, parts.port is None or parts.port > 0
    except ValueError:
        host, port_is_one = None, False
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL_CHARS
    if not plain or not host or not port_is_one or "@" in parts.netloc:
        raise WebhookError("it is not one URL, https://…, without user or password")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(host)):
        raise WebhookError("it is not an https:// URL (http:// is for this machine's own addresses)")
    return url


def build_message(found: Sequence[Notification], dropped: int = 0) -> bytes:
    """The message about some pieces of news, oldest first; `dropped` older ones were lost."""
    lines = [f"*{escape(item.job)}* ({escape(item.namespace)}) {escape(item.text)}" for item in found[-MAX_ITEMS:]]
    missing = dropped + max(0, len(found) - MAX_ITEMS)
    if missing:
        lines.insert(0, f"… and {missing} earlier {'change' if missing == 1 else 'changes'} of jobs")
    data = {"format": FORMAT, "events": [item.as_data() for item in found[-MAX_ITEMS:]], "omitted": missing}
    return json.dumps({"text": "\n".join(lines), "elasticctl": data}).encode()


def escape(text: str) -> str:
    """Text in which Slack finds no links and nobody to call: what a job says must not wake a whole channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


MAX_EVENTS = 10  # of interruptions per pass: the loss of a whole rack is one piece of news
NORMAL, WARNING = "Normal", "Warning"


def list_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Return the events that tell `new` from `old`."""
    return (*_interruptions(old, new), *_scalings(old, new), *_phase_changes(old, new))


def list_contradictions(job: ElasticJob) -> tuple[Event, ...]:
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


def _phase_changes(old: JobStatus, new: JobStatus) -> list[Event]:
    if old.phase is new.phase and old.conditions:
        return []
    kind = WARNING if new.phase in (Phase.FAILED, Phase.RESTARTING) else NORMAL
    return [Event(kind, f"ElasticJob{new.phase.value}", new.message)]
