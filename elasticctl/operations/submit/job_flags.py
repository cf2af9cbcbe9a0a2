"""What a user can say about a new job: the options of `submit`, with the parsers of their text.

The command line, job files and the Python API fill in a `JobFlags`. A parser raises ValueError with a sentence that
quotes the text.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, NamedTuple

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import UsageError
from elasticctl.api.goal import MAX_USD, Prefer
from elasticctl.api.spec import (
    DEFAULT_BACKOFF_LIMIT,
    GROUP,
    LABEL_GROUP,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_TYPE,
    MAX_PRIORITY,
    RestartPolicy,
)
from elasticctl.api.text import quote
from elasticctl.operations.option_values import Assignment, assignment, duration, duration_from, size, whole
from elasticctl_protocol.variables import OnNan

WORKSPACE_LIMIT_BYTES = 100_000_000
"""Code is smaller; data, which is larger, has better ways to a cluster."""
_OBJECT = r"[a-z0-9](?:[-a-z0-9.]{0,200}[a-z0-9])?"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    rf"(?P<name>{_OBJECT})(?::(?P<key>[-._A-Za-z0-9]{{1,253}})(?:=(?P<variable>{VARIABLE.pattern}))?)?"
)
_MOUNT = re.compile(rf"(?P<claim>(?:secrets:)?{_OBJECT}):(?P<path>/[^\0:]+)")
_CPUS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?|[0-9]{1,9}m")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WHEN = re.compile(r"(?:([a-z]{3})[a-z]* )?([0-2]?[0-9]):([0-5][0-9])")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_RESERVED = (LABEL_GROUP, LABEL_JOB, LABEL_TYPE, LABEL_INDEX)
_GIB, _MIB = 1 << 30, 1 << 20


class SecretRef(NamedTuple):
    """A reference to a secret: all its keys (`key` ""), or one of them as a variable."""

    name: str
    key: str
    variable: str

    def __str__(self) -> str:
        renamed = f"={self.variable}" if self.variable != self.key else ""
        return f"{self.name}:{self.key}{renamed}" if self.key else self.name


class Mount(NamedTuple):
    """A volume claim, or `secrets:` and a SecretProviderClass, and the absolute path to mount it at."""

    claim: str
    path: str

    def __str__(self) -> str:
        return f"{self.claim}:{self.path}"


class Toleration(NamedTuple):
    """A tolerated taint of nodes: of any `value` if that is None, of any `effect` if that is blank."""

    key: str
    value: str | None
    effect: str

    def __str__(self) -> str:
        return self.key + ("" if self.value is None else f"={self.value}") + (f":{self.effect}" if self.effect else "")

    def to_manifest(self) -> dict[str, str]:
        """The toleration as in a pod."""
        value = {} if self.value is None else {"value": self.value}
        effect = {"effect": self.effect} if self.effect else {}
        return {"key": self.key, "operator": "Exists" if self.value is None else "Equal", **value, **effect}


def parse_secret(text: str) -> SecretRef:
    """NAME, NAME:KEY or NAME:KEY=VARIABLE."""
    found = _SECRET.fullmatch(text)
    if found is None:
        raise ValueError(f"{quote(text)} is not of the form NAME, NAME:KEY or NAME:KEY=VARIABLE.")
    name, key, variable = found["name"], found["key"] or "", found["variable"] or ""
    if key and not variable and not VARIABLE.fullmatch(key):
        raise ValueError(f"{quote(key)} cannot be the name of a variable; give one: {name}:{key}=VARIABLE.")
    return SecretRef(name, key, variable or key)


def parse_mount(text: str) -> Mount:
    """CLAIM:/path, or secrets:CLASS:/path."""
    found = _MOUNT.fullmatch(text)
    if found is None or ".." in found["path"].split("/"):
        raise ValueError(f"{quote(text)} is not of the form CLAIM:/path.")
    return Mount(found["claim"], found["path"])


def parse_cpus(text: str) -> str:
    """4, 0.5 or 500m."""
    if text and (not _CPUS.fullmatch(text) or not any(digit in text for digit in "123456789")):
        raise ValueError(f"{quote(text)} is not a number of CPUs such as 4, 0.5 or 500m.")
    return text


def parse_memory(text: str) -> str:
    """500MB, 16Gi, 16GiB, or plain bytes -> a quantity as Kubernetes writes it."""
    if not text:
        return ""
    count = size(text)
    if count < 1:
        raise ValueError(f"{quote(text)} is not a size above 0.")
    for unit, name in ((_GIB, "Gi"), (_MIB, "Mi")):
        if count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


def parse_label(text: str) -> Assignment:
    """KEY=VALUE, a valid label on Kubernetes."""
    key, mark, value = text.partition("=")
    if not mark or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
        raise ValueError(f"{quote(text)} is not a label KEY=VALUE: letters, digits, '-', '_' and '.', 63 at most.")
    return Assignment(key, value)


def parse_own_label(text: str) -> Assignment:
    """The same, except for labels that elasticctl sets itself."""
    found = parse_label(text)
    if found.name in _RESERVED or found.name.startswith(f"{GROUP}/"):
        raise ValueError(f"the label {found.name} is elasticctl's own.")
    return found


def parse_annotation(text: str) -> Assignment:
    """KEY=VALUE, where the value is any text."""
    key, mark, value = text.partition("=")
    if not mark or not _KEY.fullmatch(key) or key.startswith(f"{GROUP}/"):
        raise ValueError(f"{quote(text)} is not an annotation KEY=VALUE.")
    return Assignment(key, value)


def parse_toleration(text: str) -> Toleration:
    """KEY[=VALUE][:EFFECT], as kubectl writes taints."""
    taint, _, effect = text.partition(":")
    key, mark, value = taint.partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (effect and effect not in _EFFECTS):
        raise ValueError(f"{quote(text)} is not of the form KEY[=VALUE][:EFFECT], with {', '.join(_EFFECTS)}.")
    return Toleration(key, value if mark else None, effect)


def parse_usd(text: str) -> float:
    """200, 37.50 or $200."""
    try:
        amount = float(text.removeprefix("$"))
    except ValueError:
        amount = math.nan
    if not 0.01 <= amount <= MAX_USD:
        raise ValueError(f"{quote(text)} is not an amount in US dollars such as 200 or 37.50.")
    return round(amount, 2)


def parse_prefer(text: str) -> Prefer:
    """cost or time."""
    try:
        return Prefer(text)
    except ValueError as e:
        raise ValueError(f"{quote(text)} is neither cost nor time.") from e


def parse_priority(text: str) -> int:
    """-1000 to 1000."""
    if not re.fullmatch(r"-?[0-9]{1,4}", text) or abs(int(text)) > MAX_PRIORITY:
        raise ValueError(f"{quote(text)} is not a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}.")
    return int(text)


def seconds_until(text: str, now: datetime) -> float:
    """`36h`, `18:00`, `Fri 18:00` or `2026-11-27 18:00` -> seconds from now. Raises UsageError."""
    typed = text.strip().lower()
    if re.fullmatch(r"[1-9][0-9]{0,5}[mhd]", typed):
        return float(duration(typed))
    at = _next_time(typed, now)
    if at is None:
        try:
            at = datetime.fromisoformat(text.strip()).astimezone()
        except (ValueError, OverflowError) as e:
            raise UsageError(
                f"--finish-by {quote(text)} is not a time. FIX: give 36h, 18:00, 'Fri 18:00' or 2026-11-27T18:00"
            ) from e
    if at <= now:
        raise UsageError(f"--finish-by {quote(text)}: this time has passed")
    return (at - now).total_seconds()


def _next_time(typed: str, now: datetime) -> datetime | None:
    """The next time that a clock shows this, on this weekday if one is given."""
    found = _WHEN.fullmatch(typed)
    if found is None or int(found[2]) > 23 or (found[1] and found[1] not in _DAYS):
        return None
    at = now.replace(hour=int(found[2]), minute=int(found[3]), second=0, microsecond=0, tzinfo=None)
    for days in range(8):
        day = (at + timedelta(days=days)).astimezone()
        if day > now and (not found[1] or day.weekday() == _DAYS.index(found[1])):
            return day
    return None


@dataclass(frozen=True, slots=True)
class ChangedGoal:
    """The goal of a job, as far as it can be changed while the job runs."""

    finish_by: str = ""
    budget: Annotated[float | None, parse_usd] = None
    prefer: Annotated[Prefer | None, parse_prefer] = None

    def as_spec(self) -> dict[str, Any]:
        """The flags as in `spec.goal`. Raises UsageError for an invalid or past time."""
        found: dict[str, Any] = {}
        if self.finish_by:
            now = datetime.now().astimezone()
            found["finishBy"] = to_rfc3339(round(now.timestamp() + seconds_until(self.finish_by, now)))
        if self.budget is not None:
            found["budget"] = self.budget
        if self.prefer is not None:
            found["prefer"] = self.prefer.value
        return found


@dataclass(frozen=True, slots=True)
class JobFlags(ChangedGoal):
    """The options of a new job as given; None or empty: not given. Times are in seconds.

    The annotation of a field is the parser of its text.
    """

    work: Annotated[int | None, duration] = None
    zones: str = ""
    gpus: Annotated[int | None, whole(0)] = None
    gpu_type: str = ""
    gpus_per_node: Annotated[int | None, whole(1)] = None
    workers: Annotated[int | None, whole(1)] = None
    min_gpus: Annotated[int | None, whole(1)] = None
    max_gpus: Annotated[int | None, whole(1)] = None
    min_workers: Annotated[int | None, whole(1)] = None
    max_workers: Annotated[int | None, whole(1)] = None
    spot: bool = True
    priority: Annotated[int, parse_priority] = 0
    queue: str = ""
    name: str = ""
    launcher: bool = False
    image: str = ""
    service_account: str = ""
    env: Annotated[tuple[Assignment, ...], assignment("NAME=VALUE")] = ()
    env_file: str = ""
    setup: str = ""
    secrets: Annotated[tuple[SecretRef, ...], parse_secret] = ()
    mounts: Annotated[tuple[Mount, ...], parse_mount] = ()
    workspace: str = ""
    no_workspace: bool = False
    workspace_limit: Annotated[int, size] = WORKSPACE_LIMIT_BYTES
    storage: str = ""
    cpus: Annotated[str, parse_cpus] = ""
    memory: Annotated[str, parse_memory] = ""
    shm: Annotated[str, parse_memory] = ""
    node_selector: Annotated[tuple[Assignment, ...], parse_label] = ()
    pools: str = ""
    pool_wait: Annotated[int | None, duration] = None
    tolerations: Annotated[tuple[Toleration, ...], parse_toleration] = ()
    labels: Annotated[tuple[Assignment, ...], parse_own_label] = ()
    annotations: Annotated[tuple[Assignment, ...], parse_annotation] = ()
    backoff_limit: Annotated[int, whole(0)] = DEFAULT_BACKOFF_LIMIT
    deadline: Annotated[int | None, duration_from(1)] = None
    ttl: Annotated[int | None, duration] = None
    hang_timeout: Annotated[int | None, duration] = None
    on_nan: OnNan = OnNan.WARN
    restart_policy: RestartPolicy = RestartPolicy.ON_FAILURE

    @property
    def has_goal(self) -> bool:
        """True if the number of workers is to be chosen for a deadline or a budget."""
        return bool(self.finish_by) or self.budget is not None
