"""What a workspace consists of, and the digest that names it. Pure.

The digest covers paths, contents, the executable bit and where links lead; not times, owners or where the bytes are
kept. So the same folder has the same name on every machine, and whoever unpacks one can tell whether it is whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticctl_store.errors import DamagedError

FORMAT = "elasticctl-workspace/1"
MAX_ITEMS = 100_000
MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255
"""What macOS takes for a path, and both it and Linux for one name."""
_MAX_HOPS = 100
"""More links than any kernel follows (Linux: 40): who goes round in circles arrives nowhere."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class File:
    """A file by its path, its content by `sha256` (hexadecimal)."""

    path: str
    size_bytes: int
    sha256: str
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link; `target` is as `readlink` gives it, and stays within the workspace."""

    path: str
    target: str


@dataclass(frozen=True, slots=True)
class Folder:
    """An empty folder; others are known by what lies in them."""

    path: str


Item = File | Link | Folder


@dataclass(frozen=True, slots=True)
class Listing:
    """The items in order of their paths. Make one with `of` or `parse`, which check that it can be unpacked safely."""

    items: tuple[Item, ...]

    @classmethod
    def of(cls, items: Iterable[Item]) -> Listing:
        """A listing of these items, in any order. Raises DamagedError for one that may not be unpacked."""
        listing = cls(tuple(sorted(items, key=lambda item: item.path)))
        _check(listing.items)
        return listing

    @property
    def files(self) -> tuple[File, ...]:
        """The files alone."""
        return tuple(item for item in self.items if isinstance(item, File))

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """What names this workspace: 64 hexadecimal digits."""
        text = json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As JSON data; the same listing gives the same."""
        return {"format": FORMAT, "items": [_to_row(item) for item in self.items]}


def parse(data: Any) -> Listing:
    """The listing that `to_json` gave. Raises DamagedError for anything else, and for what may not be unpacked."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise DamagedError(f"not a workspace of this version ({FORMAT}): {found!r:.60}")
    rows = data.get("items")
    if not isinstance(rows, Sequence) or len(rows) > MAX_ITEMS:
        raise DamagedError("a workspace's items are missing, or more than can be")
    return Listing.of(_of_row(row) for row in rows)


def is_digest(text: object) -> bool:
    """Is it 64 hexadecimal digits, as sha256 gives them?"""
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


def unfit(path: str) -> str:
    """What is wrong with a path inside a workspace, in words that complete "its path …"; "" where nothing is."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    parts = path.split("/")
    if "\0" in path or not all(parts) or "." in parts or ".." in parts:
        return "is not names separated by single slashes"
    if len(encoded) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return "is too long"
    return ""


def leaves(path: str, links: Mapping[str, str]) -> bool:
    """Does the link at `path` lead out of the workspace? `links`: path -> target of every link there is.

    Links are followed as the kernel does it, one name after the other: `x/..` is not where `x` lies if `x` is a link.
    """
    at, hops = path.split("/")[:-1], 0
    todo = links[path].split("/")[::-1]
    if links[path].startswith("/"):
        return True
    while todo:
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            if not at:
                return True
            at.pop()
            continue
        at.append(name)
        target = links.get("/".join(at))
        if target is None:
            continue
        hops += 1
        if target.startswith("/"):
            return True
        if hops > _MAX_HOPS:
            return False
        at.pop()
        todo.extend(target.split("/")[::-1])
    return False


def _check(items: Sequence[Item]) -> None:
    """Raise DamagedError unless unpacking these can touch nothing outside of its folder, nor one item twice."""
    links = {item.path: item.target for item in items if isinstance(item, Link)}
    taken: set[str] = set()
    for item in items:
        wrong = unfit(item.path)
        if wrong:
            raise DamagedError(f"a workspace holds {item.path!r:.80}, and its path {wrong}")
        if item.path in taken:
            raise DamagedError(f"a workspace holds {item.path!r:.80} twice")
        taken.add(item.path)
        if isinstance(item, Link) and (unfit_target(item.target) or leaves(item.path, links)):
            raise DamagedError(f"the link {item.path!r:.80} of a workspace leads out of it")
    for item in items:
        parts = item.path.split("/")
        if any("/".join(parts[:depth]) in taken for depth in range(1, len(parts))):
            raise DamagedError(f"{item.path!r:.80} of a workspace lies below what is not a folder, or not an empty one")


def unfit_target(target: str) -> bool:
    """Can nothing be linked to this?"""
    try:
        return not target or "\0" in target or len(target.encode()) > MAX_PATH_BYTES
    except UnicodeEncodeError:
        return True


def _to_row(item: Item) -> list[Any]:
    if isinstance(item, File):
        return ["file", item.path, item.size_bytes, item.sha256, item.executable]
    return ["link", item.path, item.target] if isinstance(item, Link) else ["folder", item.path]


def _of_row(row: Any) -> Item:
    match row:
        case ["file", str(path), int(size_bytes), str(sha256), bool(executable)] if is_digest(sha256):
            if isinstance(size_bytes, bool) or size_bytes < 0:
                raise DamagedError(f"the size of {path!r:.80} in a workspace is {size_bytes!r:.20}")
            return File(path, size_bytes, sha256, executable)
        case ["link", str(path), str(target)]:
            return Link(path, target)
        case ["folder", str(path)]:
            return Folder(path)
    raise DamagedError(f"{row!r:.80} is no item of a workspace")
