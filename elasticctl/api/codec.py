"""Frozen dataclasses <-> the camelCase JSON of Kubernetes objects.

Decoding never raises (`elasticctl_protocol.codec`): an object can hold anything, and the controller must cope.
The JSON schema checks user input strictly (`elasticctl.api.validation`).

Times are RFC 3339 strings. Long lists of workers have a compact form, so that the status of a thousand workers
fits into an object.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NewType

from elasticctl_protocol.codec import MISSING, Codec, camel

Timestamp = NewType("Timestamp", float)
"""Seconds since the epoch, UTC; an RFC 3339 string with microseconds in JSON."""

Manifest = dict[str, Any]
"""A Kubernetes object as JSON data."""

MANY = 64
"""More names than this are written as runs."""
MOST_NAMES = 100_000
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.ASCII | re.DOTALL)
_RUN = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})\.\.(0|[1-9][0-9]{0,8})", re.ASCII | re.DOTALL)
_FIRST, _LAST = -62_135_596_800.0, 253_402_300_799.0  # the years 1 and 9999, which a date can hold
_YEAR_S = 366 * 86_400.0


def to_rfc3339(at: float) -> str:
    """Format `at` (seconds since the epoch) as RFC 3339 in UTC with microseconds; beyond all dates, the nearest."""
    at = min(max(_FIRST, at), _LAST)
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def from_rfc3339(text: object) -> Timestamp | None:
    """Parse an RFC 3339 string; None for anything else.

    The first year, which Go writes for a zero time, and the last one also give None, as another time zone has no such
    dates.
    """
    if not isinstance(text, str):
        return None
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return None
    try:
        at = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, OSError):
        return None
    return Timestamp(at) if _FIRST + _YEAR_S <= at <= _LAST - _YEAR_S else None


def pack_names(names: Sequence[str]) -> list[str]:
    """Shorten a long list of names by writing runs: `job-worker-0..63` for 64 names with consecutive numbers."""
    if len(names) <= MANY:
        return list(names)
    runs: list[tuple[str, int, int]] = []
    for name in names:
        prefix, number = _split_number(name)
        if runs and number >= 0 and runs[-1][0] == prefix and runs[-1][2] == number - 1:
            runs[-1] = (prefix, runs[-1][1], number)
        else:
            runs.append((prefix, number, number))
    return [_written_run(*run) for run in runs]


def unpack_names(items: Any) -> tuple[str, ...] | None:
    """Read the names that `pack_names` has written; None for a value that is not a list."""
    if not isinstance(items, list | tuple):
        return None
    names: list[str] = []
    for item in items:
        run = _RUN.fullmatch(item) if isinstance(item, str) else None
        if run is not None and int(run[3]) - int(run[2]) < MOST_NAMES - len(names):
            names += (f"{run[1]}{number}" for number in range(int(run[2]), int(run[3]) + 1))
        elif isinstance(item, str):
            names.append(item)
    return tuple(names)


def _split_number(name: str) -> tuple[str, int]:
    """`job-worker-7` -> (`job-worker-`, 7); -1 where a name does not end in a plain number."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, -1)


def _written_run(prefix: str, first: int, last: int) -> str:
    if first < 0:
        return prefix
    return f"{prefix}{first}" if first == last else f"{prefix}{first}..{last}"


def _encode_timestamp(at: float | None) -> str | None:
    return None if at is None else to_rfc3339(at)


def _decode_timestamp(value: Any) -> Any:
    parsed = from_rfc3339(value)
    return MISSING if parsed is None else parsed


_KUBERNETES = Codec(camel, keeps_empty=False, types={Timestamp: (_encode_timestamp, _decode_timestamp)})
to_json = _KUBERNETES.encode
"""Encode a dataclass (or a container of them) as JSON data; None and empty containers are left out of objects."""
from_json = _KUBERNETES.decode
"""Decode JSON data into a dataclass, leniently."""
