"""What a YAML scalar means: kubectl's reading, so that one file says the same thing to both.

YAML 1.1 booleans and integers (`yes`, `0644`, `1_000`), YAML 1.2 floats (`1e3`); dates and sexagesimals stay text.
"""

from __future__ import annotations

import math
import re
from typing import Any

from elasticctl.wording import shown

TAG = "tag:yaml.org,2002:"
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {
    form: value
    for word, value in (("true", True), ("yes", True), ("on", True), ("false", False), ("no", False), ("off", False))
    for form in (word, word.capitalize(), word.upper())
}
_INT = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")
_MAX_INT = 2**63


def scalar(text: str, *, plain: bool, tag: str | None = None) -> Any:
    """The value of a scalar node; ValueError for an unknown tag or a number out of range."""
    if tag in (None, "!"):
        return resolve(text) if plain and tag is None else text
    if tag == f"{TAG}str":
        return text
    value = resolve(text)
    kinds = {"null": type(None), "bool": bool, "int": int, "float": float}
    kind = kinds.get(tag.removeprefix(TAG)) if tag is not None else None
    if kind is float and type(value) is int:
        return float(value)
    if kind is None or type(value) is not kind:
        raise ValueError(f"the tag {shown(tag or '')} does not fit {shown(text)}")
    return value


def resolve(text: str) -> Any:
    """The value of a plain scalar; ValueError for a number that JSON or 64 bits cannot hold."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.match(text) and not text.endswith("_"):
        return _integer(text)
    if _FLOAT.match(text):
        number = float(text)
        if math.isfinite(number):
            return number
        raise ValueError(f"{shown(text)} is out of range")
    if _NOT_FINITE.match(text):
        raise ValueError(f"{shown(text)} is no number here; put it in quotes if it is text")
    return text


def _integer(text: str) -> int:
    digits = text.replace("_", "")
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    if len(digits) > 70:
        raise ValueError(f"{shown(text)} is out of range")
    number = int(digits, 8 if re.match("0[0-7]", digits) else 0)
    if not -_MAX_INT <= sign * number < _MAX_INT:
        raise ValueError(f"{shown(text)} is out of range")
    return sign * number
