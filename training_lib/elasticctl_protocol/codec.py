"""Frozen dataclasses <-> JSON data.

Decoding never raises: a field that is missing or of the wrong type takes its default, because the reader must
handle what another version, or another program, has written.

A field may have its own form: `field(metadata=written_as(encode, decode))`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Encoder = Callable[[Any], Any]
Decoder = Callable[[Any], Any]

NULL = object()
"""What an encoder returns for JSON's null. A field for which it returns None is left out."""
MISSING = object()
"""What a decoder returns for a value of another type."""
_FORM = "form"
_PLAIN = frozenset((str, int, float, bool))
_EXACT = 2**53  # whole numbers below this are floats too
_LONGEST = 2**63  # what an API server keeps of a whole number


def written_as(encode: Encoder, decode: Callable[[Any], Any]) -> dict[str, Any]:
    """The metadata of a field with its own JSON form; `decode` returns None for a value that it cannot read."""
    return {_FORM: (encode, decode)}


def camel(name: str) -> str:
    """`steps_redone` -> `stepsRedone`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class Codec:
    """One style of JSON: `key` turns the name of a field into its key, and fields that are None are left out.

    `keeps_empty`: empty lists and objects are written. `types` are (encoder, decoder) of types with a form of their
    own; their decoders return MISSING for what they cannot read.
    """

    def __init__(
        self,
        key: Callable[[str], str] = str,
        *,
        keeps_empty: bool = True,
        types: Mapping[Any, tuple[Encoder, Decoder]] | None = None,
    ) -> None:
        self._key, self._keeps_empty, self._types = key, keeps_empty, types or {}
        self._encoders = functools.cache(self._find_encoders)
        self._decoders = functools.cache(self._find_decoders)

    def encode(self, value: Any) -> Any:
        """Encode a dataclass, or a container of them."""
        cls = type(value)
        if value is None or cls in _PLAIN:  # first: a status has thousands of them
            return value
        if dataclasses.is_dataclass(cls):
            encoded = {key: encode(getattr(value, name)) for name, key, encode in self._encoders(cls)}
            if self._keeps_empty:
                return {key: None if item is NULL else item for key, item in encoded.items() if item is not None}
            return {key: item for key, item in encoded.items() if item is not None and item != [] and item != {}}
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, Mapping):
            return {str(key): self.encode(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.encode(item) for item in value]
        return value

    def decode(self, cls: type[T], data: object) -> T:
        """Decode JSON data into the dataclass `cls`, leniently (see the module's docstring)."""
        source = data if isinstance(data, Mapping) else {}
        found: dict[str, Any] = {}
        decoders = self._decoders(typing.cast(Hashable, cls))  # which mypy does not see of a type variable's class
        for name, key, decode in decoders:
            value = source.get(key, MISSING)
            decoded = value if value is MISSING else decode(value)
            if decoded is not MISSING:
                found[name] = decoded
        return cls(**found)

    def _find_encoders(self, cls: Any) -> tuple[tuple[str, str, Encoder], ...]:
        """(name, key in JSON, encoder) of each field of a dataclass."""
        found = []
        for each, hint in _fields(cls):
            own = self._types.get(_bare(hint))
            encode = own[0] if own else each.metadata[_FORM][0] if _FORM in each.metadata else self.encode
            found.append((each.name, self._key(each.name), encode))
        return tuple(found)

    def _find_decoders(self, cls: Any) -> tuple[tuple[str, str, Decoder], ...]:
        """(name, key in JSON, decoder) of each field of a dataclass, derived from its types once."""
        found = []
        for each, hint in _fields(cls):
            own = each.metadata.get(_FORM)
            found.append((each.name, self._key(each.name), _form_decoder(own[1]) if own else self._decoder(hint)))
        return tuple(found)

    def _decoder(self, hint: Any) -> Decoder:
        """The decoder of values of type `hint`; it returns MISSING for None, and for a value of another type."""
        hint = _bare(hint)
        origin = typing.get_origin(hint)
        if hint in self._types:
            return self._types[hint][1]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return lambda value: self.decode(hint, value) if isinstance(value, Mapping) else MISSING
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            members = {member.value: member for member in hint}
            return lambda value: members.get(value, MISSING) if isinstance(value, str) else MISSING
        if origin is tuple:
            return self._sequence_decoder(typing.get_args(hint)[0])
        if origin is not None and issubclass(origin, Mapping):
            return _mapping_decoder(self._decoder(typing.get_args(hint)[1]))
        return functools.partial(_decode_scalar, hint)

    def _sequence_decoder(self, item_hint: Any) -> Decoder:
        if item_hint in (int, float):
            return lambda value: _numbers(item_hint, value) if isinstance(value, list | tuple) else MISSING
        if item_hint == float | None:  # where a value is missing, the others must not move up
            return lambda value: _numbers_with_gaps(value) if isinstance(value, list | tuple) else MISSING
        decode = self._decoder(item_hint)

        def sequence(value: Any) -> Any:
            if not isinstance(value, list | tuple):
                return MISSING
            items = (decode(item) for item in value)
            return tuple(item for item in items if item is not MISSING)

        return sequence


def _fields(cls: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The fields of a dataclass with their types."""
    hints = typing.get_type_hints(cls)
    return [(each, hints[each.name]) for each in dataclasses.fields(cls)]


def _bare(hint: Any) -> Any:
    """`X | None` -> X."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return options[0] if len(options) == 1 else hint
    return hint


def _form_decoder(decode: Callable[[Any], Any]) -> Decoder:
    def found(value: Any) -> Any:
        decoded = decode(value)
        return MISSING if decoded is None else decoded

    return found


def _mapping_decoder(decode: Decoder) -> Decoder:
    def mapping(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return MISSING
        items = ((str(key), decode(item)) for key, item in value.items())
        return {key: item for key, item in items if item is not MISSING}

    return mapping


def _numbers(kind: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Decode a column of numbers together, because it may be long; a bool is not a number here."""
    if kind is int:
        return tuple(value for value in values if type(value) is int and -_LONGEST <= value < _LONGEST)
    return tuple(float(value) for value in values if _is_number(value))


def _numbers_with_gaps(values: Sequence[Any]) -> tuple[float | None, ...]:
    return tuple(float(value) if _is_number(value) else None for value in values if value is None or _is_number(value))


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < _EXACT)


def _decode_scalar(hint: Any, value: Any) -> Any:
    if value is None:
        return MISSING
    if hint is Any or (hint in (str, bool) and isinstance(value, hint)):
        return value
    if hint not in (int, float) or isinstance(value, bool):
        return MISSING
    if isinstance(value, int) and -_LONGEST <= value < _LONGEST:
        return hint(value)
    return value if hint is float and isinstance(value, float) and math.isfinite(value) else MISSING
