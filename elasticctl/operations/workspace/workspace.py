"""The workspace of a job: the folder that `submit` uploads, and how it reaches the storage."""

from __future__ import annotations

import copy
import hashlib
import os
import socket
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from elasticctl.api.errors import JobStorageError, UsageError
from elasticctl.api.objects import at
from elasticctl.api.podtemplate import hardware, set_variable, worker_container
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import plural, quote, size_text
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.job_storages import open_job_storage
from elasticctl.operations.observer import Observer
from elasticctl.operations.storage_urls import child_url, needed_error, storage_url
from elasticctl.operations.submit.job_flags import WORKSPACE_LIMIT_BYTES, JobFlags
from elasticctl.operations.workspace.collect_files import WorkspaceFiles, collect_files, left_out_line, pieces_of
from elasticctl.settings.contexts import LOCAL, Context
from elasticctl_protocol import variables
from elasticctl_store import storage as storages
from elasticctl_store.errors import DamagedError, MissingError, TrainError
from elasticctl_store.workspace import transfer
from elasticctl_store.workspace.packing import Item, Listing

FOLDER = "workspaces"
"""What workspaces are kept under, next to the states of the jobs that share them."""
QUICK = storages.Patience(tries=3, total_s=15.0, connect_s=5.0)
"""For checks that the job can do without."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder to upload, as it was when the job was planned; workspaces are stored at `url`."""

    folder: Path
    gathered: WorkspaceFiles
    url: str

    @property
    def reference(self) -> str:
        """The value in a job's manifest: `URL#DIGEST`."""
        return f"{self.url}#{self.gathered.listing.digest}"

    def within(self, script: Path) -> str:
        """The script's path in it. Raises UsageError for one that is elsewhere or left out."""
        listing = self.gathered.listing
        if not script.is_relative_to(self.folder):
            raise UsageError(f"the script {quote(str(script))} is not in the workspace {self.folder}")
        path = script.relative_to(self.folder).as_posix()
        if all(item.path != path for item in listing.items):
            raise UsageError(
                f"the script {quote(path)} is left out by the rules of .gitignore or .elasticctlignore. FIX: include it"
                f" with a line !{path} in .elasticctlignore, or give --no-workspace"
            )
        return path

    def plan_line(self) -> str:
        """A line with the numbers of files and bytes."""
        listing = self.gathered.listing
        files = plural(len(listing.files), "file")
        return f"workspace: {files}, {size_text(listing.size_bytes)}, of {self.folder}"

    def plan_lines(self) -> tuple[str, ...]:
        """The plan, and what is left out: sockets and the like, and links that lead out of the folder or nowhere."""
        return (self.plan_line(), *self._left_out_lines())

    def _left_out_lines(self) -> tuple[str, ...]:
        left_out = ("left out of the workspace", self.gathered.left_out)
        loops = ("left out of the workspace, links that lead in a circle", self.gathered.loops)
        return tuple(f"{what}: {left_out_line(paths)}" for what, paths in (left_out, loops) if paths)

    def send(self, observer: Observer) -> None:
        """Upload it if necessary, and report that. Raises StorageError, or UsageError for a file that changes."""
        listing = self.gathered.listing
        try:
            place = storages.open(self.url, storages.AT_A_TERMINAL)
            with observer.transfer("workspace", listing.size_bytes) as on_bytes:
                sent = transfer.send(
                    place, listing, _folder_id(self.folder), lambda f: pieces_of(self.folder, f), on_bytes
                )
        except TrainError as e:
            raise JobStorageError(
                f"cannot send the workspace: {e} (--no-workspace sends none, for scripts that are in the image)"
            ) from e
        outcome = (
            f"{sent.files} of them sent, {size_text(sent.size_bytes)}" if sent.files else "unchanged, nothing sent"
        )
        for line in (f"{self.plan_line()}: {outcome}", *self._left_out_lines()):
            observer.report(line)


def plan_workspace(path: Path, flags: JobFlags, context: Context, observer: Observer) -> Workspace | None:
    """The workspace of the script at an absolute path, or of a command typed in that folder; None: nothing.

    Raises UsageError.
    """
    own = path if path.is_dir() else path.parent
    folder = Path(os.path.abspath(flags.workspace)) if flags.workspace else own
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"--workspace {quote(flags.workspace)} {what}")
    if not flags.workspace and _is_shared_folder(folder):
        if context.provider == LOCAL:
            observer.report(
                f"nothing is copied from {folder}, which may hold more than one project (--workspace DIR copies a"
                " folder): each start runs the script as it is then"
            )
            return None
        raise UsageError(
            f"the script is in {folder}, which is too broad for a workspace. FIX: move it to a folder of its own, or"
            " give --workspace DIR"
        )
    workspace = Workspace(folder, collect_files(folder, flags.workspace_limit, observer), _url(flags.storage, context))
    if path != own:
        workspace.within(path)
    return workspace


def send_named_workspace(manifest: Manifest, observer: Observer) -> None:
    """Upload the workspace of a manifest from its folder, unless it is in storage already.

    This is how the output of --dry-run can be submitted. Raises UsageError if the folder has changed.
    """
    env = hardware(ElasticJob.from_manifest(manifest)).env
    url, _, digest = env.get(variables.WORKSPACE, "").rpartition("#")
    if not url:
        return
    try:
        transfer.find(open_job_storage(url, QUICK), digest)
        return
    except MissingError:
        pass
    except TrainError as e:
        observer.report(f"cannot check that the workspace exists: {e}")
        return
    folder = Path(env.get(variables.WORKSPACE_FROM, ""))
    again = f"the workspace {digest[:12]} that the manifest names was never uploaded"
    if not folder.is_absolute() or not folder.is_dir():
        raise UsageError(
            f"{again}, and its folder is not on this machine. FIX: make the manifest again from the script"
        )
    workspace = Workspace(folder, collect_files(folder, None, observer), url)
    if workspace.gathered.listing.digest != digest:
        raise UsageError(f"{again}, and {folder} has changed since. FIX: make the manifest again from the script")
    workspace.send(observer)


def renew_workspace(
    manifest: Manifest, typed_in: Iterable[Path], observer: Observer
) -> tuple[Manifest, Workspace | None]:
    """The manifest with its folder's present state, and that workspace; or the same manifest and None.

    Reports what has changed, or why the folder is not used. A folder is only uploaded to remote storage if it contains
    one of the absolute paths `typed_in`: someone else's manifest must not choose what is sent. Raises UsageError if
    the folder lacks the job's script or cannot be packed.
    """
    env = hardware(ElasticJob.from_manifest(manifest)).env
    url, _, digest = env.get(variables.WORKSPACE, "").rpartition("#")
    folder = Path(env.get(variables.WORKSPACE_FROM, ""))
    if not url or not folder.is_absolute():
        return manifest, None
    if not folder.is_dir():
        observer.report(f"code: as it was submitted; its folder {folder} is not on this machine")
        return manifest, None
    if not url.startswith("file:") and not any(path.is_relative_to(folder) for path in typed_in):
        observer.report(f"code: as it was submitted; run this command in {folder} to use the folder as it is now")
        return manifest, None
    try:
        before = _listing(url, digest)
    except TrainError:
        return manifest, None  # without access to the storage, nothing could be uploaded to it either
    limit = max(WORKSPACE_LIMIT_BYTES, before.size_bytes if before is not None else 0)
    workspace = Workspace(folder, collect_files(folder, limit, observer), url)
    if workspace.gathered.listing.digest == digest:
        return manifest, workspace
    _check_command(manifest, workspace, before)
    what = "" if before is None else _changes(before, workspace.gathered.listing)
    observer.report(f"code: {folder} as it is now{what} (--same-code: as it was submitted)")
    made = copy.deepcopy(manifest)
    container = worker_container(at(made, "spec", "replicaSpecs", "Worker", "template") or {})
    for item in at(container, "env") or ():
        if at(item, "name") == variables.WORKSPACE:
            item["value"] = workspace.reference
            return made, workspace
    set_variable(container, variables.WORKSPACE, workspace.reference)
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


def _url(given: str, context: Context) -> str:
    """Where workspaces are stored: below the storage prefix of jobs. Raises UsageError."""
    base = given or context.storage
    if not base and context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths

        return local_paths().workspaces.as_uri()
    if not base:
        raise needed_error("--storage", context)
    url = storage_url(base, os.getcwd())
    if context.provider != LOCAL and url.startswith("file:") and not _is_here(url):
        raise UsageError(
            f"the workspace cannot be sent to {url}, a folder that this machine does not have."
            " FIX: use s3:// or gs://, or"
            f" --no-workspace with the script in the image"
        )
    return child_url(url, FOLDER)


def _is_here(url: str) -> bool:
    return Path(unquote(url.removeprefix("file://"))).is_dir()


def _is_shared_folder(folder: Path) -> bool:
    """True for a folder with more than one project: home, /, or the temporary folder."""
    shared = (Path(os.path.expanduser("~")), Path(folder.anchor), Path(tempfile.gettempdir()))
    return any(os.path.realpath(folder) == os.path.realpath(other) for other in shared)


def _folder_id(folder: Path) -> str:
    """An id of a folder on a machine that does not reveal its path."""
    return hashlib.sha256(os.fsencode(f"{socket.gethostname()}:{folder}")).hexdigest()[:32]
