"""The journal of a storage URL: keys, format and retention of its entries. Pure: no I/O, no clock.

    journal/<999999999999 - position>.json    one entry each; a listing returns the newest first
    data/<save>/share-00000-of-00003.json     what one rank wrote: its digests, and its part of the state tree
    data/<save>/share-00000-of-00003.safetensors
    data/<save>/committed                             a copy of the entry, written after it: see `repair`
    base/<save>/share-00000-of-00003.safetensors      what that rank has written once, for later saves of its run too
    base/<save with `table-` before the run's id>/…   tables of which few rows change from save to save
    base/rows-<save>/share-00000-of-00003.safetensors a patch: rows of those tables that have changed since

An entry is created only if its position is free. There are three kinds. A run *takes over* by appending a `Generation`.
A checkpoint becomes visible when its `Commit` is appended, after all of its data. A `Moved` closes the journal. A run
appends directly after its own last entry: if anybody has taken over since, that position is taken and the append is
refused. This one precondition is both the commit and the fence against zombies. Generation entries are therefore never
deleted (some 200 bytes per restart). Nothing refers to the newest commit: a listing finds it, and its checksums show
whether it is intact.

What does not change from save to save is stored in *base files*, which have no commit of their own: a commit names the
folders below `base/` that it needs, and such a folder exists for as long as any commit names it. Versions without
support for base files refuse such commits as being in another format, and delete none of their data. Commits that need
patches are in a third format, likewise. To older versions, the folders of patches do not have the names of saves.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from elasticctl_store.errors import DamagedError, FormatError
from elasticctl_store.storage.base import MOST_ENTRY_BYTES

FORMAT, FORMAT_WITH_BASES, FORMAT_WITH_PATCHES = 2, 3, 4
JOURNAL = "journal/"
DATA = "data/"
BASE = "base/"
_TOP = 999_999_999_999
_MOST_ENTRIES = 10**11
"""The highest position that counts: a higher one was not written by a run, and would leave no key for the next."""
MOST_GENERATIONS = 10**12
"""More than any job has."""
_MAX_COUNT = 1 << 62
_MAX_TIME = 1e11  # some thousand years
_CHECKSUM = re.compile(r"crc32:[0-9a-f]{8}", re.ASCII)
_PATCHES = f"{BASE}rows-"
_SAVE = re.compile(
    rf"(?:{DATA}|{BASE}|{_PATCHES})g(\d{{6,18}})-n(\d{{6,18}})-step(\d{{9,18}})-(?:table-)?([^/]+)/", re.ASCII
)
_SAVED_FILE = re.compile(r"share-\d{5,9}-of-\d{5,9}\.(?:json|safetensors)(?:\.[0-9a-f]+\.partial)?", re.ASCII)
_BASE_FILE = re.compile(r"[A-Za-z0-9._-]{1,100}/share-\d{5,9}-of-\d{5,9}\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A data object and what it must be: `checksum` is `crc32:` and eight hexadecimal digits."""

    key: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Save:
    """The meaning of a save folder's name: the `number`-th save of the run `run_id`, which has generation
    `generation`."""

    generation: int
    number: int
    step: int
    run_id: str

    @property
    def order(self) -> tuple[int, int]:
        """A key that sorts the saves of one URL in the order in which they were made."""
        return self.generation, self.number


@dataclass(frozen=True, slots=True)
class Generation:
    """The entry by which a run took over the URL at `position`; `at` is in seconds since the epoch, UTC."""

    position: int
    generation: int
    run_id: str
    host: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Commit:
    """A complete checkpoint. `shares` holds one share document for each rank that wrote, in order of rank.

    `number` counts the commits of this URL from 1; `size_bytes` is the size of all its data; `metrics` are the user's
    own numbers. `not_finite` names the model's parameters that contain a NaN or an infinity. `bases` are the folders of
    the base files and patches that it needs, in order; their files are part of `size_bytes`. `at` is in seconds since
    the epoch, UTC.
    """

    position: int
    generation: int
    number: int
    step: int
    epoch: int
    shares: tuple[ObjectRef, ...]
    size_bytes: int
    at: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The prefix below which all data of this checkpoint alone is stored."""
        return folder_of(self.shares[0].key)


@dataclass(frozen=True, slots=True)
class Moved:
    """The job continues at the URL `to`: no run may take over this one any more. `at` is in seconds since the epoch,
    UTC."""

    position: int
    generation: int
    to: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Retention:
    """Which commits to keep: the `last` newest, and those older ones that either of the other two rules selects.

    `every_s` (in seconds; None: no such rule) keeps commits for good, each made at least that long after the one before
    it. `best` keeps that many commits with the highest (`mode` "max") or lowest ("min") value of `metric`.
    """

    last: int = 3
    every_s: float | None = None
    best: int = 0
    metric: str = ""
    mode: Literal["min", "max"] = "min"


Entry = Generation | Commit | Moved
_KINDS: Mapping[str, type[Generation] | type[Commit] | type[Moved]] = {
    "generation": Generation,
    "commit": Commit,
    "moved": Moved,
}


def key_of(position: int) -> str:
    """Return the key of the journal's entry at `position` (from 1)."""
    return f"{JOURNAL}{_TOP - position:012d}.json"


def position_of(key: str) -> int | None:
    """Return the position that an entry's key stands for; None for another key, such as that of a partial file."""
    name = key.removeprefix(JOURNAL).removesuffix(".json")
    is_entry = key.startswith(JOURNAL) and key.endswith(".json") and len(name) == 12
    position = _TOP - int(name) if is_entry and name.isascii() and name.isdigit() else None
    return None if position is None or position > _MOST_ENTRIES else position


def position_of_partial(key: str) -> int | None:
    """Return the position of the entry that a partial file (see `storage.local`) was to become; None for any other
    key."""
    entry, _, rest = key.partition(".json.")
    return position_of(f"{entry}.json") if rest.endswith(".partial") else None


def save_folder(generation: int, number: int, step: int, run_id: str) -> str:
    """Return the prefix of one save's data. It is unique to the save, and readable."""
    return f"{DATA}g{generation:06d}-n{number:06d}-step{step:09d}-{run_id}/"


def save_of(folder: str) -> Save | None:
    """Return the save that a folder belongs to; None if its name is not that of a save.

    Another folder is not ours, for example a dataset in `data/`, and is never deleted.
    """
    found = _SAVE.fullmatch(folder)
    return Save(int(found[1]), int(found[2]), int(found[3]), found[4]) if found else None


def number_of(folder: str) -> int | None:
    """Return the number within its run of the save that a folder belongs to; None if its name is not that of a save."""
    save = save_of(folder)
    return save.number if save else None


def run_of(folder: str) -> str:
    """Return the id of the run that a save folder belongs to."""
    return folder.rstrip("/").rpartition("-")[2]


def marker_key(folder: str) -> str:
    """Return the key of the copy of a commit's entry. A save without one may never have been committed."""
    return f"{folder}committed"


def share_key(folder: str, rank: int, world_size: int) -> str:
    """Return the key of one rank's share document."""
    return f"{folder}share-{rank:05d}-of-{world_size:05d}.json"


def tensors_key(share: str) -> str:
    """Return the key of the tensor file that belongs to a share document."""
    return share.removesuffix(".json") + ".safetensors"


def base_key(share: str) -> str:
    """Return the key of the base file that a rank writes together with the share document of this key."""
    return BASE + tensors_key(share).removeprefix(DATA)


def table_key(share: str) -> str:
    """Return the key of the base file of tables that a rank writes together with the share document of this key."""
    folder, _, file = base_key(share).rpartition("/")
    save, _, run = folder.rpartition("-")
    return f"{save}-table-{run}/{file}"


def patch_key(share: str) -> str:
    """Return the key of the patch that a rank writes together with the share document of this key."""
    return _PATCHES + base_key(share).removeprefix(BASE)


def is_base_file(key: str) -> bool:
    """Return whether the key is that of a base file that a save has written, and which is not a patch."""
    return _is_in_base(key) and not key.startswith(_PATCHES)


def is_patch(key: str) -> bool:
    """Return whether the key is that of a patch that a save has written."""
    return _is_in_base(key) and key.startswith(_PATCHES)


def _is_in_base(key: str) -> bool:
    folder = folder_of(key)
    return key.startswith(BASE) and save_of(folder) is not None and bool(_BASE_FILE.fullmatch(key.removeprefix(BASE)))


def is_named_by_save(key: str) -> bool:
    """Return whether a file has the name of a share document or a tensor file, or of the beginning of one."""
    return bool(_SAVED_FILE.fullmatch(key.rpartition("/")[2]))


def folder_of(key: str) -> str:
    """Return the save folder that contains a key below `data/` or `base/`."""
    return "/".join(key.split("/")[:2]) + "/"


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    """Return the CRC-32 of the concatenated parts in its stored form. It protects against damage, not against
    forgery."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return as_checksum(crc)


def as_checksum(crc: int) -> str:
    """Return a CRC-32 in its stored form."""
    return f"crc32:{crc:08x}"


def encode(entry: Entry) -> bytes:
    """Return an entry as JSON that includes its own digest."""
    kind = next(name for name, kind in _KINDS.items() if isinstance(entry, kind))
    body = {"kind": kind, **asdict(entry)}
    for name in ("not_finite", "bases"):  # most commits have none, and older versions do not know these fields
        if not body.get(name):
            body.pop(name, None)
    body["format"] = _format_of(body.get("bases", ()))
    return _canonical({**body, "sha256": digest_of(body)})


def decode(data: bytes, position: int) -> Entry:
    """Parse the entry found at `position`. Raises DamagedError unless it is exactly one that was encoded for it."""
    if len(data) > MOST_ENTRY_BYTES:
        raise DamagedError(f"journal entry {position}: it has {len(data)} bytes, more than any entry")
    try:
        body = json.loads(data)
        same = data.removesuffix(b"\n") == _canonical(body)  # the digest covers the contents, not their formatting
        digest = body.pop("sha256")
        if digest != digest_of(body):
            raise DamagedError(f"journal entry {position}: its digest does not match")
        version = body.pop("format")
        if version not in (FORMAT, FORMAT_WITH_BASES, FORMAT_WITH_PATCHES):
            raise FormatError(
                f"journal entry {position}: written by another version in a format that this one does not know"
            )
        if not same or version != _format_of(body.get("bases", ())):
            raise DamagedError(f"journal entry {position}: it is not as it was written")
        kind = _KINDS[body.pop("kind")]
        if kind is Commit:
            body["shares"] = tuple(parse_ref(fields) for fields in body["shares"])
            body["not_finite"] = tuple(body.get("not_finite", ()))
            body["bases"] = tuple(body.get("bases", ()))
        entry = kind(**body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise DamagedError(f"journal entry {position}: not an entry ({e!s:.80})") from e
    if not _is_valid(entry):
        raise DamagedError(f"journal entry {position}: one of its fields has the wrong type or is out of range")
    if entry.position != position:
        raise DamagedError(f"journal entry {position}: it says that it is entry {entry.position}")
    return entry


def parse_ref(fields: Any) -> ObjectRef | None:
    """Return a reference to an object from JSON data; None for anything else."""
    match fields:
        case {"key": str(key), "size_bytes": size_bytes, "checksum": str(checksum)} if len(fields) == 3:
            if _is_count(size_bytes) and _CHECKSUM.fullmatch(checksum):
                return ObjectRef(key, size_bytes, checksum)
    return None


def not_finite_of(documents: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the parameters that any rank's share document lists as not finite. Raises TypeError for other data."""
    return tuple(sorted({name for document in documents for name in document.get("not_finite", ())}))


def base_files_of(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the references to base files and patches in a share document. Raises KeyError, TypeError or AttributeError
    for other data."""
    for base in document.get("bases", ()):
        yield base["file"]
        for patch in base.get("patches", ()):
            yield patch["file"]


def bases_of(documents: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the folders of the base files and patches in share documents. Raises KeyError, TypeError or AttributeError
    for other data."""
    return tuple(sorted({folder_of(file["key"]) for document in documents for file in base_files_of(document)}))


def _format_of(bases: Iterable[str]) -> int:
    """Return the format of an entry that needs these folders below `base/`."""
    found = [isinstance(base, str) and base.startswith(_PATCHES) for base in bases]
    return FORMAT_WITH_PATCHES if any(found) else FORMAT_WITH_BASES if found else FORMAT


def decode_commit(data: bytes, position: int) -> Commit:
    """Parse a commit. Raises DamagedError for anything else."""
    entry = decode(data, position)
    if not isinstance(entry, Commit):
        raise DamagedError(f"journal entry {position}: not a commit")
    return entry


def commits_to_delete(commits: Sequence[Commit], keep: Retention) -> list[Commit]:
    """Return the commits to delete, oldest first. The newest commit always stays.

    A commit that one call deletes would not have been kept by a later call, so it does not matter how often it is
    called.
    """
    oldest_first = sorted(commits, key=lambda commit: commit.position)
    kept = {commit.position for commit in oldest_first[-max(1, keep.last) :]}
    if keep.every_s is not None:
        kept |= _spaced(oldest_first, keep.every_s)
    if keep.best > 0:
        kept |= _best(oldest_first, keep)
    return [commit for commit in oldest_first if commit.position not in kept]


def _spaced(oldest_first: Sequence[Commit], every_s: float) -> set[int]:
    """Return the positions of the commits, from the oldest on, that are each at least `every_s` from the last chosen.

    A clock that has been set back by more than that starts again: nothing would be kept until it has caught up.
    """
    chosen: set[int] = set()
    previous = -math.inf
    for commit in oldest_first:
        if abs(commit.at - previous) >= every_s:
            chosen.add(commit.position)
            previous = commit.at
    return chosen


def _best(commits: Sequence[Commit], keep: Retention) -> set[int]:
    """Return the positions of the best commits by the metric, the newer ones first among equals; skip those without
    it."""
    sign = 1 if keep.mode == "max" else -1
    scored = [
        (sign * commit.metrics[keep.metric], commit.position)
        for commit in commits
        if math.isfinite(commit.metrics.get(keep.metric, math.nan))
    ]
    return {position for _, position in sorted(scored)[-keep.best :]}


def _is_valid(entry: Entry) -> bool:
    """Return whether every field has the type that is declared for it."""
    if not (
        _is_number(entry.at) and _is_count(entry.position) and _is_count(entry.generation) and 0 <= entry.at < _MAX_TIME
    ):
        return False
    if isinstance(entry, Generation):
        return isinstance(entry.run_id, str) and isinstance(entry.host, str)
    if isinstance(entry, Moved):
        return isinstance(entry.to, str)
    return (
        _is_count(entry.number)
        and type(entry.step) is int
        and _is_number(entry.epoch)
        and _is_count(entry.size_bytes)
        and bool(entry.shares)
        and None not in entry.shares
        and isinstance(entry.metrics, dict)
        and all(_is_number(value) for value in entry.metrics.values())
        and all(isinstance(name, str) for name in entry.not_finite)
        and all(isinstance(base, str) and base.startswith(BASE) and save_of(base) for base in entry.bases)
        and list(entry.bases) == sorted(set(entry.bases))
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_number(value: object) -> bool:
    """Return whether the value can be used with floats: JSON allows larger integers."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
