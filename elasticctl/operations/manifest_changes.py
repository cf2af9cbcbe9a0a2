"""Changes to a rendered manifest: `--set PATH=VALUE` and notifications."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

from elasticctl.api import notifications, validation
from elasticctl.api.errors import SpecError, UsageError
from elasticctl.api.objects import at
from elasticctl.api.spec import ANNOTATION_NOTIFY
from elasticctl.api.text import quote
from elasticctl.api.yamltext import FieldPath, YamlDocument, parse_yaml
from elasticctl.cluster.base import Manifest
from elasticctl.settings.contexts import LOCAL, Context

Settings = Sequence[tuple[str, str]]
"""(path, value) pairs, the value as YAML."""
NO_NOTIFICATIONS = "none"
_STEP = re.compile(r"""\.?([A-Za-z_][\w/-]*)|\[(\d{1,6})\]|\["([^"\]]+)"\]""", re.ASCII)


def set_field(manifest: Manifest, path: str, value: str) -> None:
    """Set the field at `path` (`spec.policy.hangTimeoutSeconds`, `a.list[0].b`, `metadata.labels["x.y/z"]`) in place.

    `value` is read as YAML, so 4 is a number and "4" a text. Missing mappings are created. Raises UsageError if
    the path cannot be followed or the value cannot be read.
    """
    steps = _steps(path)
    try:
        data = parse_yaml(value, f"--set {path}").data
    except SpecError as e:
        raise UsageError(str(e)) from e
    around: Any = manifest
    for done, (step, following) in enumerate(itertools.pairwise(steps), start=1):
        around = _step_into(around, step, path, {} if isinstance(following, str) else None, done)
    last = steps[-1]
    named = isinstance(around, dict) and isinstance(last, str)
    listed = isinstance(around, list) and isinstance(last, int) and last < len(around)
    if not (named or listed):
        raise UsageError(f"--set {path}: there is no place for {quote(last)}")
    around[last] = data


def _steps(path: str) -> FieldPath:
    steps: list[str | int] = []
    position = 0
    while position < len(path):
        found = _STEP.match(path, position)
        if found is None:
            break
        name, index, quoted = found.groups()
        steps.append(int(index) if index is not None else name or quoted)
        position = found.end()
    if position < len(path) or not steps or path.startswith("."):
        raise UsageError(f"--set {quote(path)}: give a field such as spec.backoffLimit or spec.list[0].name")
    return tuple(steps)


def _step_into(around: Any, step: str | int, path: str, default: Any, depth: int) -> Any:
    if isinstance(around, dict) and isinstance(step, str):
        if around.get(step) is None and default is not None:
            around[step] = default
        if step in around:
            return around[step]
    if isinstance(around, list) and isinstance(step, int) and step < len(around):
        return around[step]
    raise UsageError(f"--set {path}: there is nothing at {quote(step)}, step {depth} of the path")


def with_settings(manifest: Manifest, settings: Settings) -> Manifest:
    """The manifest with --set applied, checked again."""
    if settings:
        if not isinstance(manifest, dict):
            raise UsageError("--set needs a manifest that is a mapping")
        for path, value in settings:
            set_field(manifest, path, value)
        validation.validate_manifest(YamlDocument(manifest, {}, "with --set"))
    return manifest


def notification_reference(text: str, provider: str) -> str:
    """The reference as it is stored, with an absolute path. Raises UsageError for an invalid one."""
    kind, _, name = text.partition(":")
    if kind == "file" and name:
        text = f"file:{os.path.abspath(os.path.expanduser(name))}"
    found = notifications.parse_reference(text)
    if found.local_only and provider != LOCAL:
        raise UsageError(
            f"{found.kind}: is for the local cluster: on Kubernetes give the KEY of the secret"
            f" {notifications.SECRET} that holds the URL"
            f" (kubectl create secret generic {notifications.SECRET} --from-file=KEY=FILE)"
        )
    return str(found)


def with_notifications(manifest: Manifest, wanted: str, context: Context) -> Manifest:
    """The manifest with notifications to `wanted`, or else its own, or else the context's.

    Raises UsageError.
    """
    value = ""
    if wanted != NO_NOTIFICATIONS:
        given = notification_reference(wanted, context.provider) if wanted else ""
        value = given or at(manifest, "metadata", "annotations", ANNOTATION_NOTIFY) or context.notify_url_from
    metadata = manifest["metadata"]
    others = {key: item for key, item in (metadata.get("annotations") or {}).items() if key != ANNOTATION_NOTIFY}
    annotations = {**others, **({ANNOTATION_NOTIFY: value} if value else {})}
    kept = {key: item for key, item in metadata.items() if key != "annotations"}
    return {**manifest, "metadata": {**kept, **({"annotations": annotations} if annotations else {})}}
