"""From a folder to the listing of a workspace: what goes along, within a limit, and the digest of each file.

Reads only. What cannot go along and is no file, such as a socket or a link that leads elsewhere, is named.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticctl.cli import stored
from elasticctl.cli.ignoring import OWN_RULES, Rules, is_environment, rules_above
from elasticctl.errors import UsageError
from elasticctl.wording import joined, shown
from elasticctl_train.workspace.listing import MAX_ITEMS, File, Folder, Item, Link, Listing, leaves, unfit, unfit_target
from elasticctl_train.workspace.pieces import PIECE_BYTES

_NAMED = 3
_TRIES = 3
"""How often a file is read that somebody writes at the same time."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Gathered:
    """What goes along, and in words what was found and cannot."""

    listing: Listing
    left_out: tuple[str, ...] = ()


@dataclass(slots=True)
class _Found:
    """What a walk comes to: files with size and executable bit, links with target, empty folders."""

    files: dict[str, tuple[int, bool]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def gather(folder: Path, limit_bytes: int | None) -> Gathered:
    """What of `folder`, an absolute path, goes along.

    Raises UsageError for more than the limit, and for what cannot be read.
    """
    found = _Found()
    _walk(folder, "", rules_above(folder), found)
    _check_size(folder, found, limit_bytes)
    links = {path: target for path, target in found.links.items() if not _leaves(path, found)}
    items: list[Item] = [
        File(path, *_digest(folder, path), executable) for path, (_, executable) in found.files.items()
    ]
    items += [Link(path, target) for path, target in links.items()]
    items += [Folder(path) for path in found.folders]
    outside = [f"{path} -> {target}" for path, target in found.links.items() if path not in links]
    return Gathered(Listing.of(items), (*found.left_out, *outside))


def pieces_of(folder: Path, file: File) -> Iterator[bytes]:
    """The content of a gathered file. Raises UsageError when it is not what it was any more."""
    digest = hashlib.sha256()
    try:
        with _opened(folder / file.path) as source:
            while piece := source.read(PIECE_BYTES):
                digest.update(piece)
                yield piece
    except OSError as e:
        raise _unreadable(folder, file.path, e) from e
    if digest.hexdigest() != file.sha256:
        raise _changing(folder, file.path)


def _walk(folder: Path, inside: str, above: Rules, found: _Found) -> bool:
    """Look at one folder and those below it; returns whether anything in it goes along."""
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as e:
        raise UsageError(f"cannot read the folder {folder}: {e.strerror}; {_mend_leave_out()}") from e
    rules, any_goes = above.within(folder), False
    for entry in entries:
        path = f"{inside}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if rules.leave_out(folder / entry.name, is_folder) or (is_folder and is_environment(folder / entry.name)):
            continue
        wrong = unfit(path)
        if wrong:
            raise UsageError(f"{shown(path)} cannot go along: its path {wrong}; {_mend_leave_out()}")
        any_goes = True
        if is_folder:
            if not _walk(folder / entry.name, f"{path}/", rules, found):
                found.folders.append(path)
        else:
            _note(entry, path, found)
        if len(found.files) + len(found.links) + len(found.folders) > MAX_ITEMS:
            raise UsageError(f"the workspace has more than {MAX_ITEMS:,} files; {_mend_leave_out()}")
    return any_goes


def _note(entry: os.DirEntry[str], path: str, found: _Found) -> None:
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


def _leaves(path: str, found: _Found) -> bool:
    return unfit_target(found.links[path]) or leaves(path, found.links)


def _digest(folder: Path, path: str) -> tuple[int, str]:
    """Size and sha256 of a file that stood still while it was read."""
    for _ in range(_TRIES):
        try:
            with _opened(folder / path) as source:
                before, digest = os.fstat(source.fileno()), hashlib.sha256()
                while chunk := source.read(_READ_BYTES):
                    digest.update(chunk)
                after = os.fstat(source.fileno())
        except OSError as e:
            raise _unreadable(folder, path, e) from e
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            return after.st_size, digest.hexdigest()
    raise _changing(folder, path)


def _opened(path: Path) -> io.FileIO:
    """The file itself: no link that has taken its place, and no pipe that would never end."""
    return io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))


def _check_size(folder: Path, found: _Found, limit_bytes: int | None) -> None:
    total = sum(size for size, _ in found.files.values())
    if limit_bytes is None or total <= limit_bytes:
        return
    largest = sorted(found.files.items(), key=lambda item: (-item[1][0], item[0]))[:_NAMED]
    named = joined(f"{path} ({stored.size(size)})" for path, (size, _) in largest)
    top, below, _ = largest[0][0].partition("/")
    raise UsageError(
        f"the workspace {folder} has {stored.size(total)}, more than {stored.size(limit_bytes)}; the largest: {named}."
        f" Leave out what the job does not need with lines in {OWN_RULES}, such as /{top}{below}, raise"
        " --workspace-limit, or choose --workspace or --no-workspace"
    )


def _unreadable(folder: Path, path: str, error: OSError) -> UsageError:
    return UsageError(f"cannot read {folder / path}: {error.strerror}; {_mend_leave_out()}")


def _changing(folder: Path, path: str) -> UsageError:
    return UsageError(f"{folder / path} changed while it was read: submit again, or {_mend_leave_out()}")


def _mend_leave_out() -> str:
    return f"leave it out with a line in {OWN_RULES}"


def told(left_out: Sequence[str]) -> str:
    """What was found and stays behind, in a line: the first few, and how many more."""
    more = [f"{len(left_out) - _NAMED} more"] if len(left_out) > _NAMED else []
    return joined([*map(shown, left_out[:_NAMED]), *more])
