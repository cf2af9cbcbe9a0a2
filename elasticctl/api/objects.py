"""Kubernetes objects as JSON data: reading fields of any content, the rules for names, and merge patches.

The readers never raise: a field that is missing or has the wrong type reads as empty, because an object can hold
anything.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from elasticctl.api.errors import SpecError

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
            f"{name!r} is not a name: use lower-case letters, digits and '-', at most {max_length} characters",
            path=path,
        )


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
