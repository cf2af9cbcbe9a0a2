"""What Kubernetes' API server does to an object on its way in: defaults, merge patches, generations. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from elasticctl.cluster.base import Manifest
from elasticctl.codec import to_rfc3339
from elasticctl.errors import SpecError
from elasticctl.spec import API_VERSION, KIND

MAX_JOB_NAME = 51
"""`<job>-worker-<index>`, of an index of four digits, has to fit the 63 characters of a DNS label."""

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_PATCHABLE_METADATA = ("labels", "annotations")


def check_job(manifest: object) -> Manifest:
    """Refuse what cannot be stored as an ElasticJob (SpecError); the full check against the schema is the caller's."""
    if not isinstance(manifest, dict):
        raise SpecError(f"an ElasticJob is a mapping, not {type(manifest).__name__}")
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != wanted:
            raise SpecError(f"must be {wanted!r}, not {manifest.get(field)!r}", path=field)
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict):
        raise SpecError("is missing or not a mapping", path="metadata")
    check_name(metadata.get("name"), "metadata.name", MAX_JOB_NAME)
    check_name(metadata.get("namespace", "default"), "metadata.namespace", 63)
    if not isinstance(manifest.get("spec"), dict):
        raise SpecError("is missing or not a mapping", path="spec")
    return manifest


def check_name(name: object, path: str, max_length: int) -> None:
    """SpecError unless `name` is a DNS label of at most `max_length` characters."""
    if not isinstance(name, str) or len(name) > max_length or not _LABEL.fullmatch(name):
        raise SpecError(
            f"{name!r} is not a name: use lower-case letters, digits and '-', at most {max_length} characters",
            path=path,
        )


def admitted(manifest: Mapping[str, Any], *, uid: str, now: float) -> Manifest:
    """Return a new object as it will be stored: our metadata over the caller's, no status yet."""
    stored = copy.deepcopy(dict(manifest))
    stored.pop("status", None)
    metadata = stored["metadata"]
    for field in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds"):
        metadata.pop(field, None)
    metadata.setdefault("namespace", "default")
    metadata.update(uid=uid, generation=1, creationTimestamp=to_rfc3339(now))
    return stored


def patched(stored: Manifest, patch: Mapping[str, Any]) -> Manifest:
    """Apply a JSON merge patch to labels, annotations and spec; a changed spec is a new generation.

    Everything else in the patch (status, identity) is left out, as the API server does for the main resource.
    """
    result = copy.deepcopy(stored)
    metadata = patch.get("metadata")
    for field in _PATCHABLE_METADATA:
        if isinstance(metadata, Mapping) and field in metadata:
            result["metadata"][field] = merge_patch(result["metadata"].get(field), metadata[field]) or {}
    if "spec" in patch:
        result["spec"] = merge_patch(result["spec"], patch["spec"])
    if result["spec"] != stored["spec"]:
        result["metadata"]["generation"] += 1
    return result


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


def marked_deleted(pod: Manifest, *, grace_s: float, now: float) -> Manifest:
    """Return the pod with its deletion asked for; a second call can only bring the end nearer, as in Kubernetes."""
    result = copy.deepcopy(pod)
    metadata = result["metadata"]
    if "deletionTimestamp" not in metadata or grace_s < metadata["deletionGracePeriodSeconds"]:
        metadata["deletionTimestamp"] = to_rfc3339(now + grace_s)
        metadata["deletionGracePeriodSeconds"] = grace_s
    return result


def grace_of(pod: Mapping[str, Any]) -> float:
    """`terminationGracePeriodSeconds` in seconds; 30 where it is not said, as in Kubernetes."""
    grace_s = pod.get("spec", {}).get("terminationGracePeriodSeconds", 30)
    return float(grace_s) if isinstance(grace_s, int | float) and grace_s >= 0 else 30.0
