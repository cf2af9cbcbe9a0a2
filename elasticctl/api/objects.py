"""The rules of Kubernetes' API for any object: what it may be called, and how a merge patch changes it. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from elasticctl.api.errors import SpecError

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def check_label(name: object, path: str, max_length: int) -> None:
    """SpecError unless `name` is a DNS label of at most `max_length` characters."""
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
