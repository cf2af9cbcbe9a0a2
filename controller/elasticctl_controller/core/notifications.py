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

MAX_TEXT_CHARS = 300
"""Of the words of others (an error's message) in a text."""
WAITING = (Phase.PENDING, Phase.RESTARTING)


class Kind(StrEnum):
    """What has happened."""

    STARTED = "started"
    INTERRUPTED = "interrupted"
    RECOVERED = "recovered"
    WAITS = "waits"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"


_ENDS = {Phase.FAILED: Kind.FAILED, Phase.SUCCEEDED: Kind.SUCCEEDED, Phase.CANCELLED: Kind.CANCELLED}


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of news about a job; `text` follows its name, `at` is seconds since the epoch, `more` is JSON."""

    kind: Kind
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


def items(job: ElasticJob, new: JobStatus, now: float) -> tuple[Item, ...]:
    """The news that `new` is, beside the status that `job` was read with."""
    old = job.status
    found = [_started(old, new), _interrupted(old, new), _recovered(old, new), _ended(old, new)]
    return tuple(_item(job, new, now, *piece) for piece in found if piece is not None)


def waits(job: ElasticJob, status: JobStatus, waited_s: float, now: float) -> Item:
    """The news that a job has not had enough workers for so long."""
    text = f"has been waiting for {span(waited_s)}: {_short(status.message) or status.phase.value}"
    return _item(job, status, now, Kind.WAITS, text, {"waitedSeconds": round(waited_s)})


_Piece = tuple[Kind, str, Mapping[str, Any]]


def _item(job: ElasticJob, status: JobStatus, now: float, kind: Kind, text: str, more: Mapping[str, Any]) -> Item:
    workers = {"activeWorkers": status.active, "desiredWorkers": status.desired}
    step = {} if status.progress.step is None else {"step": status.progress.step}
    return Item(kind, job.namespace, job.name, job.uid, now, text, status.phase.value, {**workers, **step, **more})


def _started(old: JobStatus, new: JobStatus) -> _Piece | None:
    if new.phase is not Phase.RUNNING or old.phase not in (Phase.PENDING, Phase.SUSPENDED):
        return None
    verb = "goes on" if old.generations else "started"
    return Kind.STARTED, f"{verb} with {counted(new.active, 'worker')}", {}


def _interrupted(old: JobStatus, new: JobStatus) -> _Piece | None:
    known = {item.uid for item in old.interruptions}
    fresh = [item for item in new.interruptions if item.uid not in known]
    if not fresh:
        return None
    causes = Counter(_cause(item) for item in fresh)
    data = {"lostWorkers": [item.worker for item in fresh][:20], "causes": dict(causes)}
    if len(fresh) == 1:
        why = f": {_short(fresh[0].message)}" if fresh[0].message else ""
        return Kind.INTERRUPTED, f"lost {fresh[0].worker} ({_cause(fresh[0])}{why})", data
    by_cause = ", ".join(f"{cause} {times(count)}" for cause, count in causes.most_common())
    return Kind.INTERRUPTED, f"lost {len(fresh)} workers ({by_cause})", data


def _recovered(old: JobStatus, new: JobStatus) -> _Piece | None:
    before = {item.uid for item in old.interruptions if item.recovered_at is not None}
    back = [item for item in new.interruptions if item.recovered_at is not None and item.uid not in before]
    if back:
        took_s = max(item.recovery_s or 0.0 for item in back)
        redone = max(item.steps_redone or 0 for item in back)
        text = f"trains again {took_s:.1f} s after the loss, {counted(redone, 'step')} done again"
        return Kind.RECOVERED, text, {"recoverySeconds": round(took_s, 3), "stepsRedone": redone}
    if old.phase is Phase.RESTARTING and new.phase is Phase.RUNNING and new.progress.step is None:
        return Kind.RECOVERED, f"runs again with {counted(new.active, 'worker')}", {}
    return None


def _ended(old: JobStatus, new: JobStatus) -> _Piece | None:
    kind = _ENDS.get(new.phase)
    if kind is None or old.phase is new.phase:
        return None
    took = "" if new.start_time is None or new.completion_time is None else _took(new.completion_time - new.start_time)
    step = "" if new.progress.step is None else f", at step {new.progress.step}"
    why = f": {_short(new.message)}" if kind is Kind.FAILED and new.message else ""
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


def body(found: Sequence[Item], dropped: int = 0) -> bytes:
    """The message about some pieces of news, oldest first; `dropped` older ones were lost."""
    lines = [f"*{escaped(item.job)}* ({escaped(item.namespace)}) {escaped(item.text)}" for item in found[-MAX_ITEMS:]]
    missing = dropped + max(0, len(found) - MAX_ITEMS)
    if missing:
        lines.insert(0, f"… and {missing} earlier {'change' if missing == 1 else 'changes'} of jobs")
    data = {"format": FORMAT, "events": [item.as_data() for item in found[-MAX_ITEMS:]], "omitted": missing}
    return json.dumps({"text": "\n".join(lines), "elasticctl": data}).encode()


def escaped(text: str) -> str:
    """Text in which Slack finds no links and nobody to call: what a job says must not wake a whole channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
