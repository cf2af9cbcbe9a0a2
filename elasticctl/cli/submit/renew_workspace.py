"""Updates the workspace of an earlier job, or of a manifest, to its folder's present state."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from pathlib import Path

from elasticctl.api.errors import UsageError
from elasticctl.api.objects import at
from elasticctl.api.podtemplate import WORKSPACE_FROM_VARIABLE, WORKSPACE_VARIABLE, hardware, worker_container
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import plural, quote
from elasticctl.cli.framework.output import say
from elasticctl.cli.submit.derived_manifests import set_variable
from elasticctl.cli.submit.flags.job_flags import WORKSPACE_LIMIT_BYTES
from elasticctl.cli.submit.upload.collect_files import collect_files, left_out_line
from elasticctl.cli.submit.upload.workspace import QUICK, Workspace
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.job_storages import open_job_storage
from elasticctl_store.errors import DamagedError, MissingError, TrainError
from elasticctl_store.workspace import transfer
from elasticctl_store.workspace.packing import Item, Listing


def renew_workspace(manifest: Manifest, typed_in: Iterable[Path]) -> tuple[Manifest, Workspace | None]:
    """The manifest with its folder's present state, and that workspace; or the same manifest and None.

    Prints what has changed, or why the folder is not used. A folder is only uploaded to remote storage if it contains
    one of the absolute paths `typed_in`: someone else's manifest must not choose what is sent. Raises UsageError if
    the folder lacks the job's script or cannot be packed.
    """
    env = hardware(ElasticJob.from_manifest(manifest)).env
    url, _, digest = env.get(WORKSPACE_VARIABLE, "").rpartition("#")
    folder = Path(env.get(WORKSPACE_FROM_VARIABLE, ""))
    if not url or not folder.is_absolute():
        return manifest, None
    if not folder.is_dir():
        say(f"code: as it was submitted; its folder {folder} is not on this machine")
        return manifest, None
    if not url.startswith("file:") and not any(path.is_relative_to(folder) for path in typed_in):
        say(f"code: as it was submitted; run this command in {folder} to use the folder as it is now")
        return manifest, None
    try:
        before = _listing(url, digest)
    except TrainError:
        return manifest, None  # without access to the storage, nothing could be uploaded to it either
    limit = max(WORKSPACE_LIMIT_BYTES, before.size_bytes if before is not None else 0)
    workspace = Workspace(folder, collect_files(folder, limit), url)
    if workspace.gathered.listing.digest == digest:
        return manifest, workspace
    _check_command(manifest, workspace, before)
    what = "" if before is None else _changes(before, workspace.gathered.listing)
    say(f"code: {folder} as it is now{what} (--same-code: as it was submitted)")
    made = copy.deepcopy(manifest)
    container = worker_container(at(made, "spec", "replicaSpecs", "Worker", "template") or {})
    for item in at(container, "env") or ():
        if at(item, "name") == WORKSPACE_VARIABLE:
            item["value"] = workspace.reference
            return made, workspace
    set_variable(container, WORKSPACE_VARIABLE, workspace.reference)
    return made, workspace


def _listing(url: str, digest: str) -> Listing | None:
    """The files that the job was submitted with; None if never uploaded, or damaged. Raises TrainError."""
    try:
        return transfer.find(open_job_storage(url, QUICK), digest).listing
    except (MissingError, DamagedError):
        return None


def _check_command(manifest: Manifest, workspace: Workspace, before: Listing | None) -> None:
    """Raise UsageError for a folder without the script."""
    container = worker_container(at(manifest, "spec", "replicaSpecs", "Worker", "template") or {})
    words = [str(word) for key in ("command", "args") for word in at(container, key) or ()]
    here = {item.path for item in workspace.gathered.listing.items}
    then = {item.path for item in before.items} if before is not None else set()
    for word in words:
        path = os.path.relpath(word, workspace.folder) if os.path.isabs(word) else os.path.normpath(word)
        if path in then and path not in here:
            raise UsageError(
                f"{workspace.folder} has no {quote(path)} any more, which the job runs. FIX: add --same-code to run it"
                " as it was submitted"
            )


def _changes(before: Listing, now: Listing) -> str:
    """`: 2 files changed (a.py and b.py), 1 file new (c.py)`."""
    then, here = _by_path(before), _by_path(now)
    parts = (
        ("changed", [path for path in here if path in then and here[path] != then[path]]),
        ("new", [path for path in here if path not in then]),
        ("gone", [path for path in then if path not in here]),
    )
    return ": " + ", ".join(
        f"{plural(len(paths), 'file')} {word} ({left_out_line(paths)})" for word, paths in parts if paths
    )


def _by_path(listing: Listing) -> dict[str, Item]:
    return {item.path: item for item in listing.items}
