"""JSON in the shape of a dataclass, with arbitrary values in its fields: what an unchecked object may hold."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp
from elasticctl_protocol.codec import camel

HUGE = 10**400
"""A whole number that is too large for a float."""
TIMES = [
    "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59.999999Z",
    "9999-12-31T23:59:59-12:00",
]
EXTREMES = [0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, HUGE, -HUGE, 0.0, -0.5, 1e-308, 1.7976931348623157e308]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*EXTREMES, *TIMES, "2026-01-01T00:00:00Z", "\ud800", "9" * 5000])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def shaped(cls: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the fields of the dataclass `cls`: mostly of their types and often extreme, sometimes anything."""
    hints = typing.get_type_hints(cls)
    fields = {camel(field.name): _of(hints[field.name]) for field in dataclasses.fields(cls)}
    return st.fixed_dictionaries({}, optional=fields)


def _of(hint: Any) -> st.SearchStrategy[Any]:
    return st.one_of(_typed(hint), _typed(hint), _typed(hint), JSON)


def _typed(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(_typed(argument) for argument in arguments if argument is not type(None)))
    if hint is Timestamp:
        return st.sampled_from([*TIMES, "2026-01-01T00:00:00Z", "2001-09-09T01:46:40Z"])
    if dataclasses.is_dataclass(hint):
        return st.deferred(lambda: shaped(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from([member.value for member in hint])
    if origin is tuple:
        return st.lists(_of(arguments[0]), max_size=3)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(st.text(max_size=5), _of(arguments[1]), max_size=3)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers() | st.sampled_from(EXTREMES),
        float: st.floats() | st.sampled_from(EXTREMES),
        str: st.text(max_size=8) | st.sampled_from(["digits-worker-0", "\ud800"]),
        bool: st.booleans(),
    }
    return plain.get(hint, JSON)
