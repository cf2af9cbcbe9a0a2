"""The journal of a storage URL: names, format and choice of its entries. Pure: no I/O, no clock.

    journal/<999999999999 - position>.json    one entry each; a listing gives the newest first
    data/<save>/share-00000-of-00003.json     what one rank wrote: its digests, and its part of the state tree
    data/<save>/share-00000-of-00003.safetensors
    data/<save>/committed                             a copy of its entry, written behind it: see `repair`
    base/<save>/share-00000-of-00003.safetensors      what that rank has written once, for later saves of its run too

An entry is created only if its position is free, and there are three kinds. A run *takes over* by appending a
`Generation`; a checkpoint becomes visible when its `Commit` is appended, after all its data; a `Moved` closes the
journal. A run appends right behind its own last entry, so if anybody has taken over since, that position is taken and
the append is refused: this one precondition is both the commit and the fence against zombies. Generation entries are
therefore never deleted (some 200 bytes for each restart). Nothing points at the newest commit: a listing finds it, and
its checksums tell if it is whole.

What does not change from save to save lies in *base files*, which have no commit of their own: a commit names the
folders below `base/` that it needs, and such a folder is there for as long as any commit names it. Versions that know
nothing of base files refuse such commits as written in another format, and delete nothing of theirs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from elasticctl_store.errors import DamagedError, FormatError
from elasticctl_store.storage.base import MOST_ENTRY_BYTES

FORMAT, FORMAT_WITH_BASES = 2, 3
JOURNAL = "journal/"
DATA = "data/"
BASE = "base/"
_TOP = 999_999_999_999
_MOST_ENTRIES = 10**11
"""No journal has more: what is named as if it had was not written by a run, and would leave no name for the next."""
MOST_GENERATIONS = 10**12
"""No job has more."""
_MAX_COUNT = 1 << 62
_MAX_TIME = 1e11  # some thousand years
_CHECKSUM = re.compile(r"crc32:[0-9a-f]{8}", re.ASCII)
_SAVE = re.compile(rf"(?:{DATA}|{BASE})g(\d{{6,18}})-n(\d{{6,18}})-step(\d{{9,18}})-([^/]+)/", re.ASCII)
_BASE_FILE = re.compile(r"[A-Za-z0-9._-]{1,100}/share-\d{5,9}-of-\d{5,9}\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A data object and what it must be: `checksum` is `crc32:` and eight hex digits."""

    key: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Save:
    """What the name of a save's folder says: of the run `run_id`, generation `generation`, the `number`-th one."""

    generation: int
    number: int
    step: int
    run_id: str

    @property
    def order(self) -> tuple[int, int]:
        """Saves of one URL in the order in which they were made."""
        return self.generation, self.number


@dataclass(frozen=True, slots=True)
class Generation:
    """A run took over the URL at `position`; `at` is in seconds since the epoch, UTC."""

    position: int
    generation: int
    run_id: str
    host: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Commit:
    """A whole checkpoint. `shares` holds one share document for each rank that wrote, in order of rank.

    `number` counts the commits of this URL from 1; `size_bytes` is all its data; `metrics` the user's own numbers.
    `not_finite` names the model's parameters that have a NaN or an infinity in them. `bases` are the folders of the
    base files that it needs, in order; they are part of its `size_bytes`.
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
        """The prefix all that is its own is stored under."""
        return folder_of(self.shares[0].key)


@dataclass(frozen=True, slots=True)
class Moved:
    """The job continues at another URL, `to`: nobody may take this one over any more."""

    position: int
    generation: int
    to: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Retention:
    """Which commits stay: the `last` newest, and of the older ones those that one of the two other rules keeps.

    `every_s` (seconds; None: no such rule) keeps commits for good, each made at least so long after the one before it.
    `best` keeps that many with the highest (`mode` "max") or lowest ("min") value of `metric`.
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
    """The key of the journal's entry number `position` (from 1)."""
    return f"{JOURNAL}{_TOP - position:012d}.json"


def position_of(key: str) -> int | None:
    """The position an entry's key stands for; None for a key that is no entry (a partial file, a stranger's)."""
    name = key.removeprefix(JOURNAL).removesuffix(".json")
    is_entry = key.startswith(JOURNAL) and key.endswith(".json") and len(name) == 12
    position = _TOP - int(name) if is_entry and name.isascii() and name.isdigit() else None
    return None if position is None or position > _MOST_ENTRIES else position


def position_of_partial(key: str) -> int | None:
    """The position of the entry that a partial file (see `storage.local`) was to become; None for any other key."""
    entry, _, rest = key.partition(".json.")
    return position_of(f"{entry}.json") if rest.endswith(".partial") else None


def save_folder(generation: int, number: int, step: int, run_id: str) -> str:
    """The prefix of one save's data: no two saves ever share one, and a person can read it."""
    return f"{DATA}g{generation:06d}-n{number:06d}-step{step:09d}-{run_id}/"


def save_of(folder: str) -> Save | None:
    """The save that a folder is of; None for one that no save has made.

    What is not named as a save is somebody else's, a dataset in `data/` perhaps, and never deleted.
    """
    found = _SAVE.fullmatch(folder)
    return Save(int(found[1]), int(found[2]), int(found[3]), found[4]) if found else None


def number_of(folder: str) -> int | None:
    """Which save of its run a folder is of; None for one that no save has made."""
    save = save_of(folder)
    return save.number if save else None


def run_of(folder: str) -> str:
    """The id of the run that a save folder is of."""
    return folder.rstrip("/").rpartition("-")[2]


def marker_key(folder: str) -> str:
    """The key of the copy of a commit's entry: a save without it may never have been committed."""
    return f"{folder}committed"


def share_key(folder: str, rank: int, world_size: int) -> str:
    """The key of one rank's share document."""
    return f"{folder}share-{rank:05d}-of-{world_size:05d}.json"


def tensors_key(share: str) -> str:
    """The key of the tensor file that belongs to a share document."""
    return share.removesuffix(".json") + ".safetensors"


def base_key(share: str) -> str:
    """The key of the base file that a rank writes beside the share document of this key."""
    return BASE + tensors_key(share).removeprefix(DATA)


def is_base_file(key: str) -> bool:
    """Is it the key of a base file that a save has written?"""
    folder = folder_of(key)
    return key.startswith(BASE) and save_of(folder) is not None and bool(_BASE_FILE.fullmatch(key.removeprefix(BASE)))


def folder_of(key: str) -> str:
    """The save folder that a key of data, or of a base file, lies in."""
    return "/".join(key.split("/")[:2]) + "/"


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    """CRC-32 over the concatenated parts: against damage, not against forgers."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return as_checksum(crc)


def as_checksum(crc: int) -> str:
    """A CRC-32 as it is written down."""
    return f"crc32:{crc:08x}"


def encode(entry: Entry) -> bytes:
    """An entry as JSON, with a digest of itself."""
    kind = next(name for name, kind in _KINDS.items() if isinstance(entry, kind))
    body = {"format": FORMAT, "kind": kind, **asdict(entry)}
    for name in ("not_finite", "bases"):  # most have none, and older versions know of none
        if not body.get(name):
            body.pop(name, None)
    if "bases" in body:
        body["format"] = FORMAT_WITH_BASES
    return _canonical({**body, "sha256": digest_of(body)})


def decode(data: bytes, position: int) -> Entry:
    """Read the entry found at `position`; DamagedError unless it is, to the bit, one that was encoded for it."""
    if len(data) > MOST_ENTRY_BYTES:
        raise DamagedError(f"journal entry {position}: it has {len(data)} bytes, more than any entry")
    try:
        body = json.loads(data)
        same = data.removesuffix(b"\n") == _canonical(body)  # the digest is of what is meant, not of how it is written
        digest = body.pop("sha256")
        if digest != digest_of(body):
            raise DamagedError(f"journal entry {position}: its digest does not match")
        version = body.pop("format")
        if version not in (FORMAT, FORMAT_WITH_BASES):
            raise FormatError(f"journal entry {position}: written by another version in a format unknown to this one")
        if not same or version != (FORMAT_WITH_BASES if body.get("bases") else FORMAT):
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
        raise DamagedError(f"journal entry {position}: a field of it is of another type, or out of range")
    if entry.position != position:
        raise DamagedError(f"journal entry {position}: says it is entry {entry.position}")
    return entry


def parse_ref(fields: Any) -> ObjectRef | None:
    """A reference to an object, from JSON data; None for anything else."""
    match fields:
        case {"key": str(key), "size_bytes": size_bytes, "checksum": str(checksum)} if len(fields) == 3:
            if _is_count(size_bytes) and _CHECKSUM.fullmatch(checksum):
                return ObjectRef(key, size_bytes, checksum)
    return None


def not_finite_of(documents: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The parameters that any rank's share document says are not finite. Raises TypeError for what is no document."""
    return tuple(sorted({name for document in documents for name in document.get("not_finite", ())}))


def bases_of(documents: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The folders of the base files in share documents. Raises KeyError, TypeError or AttributeError for others."""
    files = (base["file"]["key"] for document in documents for base in document.get("bases", ()))
    return tuple(sorted({folder_of(key) for key in files}))


def decode_commit(data: bytes, position: int) -> Commit:
    """Read a commit; DamagedError for anything else."""
    entry = decode(data, position)
    if not isinstance(entry, Commit):
        raise DamagedError(f"journal entry {position}: not a commit")
    return entry


def commits_to_delete(commits: Sequence[Commit], keep: Retention) -> list[Commit]:
    """The commits to delete, oldest first; the newest always stays.

    A commit that is deleted by one call would not have been kept by a later one, so it makes no difference how often
    it is called on the way.
    """
    oldest_first = sorted(commits, key=lambda commit: commit.position)
    kept = {commit.position for commit in oldest_first[-max(1, keep.last) :]}
    if keep.every_s is not None:
        kept |= _spaced(oldest_first, keep.every_s)
    if keep.best > 0:
        kept |= _best(oldest_first, keep)
    return [commit for commit in oldest_first if commit.position not in kept]


def _spaced(oldest_first: Sequence[Commit], every_s: float) -> set[int]:
    """From the oldest on, each commit that is at least `every_s` younger than the one chosen before."""
    chosen: set[int] = set()
    previous = -math.inf
    for commit in oldest_first:
        if commit.at - previous >= every_s:
            chosen.add(commit.position)
            previous = commit.at
    return chosen


def _best(commits: Sequence[Commit], keep: Retention) -> set[int]:
    """The best by the metric, of equal ones the newer; commits without the metric are not among them."""
    sign = 1 if keep.mode == "max" else -1
    scored = [
        (sign * commit.metrics[keep.metric], commit.position)
        for commit in commits
        if math.isfinite(commit.metrics.get(keep.metric, math.nan))
    ]
    return {position for _, position in sorted(scored)[-keep.best :]}


def _is_valid(entry: Entry) -> bool:
    """Is every field what its type says?"""
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
    """Is it one that arithmetic with floats bears? JSON has larger whole numbers than that."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
