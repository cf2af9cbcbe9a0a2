"""Values that options of several operations have, from their text: durations, sizes, numbers, NAME=VALUE.

Each parser raises ValueError with a sentence that quotes the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from elasticctl.api.text import quote

_DURATION = re.compile(r"([0-9]{1,9})(s|m|h|d)?")
_BYTES = re.compile(r"([0-9]{1,9})([kMGT]?)(i?)B?")
_UNIT_S = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Assignment(NamedTuple):
    """NAME=VALUE."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def duration(text: str) -> int:
    """90s, 10m, 2h, 1d, or plain seconds -> whole seconds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{quote(text)} is not a duration such as 90s, 10m, 2h or 1d.")
    return int(found[1]) * _UNIT_S[found[2]]


def duration_from(low_s: int) -> Callable[[str], int]:
    """A parser of durations of at least `low_s`."""

    def parse(text: str) -> int:
        if (found := duration(text)) < low_s:
            raise ValueError(f"{quote(text)} is too short: the least is {low_s}s.")
        return found

    return parse


def size(text: str) -> int:
    """500MB, 2GB, 1GiB, or plain bytes -> bytes."""
    found = _BYTES.fullmatch(text)
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{quote(text)} is not a size such as 500MB, 2GB or 1GiB.")
    unit: int = (1024 if found[3] else 1000) ** " kMGT".index(found[2] or " ")
    return int(found[1]) * unit


def whole(low: int) -> Callable[[str], int]:
    """A parser of whole numbers of at least `low`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < low:
            raise ValueError(f"{quote(text)} is not a whole number of at least {low}.")
        return int(text)

    return parse


def assignment(form: str) -> Callable[[str], Assignment]:
    """A parser of NAME=VALUE; `form` describes it in the error."""

    def parse(text: str) -> Assignment:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ValueError(f"{quote(text)} is not of the form {form}.")
        return Assignment(name, value)

    return parse
