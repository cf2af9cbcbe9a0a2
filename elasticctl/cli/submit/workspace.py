"""The workspace of a job: which files of a folder go with `submit`, and how they reach the storage."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from elasticctl.api.errors import JobStorageError, UsageError
from elasticctl.api.podtemplate import WORKSPACE_FROM_VARIABLE, WORKSPACE_VARIABLE, hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import join_and, plural, quote
from elasticctl.cli import job_storage
from elasticctl.cli.framework.output import say
from elasticctl.cli.submit.ignore_rules import OWN_RULES, IgnoreRules, is_environment, rules_above
from elasticctl.cli.submit.plan import JobFlags, child_url, storage_url
from elasticctl.cluster.base import Manifest
from elasticctl.settings.contexts import LOCAL, Context
from elasticctl_store import storage as storages
from elasticctl_store.errors import MissingError, TrainError
from elasticctl_store.workspace import transfer
from elasticctl_store.workspace.packing import (
    MAX_ITEMS,
    PIECE_BYTES,
    File,
    Folder,
    Item,
    Link,
    Listing,
    leaves,
    unfit,
    unfit_target,
)

_NAMED = 3
_TRIES = 3
"""How often a file is read that somebody writes at the same time."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkspaceFiles:
    """What goes along, and in words what was found and cannot."""

    listing: Listing
    left_out: tuple[str, ...] = ()


@dataclass(slots=True)
class _Walked:
    """What a walk comes to: files with size and executable bit, links with target, empty folders."""

    files: dict[str, tuple[int, bool]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def collect_files(folder: Path, limit_bytes: int | None) -> WorkspaceFiles:
    """What of `folder`, an absolute path, goes along.

    Raises UsageError for more than the limit, and for what cannot be read.
    """
    found = _Walked()
    _walk(folder, "", rules_above(folder), found)
    _check_size(folder, found, limit_bytes)
    links = {path: target for path, target in found.links.items() if not _leaves(path, found)}
    items: list[Item] = [
        File(path, *_digest(folder, path), executable) for path, (_, executable) in found.files.items()
    ]
    items += [Link(path, target) for path, target in links.items()]
    items += [Folder(path) for path in found.folders]
    outside = [f"{path} -> {target}" for path, target in found.links.items() if path not in links]
    return WorkspaceFiles(Listing.of(items), (*found.left_out, *outside))


def pieces_of(folder: Path, file: File) -> Iterator[bytes]:
    """The content of a gathered file. Raises UsageError when it is not what it was any more."""
    digest = hashlib.sha256()
    try:
        with _open_file(folder / file.path) as source:
            while piece := source.read(PIECE_BYTES):
                digest.update(piece)
                yield piece
    except OSError as e:
        raise _unreadable_error(folder, file.path, e) from e
    if digest.hexdigest() != file.sha256:
        raise _changed_error(folder, file.path)


def _walk(folder: Path, inside: str, above: IgnoreRules, found: _Walked) -> bool:
    """Look at one folder and those below it; returns whether anything in it goes along."""
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as e:
        raise UsageError(f"cannot read the folder {folder}: {e.strerror}. {_fix_leave_out()}") from e
    rules, any_goes = above.within(folder), False
    for entry in entries:
        path = f"{inside}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if rules.leave_out(folder / entry.name, is_folder) or (is_folder and is_environment(folder / entry.name)):
            continue
        wrong = unfit(path)
        if wrong:
            raise UsageError(f"{quote(path)} cannot be in the workspace: its path {wrong}. {_fix_leave_out()}")
        any_goes = True
        if is_folder:
            if not _walk(folder / entry.name, f"{path}/", rules, found):
                found.folders.append(path)
        else:
            _add_entry(entry, path, found)
        if len(found.files) + len(found.links) + len(found.folders) > MAX_ITEMS:
            raise UsageError(f"the workspace has more than {MAX_ITEMS:,} files. {_fix_leave_out()}")
    return any_goes


def _add_entry(entry: os.DirEntry[str], path: str, found: _Walked) -> None:
    """A file or a link, as it is now; what is neither is left out."""
    try:
        if entry.is_symlink():
            found.links[path] = os.readlink(entry.path)
            return
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return  # gone since the folder was listed
    if stat.S_ISREG(status.st_mode):
        found.files[path] = (status.st_size, bool(status.st_mode & stat.S_IXUSR))
    else:
        found.left_out.append(path)


def _leaves(path: str, found: _Walked) -> bool:
    return unfit_target(found.links[path]) or leaves(path, found.links)


def _digest(folder: Path, path: str) -> tuple[int, str]:
    """Size and sha256 of a file that stood still while it was read."""
    for _ in range(_TRIES):
        try:
            with _open_file(folder / path) as source:
                before, digest = os.fstat(source.fileno()), hashlib.sha256()
                while chunk := source.read(_READ_BYTES):
                    digest.update(chunk)
                after = os.fstat(source.fileno())
        except OSError as e:
            raise _unreadable_error(folder, path, e) from e
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            return after.st_size, digest.hexdigest()
    raise _changed_error(folder, path)


def _open_file(path: Path) -> io.FileIO:
    """The file itself: no link that has taken its place, and no pipe that would never end."""
    return io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))


def _check_size(folder: Path, found: _Walked, limit_bytes: int | None) -> None:
    total = sum(size for size, _ in found.files.values())
    if limit_bytes is None or total <= limit_bytes:
        return
    largest = sorted(found.files.items(), key=lambda item: (-item[1][0], item[0]))[:_NAMED]
    named = join_and(f"{path} ({job_storage.size(size)})" for path, (size, _) in largest)
    top, below, _ = largest[0][0].partition("/")
    raise UsageError(
        f"the workspace {folder} has {job_storage.size(total)}, more than {job_storage.size(limit_bytes)};"
        f" the largest: {named}."
        f" FIX: leave out what the job does not need with lines in {OWN_RULES}, such as /{top}{below}, raise"
        " --workspace-limit, or choose --workspace or --no-workspace"
    )


def _unreadable_error(folder: Path, path: str, error: OSError) -> UsageError:
    return UsageError(f"cannot read {folder / path}: {error.strerror}. {_fix_leave_out()}")


def _changed_error(folder: Path, path: str) -> UsageError:
    return UsageError(f"{folder / path} changed while it was read: submit again. {_fix_leave_out()}")


def _fix_leave_out() -> str:
    return f"FIX: leave it out with a line in {OWN_RULES}"


def left_out_line(left_out: Sequence[str]) -> str:
    """What was found and stays behind, in a line: the first few, and how many more."""
    more = [f"{len(left_out) - _NAMED} more"] if len(left_out) > _NAMED else []
    return join_and([*map(quote, left_out[:_NAMED]), *more])


FOLDER = "workspaces"
"""What workspaces are kept under, beside the states of the jobs that share them."""
_QUICK = storages.Patience(tries=3, total_s=15.0, connect_s=5.0)
"""For a look that the job can do without."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder that goes along, as it was when the job was planned; `url`: where workspaces are kept."""

    folder: Path
    gathered: WorkspaceFiles
    url: str

    @property
    def reference(self) -> str:
        """What a job's manifest says of it: `URL#DIGEST`."""
        return f"{self.url}#{self.gathered.listing.digest}"

    def within(self, script: Path) -> str:
        """The script's path in it. Raises UsageError for one that lies elsewhere or stays behind."""
        listing = self.gathered.listing
        if not script.is_relative_to(self.folder):
            raise UsageError(f"the script {quote(str(script))} is not in the workspace {self.folder}")
        path = script.relative_to(self.folder).as_posix()
        if all(item.path != path for item in listing.items):
            raise UsageError(
                f"the script {quote(path)} is left out by the rules of .gitignore or .elasticctlignore. FIX: take it in"
                f" with a line !{path} in .elasticctlignore, or give --no-workspace"
            )
        return path

    def plan_line(self) -> str:
        """What goes along: files and bytes."""
        listing = self.gathered.listing
        files = plural(len(listing.files), "file")
        return f"workspace: {files}, {job_storage.size(listing.size_bytes)}, of {self.folder}"

    def say_plan(self) -> None:
        """The plan, and what cannot go along."""
        say(self.plan_line())
        self.say_left_out()

    def say_left_out(self) -> None:
        """Sockets and the like, and links that lead out of the folder."""
        if self.gathered.left_out:
            say(f"left out of the workspace: {left_out_line(self.gathered.left_out)}")

    def send(self) -> None:
        """Have it in storage, and say what that took. Raises StorageError, or UsageError for a file that changes."""
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
    """What goes along with the script at an absolute path; None: nothing. Raises UsageError."""
    folder = Path(os.path.abspath(request.workspace)) if request.workspace else path.parent
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"--workspace {quote(request.workspace)} {what}")
    if not request.workspace and _is_shared_folder(folder):
        if context.provider == LOCAL:
            say(f"no file of {folder} is copied: each start runs the script as it is there (--workspace DIR)")
            return None
        raise UsageError(
            f"the script lies in {folder}, which is too wide for a workspace. FIX: move it to a"
            " folder of its own, or give"
            f" --workspace DIR"
        )
    workspace = Workspace(folder, collect_files(folder, request.workspace_limit), _url(request.storage, context))
    workspace.within(path)
    return workspace


def send_named_workspace(manifest: Manifest) -> None:
    """Have the workspace that a manifest names in storage, made again from its folder if it was never sent.

    So that what --dry-run has printed can be submitted. Raises UsageError when the folder is not what it was.
    """
    env = hardware(ElasticJob.from_manifest(manifest)).env
    url, _, digest = env.get(WORKSPACE_VARIABLE, "").rpartition("#")
    if not url:
        return
    try:
        transfer.find(storages.open(url, _QUICK), digest)
        return
    except MissingError:
        pass
    except TrainError as e:
        say(f"cannot check that the workspace is there: {e}")
        return
    folder = Path(env.get(WORKSPACE_FROM_VARIABLE, ""))
    again = f"the workspace {digest[:12]} that the manifest names was never sent"
    if not folder.is_absolute() or not folder.is_dir():
        raise UsageError(
            f"{again}, and its folder is not on this machine. FIX: make the manifest again from the script"
        )
    workspace = Workspace(folder, collect_files(folder, None), url)
    if workspace.gathered.listing.digest != digest:
        raise UsageError(f"{again}, and {folder} has changed since. FIX: make the manifest again from the script")
    workspace.send()


def _url(given: str, context: Context) -> str:
    """Where workspaces are kept: below the storage that the job's own is chosen from. Raises UsageError."""
    base = given or context.storage
    if not base and context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths

        return local_paths().workspaces.as_uri()
    if not base:
        raise UsageError(
            f"--storage is needed in context {context.name} (FIX: add it, or set it with"
            " `elasticctl config set-context`)"
        )
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
    """Is it a folder that holds more than one project: home, /, or the temporary one?"""
    shared = (Path.home(), Path(folder.anchor), Path(tempfile.gettempdir()))
    return any(os.path.realpath(folder) == os.path.realpath(other) for other in shared)


def _folder_id(folder: Path) -> str:
    """What names a folder of a machine, without telling which."""
    return hashlib.sha256(os.fsencode(f"{socket.gethostname()}:{folder}")).hexdigest()[:32]
