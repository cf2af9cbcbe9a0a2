"""Where a job's news goes: read from the command line, and put into its manifest. The reference only, never the URL."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from elasticctl import notify
from elasticctl.config import LOCAL, Context
from elasticctl.errors import UsageError
from elasticctl.podtemplate import at
from elasticctl.spec import ANNOTATION_NOTIFY

if TYPE_CHECKING:
    from elasticctl.cli.making import Draft
    from elasticctl.cluster.base import Manifest

OFF = "none"


def reference(text: str, provider: str) -> str:
    """A reference as it is stored; a relative path becomes an absolute one. UsageError for what is none there."""
    kind, _, name = text.partition(":")
    if kind == "file" and name:
        text = f"file:{os.path.abspath(os.path.expanduser(name))}"
    found = notify.parse(text)
    if found.local_only and provider != LOCAL:
        raise UsageError(
            f"{found.kind}: is for the local cluster: on Kubernetes give the KEY of the secret {notify.SECRET} that"
            f" holds the URL (kubectl create secret generic {notify.SECRET} --from-file=KEY=FILE)"
        )
    return str(found)


def with_news(draft: Draft, wanted: str, context: Context) -> Draft:
    """The draft, with its news going where `manifest_with_news` says. Raises UsageError."""
    if wanted not in ("", OFF):
        reference(wanted, context.provider)  # refused before anything is packed or sent
    return dataclasses.replace(draft, make=lambda name: manifest_with_news(draft.make(name), wanted, context))


def manifest_with_news(manifest: Manifest, wanted: str, context: Context) -> Manifest:
    """The manifest, with its news going where it is `wanted`, or where the manifest says, or where the context does.

    Raises UsageError.
    """
    value = ""
    if wanted != OFF:
        given = reference(wanted, context.provider) if wanted else ""
        value = given or at(manifest, "metadata", "annotations", ANNOTATION_NOTIFY) or context.notify_url_from
    metadata = manifest["metadata"]
    others = {key: item for key, item in (metadata.get("annotations") or {}).items() if key != ANNOTATION_NOTIFY}
    annotations = {**others, **({ANNOTATION_NOTIFY: value} if value else {})}
    kept = {key: item for key, item in metadata.items() if key != "annotations"}
    return {**manifest, "metadata": {**kept, **({"annotations": annotations} if annotations else {})}}
