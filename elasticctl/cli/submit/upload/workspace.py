"""The workspace of a job: the folder that `submit` uploads, and how it reaches the storage."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from elasticctl.api.errors import JobStorageError, UsageError
from elasticctl.api.podtemplate import WORKSPACE_FROM_VARIABLE, WORKSPACE_VARIABLE, hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import plural, quote
from elasticctl.cli import job_storage
from elasticctl.cli.framework.output import say
from elasticctl.cli.submit.flags.job_flags import JobFlags
from elasticctl.cli.submit.spec_from_flags import child_url, needed_error, storage_url
from elasticctl.cli.submit.upload.collect_files import WorkspaceFiles, collect_files, left_out_line, pieces_of
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.job_storages import open_job_storage
from elasticctl.settings.contexts import LOCAL, Context
from elasticctl_store import storage as storages
from elasticctl_store.errors import MissingError, TrainError
from elasticctl_store.workspace import transfer

FOLDER = "workspaces"
"""What workspaces are kept under, beside the states of the jobs that share them."""
QUICK = storages.Patience(tries=3, total_s=15.0, connect_s=5.0)
"""For a look that the job can do without."""


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
        return f"workspace: {files}, {job_storage.size(listing.size_bytes)}, of {self.folder}"

    def say_plan(self) -> None:
        """Print the plan, and what cannot be included."""
        say(self.plan_line())
        self.say_left_out()

    def say_left_out(self) -> None:
        """Print what is left out: sockets and the like, and links that lead out of the folder or nowhere."""
        if self.gathered.left_out:
            say(f"left out of the workspace: {left_out_line(self.gathered.left_out)}")
        if self.gathered.loops:
            say(f"left out of the workspace, links that lead in a circle: {left_out_line(self.gathered.loops)}")

    def send(self) -> None:
        """Upload it if necessary, and report that. Raises StorageError, or UsageError for a file that changes."""
        listing = self.gathered.listing
        try:
            place = storages.open(self.url, storages.AT_A_TERMINAL)
            with job_storage.progress_bar("workspace", listing.size_bytes) as on_bytes:
                sent = transfer.send(
                    place, listing, _folder_id(self.folder), lambda f: pieces_of(self.folder, f), on_bytes
                )
        except TrainError as e:
            raise JobStorageError(
                f"cannot send the workspace: {e} (--no-workspace sends none, for scripts that are in the image)"
            ) from e
        outcome = (
            f"{sent.files} of them sent, {job_storage.size(sent.size_bytes)}"
            if sent.files
            else "unchanged, nothing sent"
        )
        say(f"{self.plan_line()}: {outcome}")
        self.say_left_out()


def plan_workspace(path: Path, request: JobFlags, context: Context) -> Workspace | None:
    """The workspace of the script at an absolute path, or of a command typed in that folder; None: nothing.

    Raises UsageError.
    """
    beside = path if path.is_dir() else path.parent
    folder = Path(os.path.abspath(request.workspace)) if request.workspace else beside
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"--workspace {quote(request.workspace)} {what}")
    if not request.workspace and _is_shared_folder(folder):
        if context.provider == LOCAL:
            say(
                f"nothing is copied from {folder}, which may hold more than one project (--workspace DIR copies a"
                " folder): each start runs the script as it is then"
            )
            return None
        raise UsageError(
            f"the script is in {folder}, which is too broad for a workspace. FIX: move it to a folder of its own, or"
            " give --workspace DIR"
        )
    workspace = Workspace(folder, collect_files(folder, request.workspace_limit), _url(request.storage, context))
    if path != beside:
        workspace.within(path)
    return workspace


def send_named_workspace(manifest: Manifest) -> None:
    """Upload the workspace of a manifest from its folder, unless it is in storage already.

    This is how the output of --dry-run can be submitted. Raises UsageError if the folder has changed.
    """
    env = hardware(ElasticJob.from_manifest(manifest)).env
    url, _, digest = env.get(WORKSPACE_VARIABLE, "").rpartition("#")
    if not url:
        return
    try:
        transfer.find(open_job_storage(url, QUICK), digest)
        return
    except MissingError:
        pass
    except TrainError as e:
        say(f"cannot check that the workspace is there: {e}")
        return
    folder = Path(env.get(WORKSPACE_FROM_VARIABLE, ""))
    again = f"the workspace {digest[:12]} that the manifest names was never uploaded"
    if not folder.is_absolute() or not folder.is_dir():
        raise UsageError(
            f"{again}, and its folder is not on this machine. FIX: make the manifest again from the script"
        )
    workspace = Workspace(folder, collect_files(folder, None), url)
    if workspace.gathered.listing.digest != digest:
        raise UsageError(f"{again}, and {folder} has changed since. FIX: make the manifest again from the script")
    workspace.send()


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
