"""The record of changes to an object: who changed what, when and with which client, kept in the object's annotations.

Each record has an annotation of its own, so that concurrent clients do not overwrite each other's. A record is
only as trustworthy as its client: anyone with write access to the object can forge one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticctl.api.codec import Timestamp, from_json, to_json, to_rfc3339
from elasticctl.api.objects import as_mapping, as_text, at
from elasticctl.api.spec import ANNOTATION_RERUN_OF, ANNOTATION_SCALED_BY, GROUP
from elasticctl.api.text import shorten

PREFIX = f"change.{GROUP}/"
"""Of the annotations' names; the time follows, so that they sort by it."""
KEPT = 20
"""Records that an object keeps."""
_VALUE_CHARS = 200
_FIELDS = 12
_OWN = ("metadata.resourceVersion", f"metadata.annotations.{ANNOTATION_SCALED_BY}")
"""Fields about the write itself, not about the wanted state."""
_VERBS: Mapping[str, Mapping[Any, str]] = {
    "spec.cancel": {True: "cancel"},
    "spec.suspend": {True: "suspend", False: "resume"},
}
_SIZES = ("spec.replicaSpecs.Worker.replicas", "spec.sharing.automatic", "spec.removeWorkers")


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field of an object, before and after the change, as JSON; "" where it is not set."""

    field: str
    before: str = ""
    after: str = ""

    @property
    def words(self) -> str:
        """`priority 0 -> 10`."""
        return f"{self.field} {self.before or '-'} -> {self.after or '-'}"


@dataclass(frozen=True, slots=True)
class Change:
    """`by` is a user, `client` a program and its version, `verb` what they did."""

    at: Timestamp | None = None
    by: str = ""
    client: str = ""
    verb: str = ""
    fields: tuple[FieldChange, ...] = field(default=())

    @property
    def words(self) -> str:
        """`priority 0 -> 10, max 4 -> 8`."""
        return ", ".join(item.words for item in self.fields)


def changes_of(manifest: object) -> list[Change]:
    """Return the records of an object, oldest first, without those that cannot be read."""
    return [change for _, change in sorted(_read(manifest), key=lambda item: (item[1].at or 0.0, item[0]))]


def with_change(manifest: Mapping[str, Any], change: Change, mark: str) -> dict[str, Any]:
    """A new object with its first record, and with none that it was copied with; `mark` sets it apart from others."""
    metadata = as_mapping(manifest.get("metadata"))
    others = {key: value for key, value in _annotations(manifest).items() if not key.startswith(PREFIX)}
    return {**manifest, "metadata": {**metadata, "annotations": {**others, **annotation(change, mark)}}}


def patch_with_change(before: object, patch: Mapping[str, Any], change: Change, mark: str) -> dict[str, Any]:
    """Return the merge patch with a new record added to it, and all but the newest KEPT records removed."""
    old = sorted(key for key in _annotations(before) if key.startswith(PREFIX))
    dropped = dict.fromkeys(old[: max(0, len(old) - KEPT + 1)])
    metadata = as_mapping(patch.get("metadata"))
    annotations = {**as_mapping(metadata.get("annotations")), **dropped, **annotation(change, mark)}
    return {**patch, "metadata": {**metadata, "annotations": annotations}}


def annotation(change: Change, mark: str) -> dict[str, str]:
    """Return the annotation that holds a record."""
    stamp = "".join(char for char in to_rfc3339(change.at or 0.0) if char not in "-:")
    return {f"{PREFIX}{stamp}-{mark}": json.dumps(to_json(change), ensure_ascii=False)}


def differences(before: object, patch: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """Return what a merge patch changes; of templates, which may contain anything, only that they change."""
    found = list(_differences("", as_mapping(before), patch))
    if len(found) > _FIELDS:
        found = [*found[: _FIELDS - 1], FieldChange(f"and {len(found) - _FIELDS + 1} more")]
    return tuple(found)


def verb_of(patch: Mapping[str, Any], fields: tuple[FieldChange, ...]) -> str:
    """`cancel`, `suspend`, `resume` or `scale`, for a patch that does that; `change` for any other."""
    for path, verbs in _VERBS.items():
        verb = verbs.get(at(patch, *path.split("."))) if any(item.field == path for item in fields) else None
        if verb:
            return verb
    return "scale" if any(item.field in _SIZES for item in fields) else "change"


def verb_of_new(manifest: Mapping[str, Any]) -> str:
    """`rerun` for a job that runs another again, else `submit`."""
    return "rerun" if ANNOTATION_RERUN_OF in _annotations(manifest) else "submit"


def _differences(path: str, before: object, patch: Mapping[str, Any]) -> Iterator[FieldChange]:
    for key, value in patch.items():
        here = f"{path}.{key}" if path else str(key)
        old = as_mapping(before).get(key)
        if here in _OWN or old == value:
            continue
        if key == "template":
            yield FieldChange(here, "one", "another")
        elif isinstance(value, Mapping):
            yield from _differences(here, old, value)
        else:
            yield FieldChange(here, _as_text(old), _as_text(value))


def _as_text(value: object) -> str:
    return "" if value is None else shorten(json.dumps(value, ensure_ascii=False), _VALUE_CHARS)


def _annotations(manifest: object) -> Mapping[str, Any]:
    return as_mapping(at(manifest, "metadata", "annotations"))


def _read(manifest: object) -> Iterator[tuple[str, Change]]:
    for key, text in _annotations(manifest).items():
        if not (isinstance(key, str) and key.startswith(PREFIX)):
            continue
        try:
            stored = json.loads(as_text(text))
        except (ValueError, RecursionError):
            continue
        if isinstance(stored, Mapping):
            yield key, from_json(Change, stored)
