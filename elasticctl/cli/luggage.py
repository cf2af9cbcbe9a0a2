"""The workspace of a job: which folder goes along with `submit`, what the plan says about it, and its way to storage.

Imports modules of `elasticctl_train` that need no torch.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from elasticctl.cli import stored
from elasticctl.cli.gathering import Gathered, gather, pieces_of, told
from elasticctl.cli.output import say
from elasticctl.cli.plan import Request, below, storage_url
from elasticctl.cluster.base import Manifest
from elasticctl.config import LOCAL, Context
from elasticctl.errors import StorageError, UsageError
from elasticctl.podtemplate import WORKSPACE_FROM_VARIABLE, WORKSPACE_VARIABLE, hardware
from elasticctl.spec import ElasticJob
from elasticctl.wording import counted, shown
from elasticctl_train import storage as storages
from elasticctl_train.errors import MissingError, TrainError
from elasticctl_train.workspace import store

FOLDER = "workspaces"
"""What workspaces are kept under, beside the states of the jobs that share them."""
_QUICK = storages.Patience(tries=3, total_s=15.0, connect_s=5.0)
"""For a look that the job can do without."""


@dataclass(frozen=True, slots=True)
class Luggage:
    """A folder that goes along, as it was when the job was planned; `url`: where workspaces are kept."""

    folder: Path
    gathered: Gathered
    url: str

    @property
    def reference(self) -> str:
        """What a job's manifest says of it: `URL#DIGEST`."""
        return f"{self.url}#{self.gathered.listing.digest}"

    def within(self, script: Path) -> str:
        """The script's path in it. Raises UsageError for one that lies elsewhere or stays behind."""
        listing = self.gathered.listing
        if not script.is_relative_to(self.folder):
            raise UsageError(f"the script {shown(str(script))} is not in the workspace {self.folder}")
        path = script.relative_to(self.folder).as_posix()
        if all(item.path != path for item in listing.items):
            raise UsageError(
                f"the script {shown(path)} stays behind by the rules of .gitignore or .elasticctlignore: take it in"
                f" with a line !{path} in .elasticctlignore, or say --no-workspace"
            )
        return path

    def plan_line(self) -> str:
        """What goes along: files and bytes."""
        listing = self.gathered.listing
        return f"workspace: {counted(len(listing.files), 'file')}, {stored.size(listing.size_bytes)}, of {self.folder}"

    def say_plan(self) -> None:
        """The plan, and what cannot go along."""
        say(self.plan_line())
        self.say_left_out()

    def say_left_out(self) -> None:
        """Sockets and the like, and links that lead out of the folder."""
        if self.gathered.left_out:
            say(f"not in the workspace, because no file of it: {told(self.gathered.left_out)}")

    def send(self) -> None:
        """Have it in storage, and say what that took. Raises StorageError, or UsageError for a file that changes."""
        listing = self.gathered.listing
        try:
            place = storages.open(self.url)
            with stored.meter("workspace", listing.size_bytes) as on_bytes:
                sent = store.send(place, listing, _origin(self.folder), lambda f: pieces_of(self.folder, f), on_bytes)
        except TrainError as e:
            raise StorageError(
                f"cannot send the workspace: {e} (--no-workspace sends none, for scripts that are in the image)"
            ) from e
        news = f"{sent.files} of them sent, {stored.size(sent.size_bytes)}" if sent.files else "unchanged, nothing sent"
        say(f"{self.plan_line()}: {news}")
        self.say_left_out()


def pack(path: Path, request: Request, context: Context) -> Luggage | None:
    """What goes along with the script at an absolute path; None: nothing. Raises UsageError."""
    folder = Path(os.path.abspath(request.workspace)) if request.workspace else path.parent
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"--workspace {shown(request.workspace)} {what}")
    if not request.workspace and _is_everybodys(folder):
        if context.provider == LOCAL:
            say(f"nothing of {folder} goes along: the script is run as it is there at each start (--workspace DIR)")
            return None
        raise UsageError(
            f"the script lies in {folder}, which cannot go along as a whole: move it to a folder of its own, or say"
            f" --workspace DIR"
        )
    luggage = Luggage(folder, gather(folder, request.workspace_limit), _url(request.storage, context))
    luggage.within(path)
    return luggage


def deliver_named(manifest: Manifest) -> None:
    """Have the workspace that a manifest names in storage, made again from its folder if it was never sent.

    So that what --dry-run has printed can be submitted. Raises UsageError when the folder is not what it was.
    """
    env = hardware(ElasticJob.from_manifest(manifest)).env
    url, _, digest = env.get(WORKSPACE_VARIABLE, "").rpartition("#")
    if not url:
        return
    try:
        store.find(storages.open(url, _QUICK), digest)
        return
    except MissingError:
        pass
    except TrainError as e:
        say(f"cannot see whether the workspace is there: {e}")
        return
    folder = Path(env.get(WORKSPACE_FROM_VARIABLE, ""))
    again = f"the workspace {digest[:12]} that the manifest names was never sent"
    if not folder.is_absolute() or not folder.is_dir():
        raise UsageError(f"{again}, and its folder is not on this machine: make the manifest anew from the script")
    luggage = Luggage(folder, gather(folder, None), url)
    if luggage.gathered.listing.digest != digest:
        raise UsageError(f"{again}, and {folder} has changed since: make the manifest anew from the script")
    luggage.send()


def _url(given: str, context: Context) -> str:
    """Where workspaces are kept: below the storage that the job's own is chosen from. Raises UsageError."""
    base = given or context.storage
    if not base and context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths

        return local_paths().workspaces.as_uri()
    if not base:
        raise UsageError(f"--storage is needed in context {context.name} (or set it: elasticctl config set-context)")
    url = storage_url(base, os.getcwd())
    if context.provider != LOCAL and url.startswith("file:") and not _is_here(url):
        raise UsageError(
            f"the workspace cannot be sent to {url}, a folder that this machine does not have: use s3:// or gs://, or"
            f" --no-workspace with the script in the image"
        )
    return below(url, FOLDER)


def _is_here(url: str) -> bool:
    return Path(unquote(url.removeprefix("file://"))).is_dir()


def _is_everybodys(folder: Path) -> bool:
    """Is it a folder that holds more than one project: home, /, or the temporary one?"""
    shared = (Path.home(), Path(folder.anchor), Path(tempfile.gettempdir()))
    return any(os.path.realpath(folder) == os.path.realpath(other) for other in shared)


def _origin(folder: Path) -> str:
    """What names a folder of a machine, without telling which."""
    return hashlib.sha256(os.fsencode(f"{socket.gethostname()}:{folder}")).hexdigest()[:32]
