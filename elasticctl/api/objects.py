"""Kubernetes objects as JSON data: reading their fields, the rules for names, and merge patches.

The readers never raise: a field that is missing or has the wrong type reads as empty, because an object can hold
anything.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from elasticctl.api.errors import SpecError
from elasticctl.api.text import quote

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def at(data: Any, *path: str) -> Any:
    """The value at `path`, or None."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def as_mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> list[Any]:
    """`value` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_text(value: object) -> str:
    """`value` if it is text, else ""."""
    return value if isinstance(value, str) else ""


def check_label(name: object, path: str, max_length: int) -> None:
    """Raise SpecError unless `name` is a DNS label of at most `max_length` characters."""
    if not isinstance(name, str) or len(name) > max_length or not _LABEL.fullmatch(name):
        raise SpecError(
            f"{quote(name)} is not a valid name. FIX: use lower-case letters, digits and '-', {max_length} at most",
            path=path,
        )


def selects(selector: object, labels: Mapping[str, str]) -> bool:
    """True if a label selector, whatever it contains, matches these labels; {} matches all, null none."""
    if not isinstance(selector, Mapping):
        return False
    exact = as_mapping(selector.get("matchLabels"))
    if any(labels.get(name) != value for name, value in exact.items()):
        return False
    return all(_holds(as_mapping(item), labels) for item in as_list(selector.get("matchExpressions")))


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, among = labels.get(as_text(expression.get("key"))), as_list(expression.get("values"))
    operator = expression.get("operator")
    if operator == "In":
        return value is not None and value in among
    if operator == "NotIn":
        return value is None or value not in among
    return operator == ("DoesNotExist" if value is None else "Exists")


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: mappings merge, null removes, everything else replaces."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result
