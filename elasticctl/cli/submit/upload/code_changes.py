"""Compares the code of two jobs, as stored in their workspaces."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from elasticctl.api.podtemplate import WORKSPACE_VARIABLE, hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.cli.submit.upload.workspace import QUICK
from elasticctl.cluster.job_storages import open_job_storage
from elasticctl_store.errors import TrainError
from elasticctl_store.storage import Storage
from elasticctl_store.workspace import transfer
from elasticctl_store.workspace.packing import File, Item

MAX_FILE_BYTES = 1_000_000
"""Larger files are named; no person reads how they differ."""
MAX_BYTES = 20_000_000


@dataclass(frozen=True, slots=True)
class CodeChanges:
    """Paths by their change from one workspace to the other; `unknown` is why the changes are unknown.

    `lines` are a unified diff of the text files among them.
    """

    changed: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def same(self) -> bool:
        """True if both run the same code, as far as is known."""
        return not (self.changed or self.new or self.gone or self.unknown)


@dataclass(slots=True)
class _Code:
    """A workspace, as far as it has been read."""

    storage: Storage
    kept: transfer.Kept
    contents: dict[str, bytes] = field(default_factory=dict)

    def by_path(self) -> Mapping[str, Item]:
        return {item.path: item for item in self.kept.listing.items}


def code_changes(before: ElasticJob, after: ElasticJob) -> CodeChanges:
    """The changes from one job's code to the other's."""
    places = [hardware(job).env.get(WORKSPACE_VARIABLE, "").rpartition("#") for job in (before, after)]
    bare = [job.name for job, (url, _, _) in zip((before, after), places, strict=True) if not url]
    if len(bare) == 2:
        return CodeChanges(unknown="both run what is in their image or on this machine")
    if bare:
        return CodeChanges(unknown=f"{bare[0]} brought no workspace along")
    if places[0][2] == places[1][2]:
        return CodeChanges()
    try:
        one, two = (_open(url, digest) for url, _, digest in places)
        return _changes(one, two)
    except TrainError as e:
        return CodeChanges(unknown=str(e))


def _open(url: str, digest: str) -> _Code:
    storage = open_job_storage(url, QUICK)
    return _Code(storage, transfer.find(storage, digest))


def _changes(one: _Code, two: _Code) -> CodeChanges:
    then, now = one.by_path(), two.by_path()
    changed = [path for path in now if path in then and then[path] != now[path]]
    new, gone = [path for path in now if path not in then], [path for path in then if path not in now]
    paths = sorted((*changed, *new, *gone))
    for code, items in ((one, then), (two, now)):
        code.contents = transfer.read_files(code.storage, code.kept, _readable(items.get(path) for path in paths))
    lines = [line for path in paths for line in _diff(path, _text(one, then.get(path)), _text(two, now.get(path)))]
    return CodeChanges(tuple(changed), tuple(new), tuple(gone), tuple(lines))


def _readable(items: Iterator[Item | None]) -> Iterator[File]:
    """The files among them that are small enough to compare, up to a total size."""
    room = MAX_BYTES
    for item in items:
        if isinstance(item, File) and item.size_bytes <= min(MAX_FILE_BYTES, room):
            room -= item.size_bytes
            yield item


def _text(code: _Code, item: Item | None) -> list[str] | None:
    """The lines of a file; none if it does not exist, None if it is not text or was not read."""
    if item is None:
        return []
    content = code.contents.get(item.sha256) if isinstance(item, File) else None
    try:
        return None if content is None or b"\0" in content else content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return None


def _diff(path: str, before: list[str] | None, after: list[str] | None) -> Iterator[str]:
    if before is None or after is None:
        return iter([f"{path}: differs (no text, or too large to show)"])
    return difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm="")
