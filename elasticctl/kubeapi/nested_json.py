"""The JSON of an API server, in which users may nest values thousands of levels deep.

An API server stores 10,000 levels in fields without a schema, such as the template of an ElasticJob. Python's reader
fails at about a thousand, and so does whatever compares or writes what it has read. One such object would end each
watch and each list that it is in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

MOST_LEVELS = 400
"""Deeper values read as null: no field of Kubernetes' own is a tenth as deep."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STRING_OR_BRACKET = re.compile(_STRING.pattern + rb"|[\[{\]}]", re.DOTALL)
_BEGIN, _END = b"[{", b"]}"
_STEPS = {**dict.fromkeys(_BEGIN, 1), **dict.fromkeys(_END, -1)}
_OTHERS = bytes(set(range(256)) - set(_BEGIN + _END))


def parse(text: bytes) -> Any:
    """Return the value; those in it that are nested deeper than `MOST_LEVELS` are null. Raises ValueError."""
    return json.loads(b"".join(_without_deep(text)) if _is_deep(text) else text)


def _is_deep(text: bytes) -> bool:
    if sum(map(text.count, (b"[", b"{"))) <= MOST_LEVELS:  # most objects have no more brackets than that
        return False
    brackets = _STRING.sub(b"", text).translate(None, _OTHERS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MOST_LEVELS


def _without_deep(text: bytes) -> Iterator[bytes]:
    """The text in pieces, with null in place of what is too deep."""
    level, start = 0, 0
    for found in _STRING_OR_BRACKET.finditer(text):
        step = _STEPS.get(text[found.start()], 0)
        if step > 0 and level == MOST_LEVELS:
            yield text[start : found.start()] + b"null"
        level += step
        if step < 0 and level == MOST_LEVELS:
            start = found.end()
    yield text[start:] if level <= MOST_LEVELS else b""
