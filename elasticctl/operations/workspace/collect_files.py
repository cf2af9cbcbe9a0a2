"""Collects the files of a job's workspace: as they are at one moment, within a limit, and without credentials."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elasticctl.api.errors import UsageError
from elasticctl.api.text import join_and, quote, size_text
from elasticctl.operations.observer import SILENT, Observer
from elasticctl.operations.workspace.credentials import (
    ContentScan,
    SuspectedCredential,
    findings_by_name,
    refuse_credentials,
)
from elasticctl.operations.workspace.ignore_rules import OWN_RULES, IgnoreRules, is_environment, rules_above
from elasticctl_store.workspace.packing import (
    MAX_ITEMS,
    PIECE_BYTES,
    File,
    Folder,
    Item,
    Lead,
    Listing,
    PackedLink,
    lead_of,
    unfit,
    unfit_target,
)

_NAMED = 3
_TRIES = 3
"""How often a file is read that changes meanwhile."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkspaceFiles:
    """The files of a workspace, and descriptions of what cannot be included; `loops` are links that lead nowhere."""

    listing: Listing
    left_out: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()


@dataclass(slots=True)
class _Walked:
    """The result of a walk: files with size and executable bit, links with target, empty folders.

    `named`: the files that a line of .elasticctlignore includes by name, which are not searched. `outputs`: the files,
    by device and inode, that this command itself writes to.
    """

    files: dict[str, tuple[int, bool]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    outputs: frozenset[tuple[int, int]] = field(default_factory=lambda: frozenset(_outputs()))


def collect_files(folder: Path, limit_bytes: int | None, observer: Observer = SILENT) -> WorkspaceFiles:
    """Collect the files of `folder`, an absolute path.

    Raises UsageError for more than the limit, for unreadable files, and for what looks like credentials.
    """
    found = _Walked()
    _walk(folder, "", rules_above(folder), found)
    _check_size(folder, found, limit_bytes)
    leads = {path: _lead_of(path, found) for path in found.links}
    items: list[Item] = []
    credentials: list[SuspectedCredential] = []
    for path, (_, executable) in found.files.items():
        scan = ContentScan(path)
        items.append(File(path, *_digest(folder, path, scan), executable))
        if path not in found.named:
            credentials += findings_by_name(path) or scan.findings
    refuse_credentials(str(folder), credentials, observer)
    items += [PackedLink(path, target) for path, target in found.links.items() if leads[path] is Lead.WITHIN]
    items += [Folder(path) for path in found.folders]
    outside, loops = (
        [f"{path} -> {target}" for path, target in found.links.items() if leads[path] is lead]
        for lead in (Lead.OUT, Lead.LOOP)
    )
    return WorkspaceFiles(Listing.of(items), (*found.left_out, *outside), tuple(loops))


def pieces_of(folder: Path, file: File) -> Iterator[bytes]:
    """The content of a collected file, in pieces. Raises UsageError if it has changed."""
    digest, left = hashlib.sha256(), file.size_bytes
    try:
        with _open_file(folder / file.path) as source:
            while piece := source.read(min(PIECE_BYTES, left)):
                digest.update(piece)
                left -= len(piece)
                yield piece
    except OSError as e:
        raise _unreadable_error(folder, file.path, e) from e
    if digest.hexdigest() != file.sha256:
        raise _changed_error(folder, file.path)


def _walk(folder: Path, inside: str, above: IgnoreRules, found: _Walked) -> bool:
    """Walk a folder and those below it; returns whether anything in it is included."""
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as e:
        raise UsageError(f"cannot read the folder {folder}: {e.strerror}. {_fix_leave_out()}") from e
    rules, any_goes = above.within(folder), False
    for entry in entries:
        path = f"{inside}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if rules.leaves_out(folder / entry.name, is_folder) or (is_folder and is_environment(folder / entry.name)):
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
            if rules.includes_by_name(folder / entry.name):
                found.named.add(path)
        if len(found.files) + len(found.links) + len(found.folders) > MAX_ITEMS:
            raise UsageError(f"the workspace has more than {MAX_ITEMS:,} files. {_fix_leave_out()}")
    return any_goes


def _add_entry(entry: os.DirEntry[str], path: str, found: _Walked) -> None:
    """Add a file or a link, as it is now; anything else is left out."""
    try:
        if entry.is_symlink():
            found.links[path] = os.readlink(entry.path)
            return
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return  # gone since the folder was listed
    if (status.st_dev, status.st_ino) in found.outputs:
        return
    if stat.S_ISREG(status.st_mode):
        found.files[path] = (status.st_size, bool(status.st_mode & stat.S_IXUSR))
    else:
        found.left_out.append(path)


def _outputs() -> Iterator[tuple[int, int]]:
    """The files that this command writes to: `elasticctl submit train.py > train.log` does not include the log."""
    for descriptor in (1, 2):
        with suppress(OSError):  # it is closed
            status = os.fstat(descriptor)
            yield status.st_dev, status.st_ino


def _lead_of(path: str, found: _Walked) -> Lead:
    return Lead.OUT if unfit_target(found.links[path]) else lead_of(path, found.links)


def _digest(folder: Path, path: str, scan: ContentScan) -> tuple[int, str]:
    """Size and sha256 of a file, which is searched at the same time; a file that grows counts with its first size.

    `pieces_of` checks that the same bytes are sent later.
    """
    for _ in range(_TRIES):
        try:
            with _open_file(folder / path) as source:
                before, digest = os.fstat(source.fileno()), hashlib.sha256()
                left = before.st_size
                while chunk := source.read(min(_READ_BYTES, left)):
                    digest.update(chunk)
                    scan.feed(chunk)
                    left -= len(chunk)
                after = os.fstat(source.fileno())
        except OSError as e:
            raise _unreadable_error(folder, path, e) from e
        stood_still = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        if left == 0 and (stood_still or after.st_size > before.st_size):
            return before.st_size, digest.hexdigest()
    raise _changed_error(folder, path)


def _open_file(path: Path) -> io.FileIO:
    """Open the file, but not a link that has replaced it, nor a pipe that would never end."""
    return io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))


def _check_size(folder: Path, found: _Walked, limit_bytes: int | None) -> None:
    total = sum(size for size, _ in found.files.values())
    if limit_bytes is None or total <= limit_bytes:
        return
    largest = sorted(found.files.items(), key=lambda item: (-item[1][0], item[0]))[:_NAMED]
    named = join_and(f"{path} ({size_text(size)})" for path, (size, _) in largest)
    top, below, _ = largest[0][0].partition("/")
    raise UsageError(
        f"the workspace {folder} has {size_text(total)}, more than {size_text(limit_bytes)};"
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
    """What was found but left out, in one line: the first few names, and the number of others."""
    more = [f"{len(left_out) - _NAMED} more"] if len(left_out) > _NAMED else []
    return join_and([*map(quote, left_out[:_NAMED]), *more])
