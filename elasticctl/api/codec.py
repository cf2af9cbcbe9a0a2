"""Frozen dataclasses <-> the camelCase JSON of Kubernetes objects.

Decoding never raises: a field that is missing or of the wrong type takes its default, because a controller has to live
with whatever an object holds. Strict checking of user input is the JSON schema's work (`elasticctl.api.validation`).

A field may bring a form of its own: `field(metadata=written_as(encode, decode))`. Lists of workers do, so that the
status of a thousand of them fits into an object.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NewType, TypeVar

Timestamp = NewType("Timestamp", float)
"""Seconds since the epoch, UTC; an RFC 3339 string with microseconds in JSON."""

Manifest = dict[str, Any]
"""A Kubernetes object as JSON data."""

T = TypeVar("T")
MANY = 64
"""More names than this are written as runs."""
MOST_NAMES = 100_000
_FORM = "form"
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.ASCII | re.DOTALL)
_RUN = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})\.\.(0|[1-9][0-9]{0,8})", re.ASCII | re.DOTALL)
_MISSING = object()
_PLAIN = frozenset((str, int, float, bool))
_Decoder = Callable[[Any], Any]
_EXACT = 2**53  # whole numbers below this are floats too
_LONGEST = 2**63  # what an API server keeps of a whole number
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


def camel(name: str) -> str:
    """`steps_redone` -> `stepsRedone`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def to_json(value: Any) -> Any:
    """Encode a dataclass (or a container of them) as JSON data; None and empty containers are left out of objects."""
    cls = type(value)
    if value is None or cls in _PLAIN:  # first: a status has thousands of them
        return value
    if dataclasses.is_dataclass(cls):
        encoded = {key: encode(getattr(value, name)) for name, key, encode in _encoders(cls)}
        return {key: item for key, item in encoded.items() if item is not None and item != [] and item != {}}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def from_json(cls: type[T], data: object) -> T:
    """Decode JSON data into the dataclass `cls`, leniently (see the module's docstring)."""
    source = data if isinstance(data, Mapping) else {}
    found: dict[str, Any] = {}
    decoders = _decoders(typing.cast(Hashable, cls))  # which mypy does not see of a type variable's class
    for name, key, decode in decoders:
        value = source.get(key)
        decoded = _MISSING if value is None else decode(value)
        if decoded is not _MISSING:
            found[name] = decoded
    return cls(**found)


def written_as(encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> dict[str, Any]:
    """The metadata of a field with its own JSON form; `decode` returns None for a value that it cannot read."""
    return {_FORM: (encode, decode)}


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


@functools.cache
def _encoders(cls: Any) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    """(name, key in JSON, encoder) of each field of a dataclass."""
    forms = _forms(cls)
    return tuple(
        (name, camel(name), forms[name][0] if name in forms else _encode_timestamp if is_timestamp else to_json)
        for name, _, is_timestamp in _fields(cls)
    )


def _forms(cls: Any) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """The fields of a dataclass that have their own JSON form."""
    return {f.name: f.metadata[_FORM] for f in dataclasses.fields(cls) if _FORM in f.metadata}


def _encode_timestamp(at: float | None) -> str | None:
    return None if at is None else to_rfc3339(at)


@functools.cache
def _fields(cls: Any) -> tuple[tuple[str, Any, bool], ...]:
    """(name, type, is it a timestamp) of each field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return tuple((f.name, hints[f.name], _bare(hints[f.name]) is Timestamp) for f in dataclasses.fields(cls))


def _bare(hint: Any) -> Any:
    """`X | None` -> X."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return options[0] if len(options) == 1 else hint
    return hint


@functools.cache
def _decoders(cls: Any) -> tuple[tuple[str, str, _Decoder], ...]:
    """(name, key in JSON, decoder) of each field of a dataclass, derived from its types once."""
    forms = _forms(cls)
    return tuple(
        (name, camel(name), _form_decoder(forms[name][1]) if name in forms else _decoder(hint))
        for name, hint, _ in _fields(cls)
    )


def _form_decoder(decode: Callable[[Any], Any]) -> _Decoder:
    def found(value: Any) -> Any:
        decoded = decode(value)
        return _MISSING if decoded is None else decoded

    return found


def _decoder(hint: Any) -> _Decoder:
    """The decoder of values of type `hint` other than None; it returns _MISSING for a value of another type."""
    hint = _bare(hint)
    origin = typing.get_origin(hint)
    if hint is Timestamp:
        return _decode_timestamp
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return lambda value: from_json(hint, value) if isinstance(value, Mapping) else _MISSING
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = {member.value: member for member in hint}
        return lambda value: members.get(value, _MISSING) if isinstance(value, str) else _MISSING
    if origin is tuple:
        return _sequence_decoder(typing.get_args(hint)[0])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_decoder(_decoder(typing.get_args(hint)[1]))
    return functools.partial(_decode_scalar, hint)


def _decode_timestamp(value: Any) -> Any:
    parsed = from_rfc3339(value)
    return _MISSING if parsed is None else parsed


def _sequence_decoder(item_hint: Any) -> _Decoder:
    if item_hint in (int, float):
        return lambda value: _numbers(item_hint, value) if isinstance(value, list | tuple) else _MISSING
    if item_hint == float | None:  # where a value is missing, the others must not move up
        return lambda value: _numbers_with_gaps(value) if isinstance(value, list | tuple) else _MISSING
    decode = _decoder(item_hint)

    def sequence(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return _MISSING
        items = (decode(item) for item in value if item is not None)
        return tuple(item for item in items if item is not _MISSING)

    return sequence


def _mapping_decoder(decode: _Decoder) -> _Decoder:
    def mapping(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return _MISSING
        items = ((str(key), decode(item)) for key, item in value.items() if item is not None)
        return {key: item for key, item in items if item is not _MISSING}

    return mapping


def _numbers(kind: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Decode a column of numbers at once, as it may be long; a bool is not a number here."""
    if kind is int:
        return tuple(value for value in values if type(value) is int and -_LONGEST <= value < _LONGEST)
    return tuple(float(value) for value in values if _is_number(value))


def _numbers_with_gaps(values: Sequence[Any]) -> tuple[float | None, ...]:
    return tuple(float(value) if _is_number(value) else None for value in values if value is None or _is_number(value))


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < _EXACT)


def _decode_scalar(hint: Any, value: Any) -> Any:
    if hint is Any or (hint in (str, bool) and isinstance(value, hint)):
        return value
    if hint not in (int, float) or isinstance(value, bool):
        return _MISSING
    if isinstance(value, int) and -_LONGEST <= value < _LONGEST:
        return hint(value)
    return value if hint is float and isinstance(value, float) and math.isfinite(value) else _MISSING
