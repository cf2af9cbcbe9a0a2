"""Restore lost journal entries from the share documents, so that a checkpoint does not get lost with its entry.

Each document says which save it belongs to, how many shares that has, and the checkpoint's label; its seal shows that
it is unchanged. So the owner of the URL can commit a save again if all of its documents exist: in place of a damaged
entry, where the order of the saves determines the position, or as the newest commit, if it is newer than every commit
that can be read. The latter requires its marker, or that the entry of its whole generation is lost as well: a save
without a marker may never have been committed, by a run that was killed or fenced at that moment. If no commit can be
read at all, a complete save needs no marker: whether it was committed or not, it is worth more than step 0.

Where nothing can be read or restored, `find_traces` reports what saves have left that were interrupted, which is no
reason not to start at step 0, from what is left of commits.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elasticctl_store.checkpoints import entries, verify
from elasticctl_store.checkpoints.commits import CommitWriter, read_entries
from elasticctl_store.checkpoints.entries import Commit, Generation, Moved, ObjectRef, Save
from elasticctl_store.checkpoints.reader import is_sealed, load_document, retry_damaged
from elasticctl_store.errors import DamagedError, FencedError, MissingError, StorageError
from elasticctl_store.storage import Storage, all_keys

_SHOWN = 5
"""The number of list items that a message shows."""

log = logging.getLogger("elasticctl_train")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The restored commits, oldest first, and one line for each save that cannot be restored, which says why."""

    commits: tuple[Commit, ...]
    rejected: tuple[str, ...]


@dataclass(slots=True)
class Journal:
    """The commits that can be read, the ids of the runs, and the positions of damaged entries.

    `has_more`: entries older than the newest commit were not read.
    """

    commits: list[Commit] = field(default_factory=list)
    generations: set[str] = field(default_factory=set)
    damaged: list[int] = field(default_factory=list)
    has_more: bool = False


def label(step: int, epoch: int, metrics: Mapping[str, float], at: float) -> dict[str, Any]:
    """Return what a share document states about its checkpoint. Metrics that JSON cannot represent are left out."""
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    return {"step": step, "epoch": epoch, "metrics": finite, "at": at}


def rebuild(storage: Storage, writer: CommitWriter, *, everything: bool = False) -> Rebuilt:
    """Commit again what is intact and has lost its entry.

    By default this restores saves that are newer than the newest commit that can be read, which a run needs at its
    start; with `everything` also older ones, which requires reading the whole journal. Raises StorageError,
    FencedError.
    """
    journal = _read_journal(storage, everything, writer.generation.position)
    known = {commit.folder for commit in journal.commits}
    bound = max((_order(commit) for commit in journal.commits), default=(0, 0))
    found, rejected = list[Commit](), list[str]()
    stored = list(all_keys(storage, entries.DATA))
    folders = ((key, entries.folder_of(key)) for key in stored)
    marked = {folder for key, folder in folders if key == entries.marker_key(folder)}
    for save, folder, keys in _complete_among(stored):
        has_lost_all = save.generation > bound[0] and save.run_id not in journal.generations
        may_be_newest = save.order > bound and (folder in marked or has_lost_all or not known)
        is_between = bool(journal.damaged) and (everything or save.order > bound)
        if folder in known or not (may_be_newest or is_between or (everything and save.order > bound)):
            continue  # nothing shows that it was committed
        if not everything and journal.has_more:
            # It may be an older commit with the name of a newer one.
            journal = _read_journal(storage, True, writer.generation.position)
            known = {commit.folder for commit in journal.commits}
            if folder in known:
                continue
        try:
            commit = _read_commit(storage, save, keys)
            if commit is None:
                continue
        except (DamagedError, MissingError) as e:
            rejected.append(f"step {save.step}: {e}")
            continue
        adopted = _adopt(storage, writer, journal, commit, may_be_newest=may_be_newest)
        if adopted is not None:
            found.append(adopted)
            log.warning("%s: the journal entry of step %d was lost, and has been restored", storage.url, save.step)
    return Rebuilt(tuple(found), tuple(rejected))


def _complete_among(stored: Iterable[str]) -> Iterator[tuple[Save, str, list[str]]]:
    """Yield the saves whose share documents all exist, oldest first: (save, folder, keys of the documents by rank).

    An interrupted save lacks some: the document is the last object that its rank writes.
    """
    folders: dict[str, set[str]] = {}
    for key in stored:
        if key.endswith(".json"):
            folders.setdefault(entries.folder_of(key), set()).add(key)
    found = []
    for folder, keys in folders.items():
        save = entries.save_of(folder)
        wanted = [entries.share_key(folder, rank, len(keys)) for rank in range(len(keys))]
        if save is not None and keys == set(wanted):
            found.append((save, folder, wanted))
    yield from sorted(found, key=lambda one: one[0].order)


def may_be_complete(storage: Storage) -> set[str]:
    """Return the folders of saves that an unreadable entry may stand for: those that are complete, and those that no
    listing looks into, such as symbolic links."""
    stored = list(all_keys(storage, entries.DATA))
    return {folder for _, folder, _ in _complete_among(stored)} | _hidden_among(stored)


def _hidden_among(stored: Iterable[str]) -> set[str]:
    return {f"{key}/" for key in stored if entries.save_of(f"{key}/") is not None}


def bases_of_complete(storage: Storage, but_for: Collection[str]) -> set[str] | None:
    """Return the folders of base files that complete saves need, except those in `but_for`; None if that is unknown."""
    stored = list(all_keys(storage, entries.DATA))
    if _hidden_among(stored).difference(but_for):
        return None
    found = set[str]()
    for _, folder, keys in _complete_among(stored):
        if folder in but_for:
            continue
        try:
            found |= set(entries.bases_of([load_document(key, storage.get(key)) for key in keys]))
        except (DamagedError, MissingError, KeyError, TypeError, AttributeError):
            return None
    return found


def find_traces(storage: Storage, least: int) -> list[str]:
    """Return what only a commit that has been lost can have left, one line each. Call this if no commit can be read.

    An interrupted save leaves less: no marker, no base file, and not all share documents. Those that exist are as they
    were sealed, and their tensor files exist. Its run is in the journal, and the position after that of the run, which
    its first commit would have taken, is the next run's. For `least`, see `read_entries`.
    """
    followed = _runs_without_commits(storage, least)
    if followed is None:
        return []
    saves: dict[str, list[str]] = {}
    found: list[str] = []
    for key in itertools.chain(all_keys(storage, entries.DATA), all_keys(storage, entries.BASE)):
        folder = entries.folder_of(key)
        if entries.save_of(folder) is not None:
            saves.setdefault(folder, []).append(key)
        elif entries.is_named_by_save(key):
            found.append(f"{key} lies where no save has written it (move or delete its folder)")
    for folder, keys in saves.items():
        run = entries.run_of(folder)
        if folder.startswith(entries.BASE):
            found.append(f"{folder}: a commit needed it")
        elif run not in followed:
            found.append(f"{folder}: its run is not in the journal")
        elif not followed[run]:
            found.append(f"{folder}: the entry after that of its run is not in the journal")
        else:
            found += _oddities(storage, folder, keys)
    return found


def name_first(found: Sequence[str]) -> str:
    """Return the first few of what was found, and how many more there are, as one line."""
    return "; ".join(found[:_SHOWN]) + (f"; {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def find_unlisted(storage: Storage) -> list[str]:
    """Return what may be a checkpoint that the journal has lost, one line each. Call this if no commit is listed."""
    stored = all_keys(storage, entries.DATA)
    complete = [f"{folder} has all its documents, and is not listed" for _, folder, _ in _complete_among(stored)]
    return complete or find_traces(storage, 0)


def _runs_without_commits(storage: Storage, least: int) -> dict[str, bool] | None:
    """Return the ids of the runs, and whether the next entry directly follows that of the run; None if there are
    commits."""
    found: dict[str, bool] = {}
    above = 0
    for position, entry in read_entries(storage, least):
        if isinstance(entry, Commit):
            return None
        if isinstance(entry, Generation):
            found[entry.run_id] = above in (0, position + 1)
        above = position
    return found


def _oddities(storage: Storage, folder: str, keys: Collection[str]) -> Iterator[str]:
    """Yield what is not as an interrupted save leaves it."""
    for key in keys:
        if not entries.is_named_by_save(key):
            yield f"{key}: an interrupted save leaves no such file"
        elif key.endswith(".json"):
            try:
                _read_sealed(storage, key)
            except (DamagedError, MissingError) as e:
                yield str(e)
            if entries.tensors_key(key) not in keys:
                yield f"{entries.tensors_key(key)} is not there"


def tensor_bytes(document: Mapping[str, Any]) -> int:
    """Return the size of all tensor files that a share document refers to. Raises KeyError or TypeError for other
    data."""
    files = [document["tensors"], *entries.base_files_of(document)]
    return sum(operator.index(file["size_bytes"]) for file in files)


def holds_saves(storage: Storage) -> bool:
    """Return whether the storage holds anything that a save has written."""
    return next(save_keys(storage), None) is not None


def start_over(storage: Storage, writer: CommitWriter) -> None:
    """Delete all checkpoints and all leftovers, so that the job starts at step 0. Raises StorageError."""
    for position, entry in read_entries(storage):
        if position != writer.generation.position and not isinstance(entry, Generation | Moved):
            writer.check_fence()
            storage.delete([entries.key_of(position)])
    writer.check_fence()
    storage.delete(list(save_keys(storage)))


def save_keys(storage: Storage) -> Iterator[str]:
    """Yield the keys of everything that saves have written, complete or not, including base files."""
    for prefix in (entries.DATA, entries.BASE):
        for key in all_keys(storage, prefix):
            if entries.save_of(entries.folder_of(key)) is not None:
                yield key


def _read_journal(storage: Storage, everything: bool, least: int) -> Journal:
    journal = Journal()
    for position, entry in read_entries(storage, least):
        if isinstance(entry, DamagedError):
            journal.damaged.append(position)
        elif isinstance(entry, Commit):
            journal.commits.append(entry)
            if not everything:
                journal.has_more = True
                break
        elif isinstance(entry, Generation):
            journal.generations.add(entry.run_id)
    return journal


def _read_commit(storage: Storage, save: Save, keys: Sequence[str]) -> Commit | None:
    """Return the commit that the documents of a save describe; None if the ranks' states differ, which no run commits.

    Raises DamagedError or MissingError if it does not look intact.
    """
    refs, documents = [], []
    for key in keys:
        data = _read_sealed(storage, key)
        documents.append(load_document(key, data))
        refs.append(ObjectRef(key, len(data), entries.checksum([data])))
    try:
        if len({document["fingerprint"] for document in documents}) > 1:
            return None
        said = documents[0]["label"]
        made = Commit(
            position=0,
            generation=save.generation,
            number=0,
            step=save.step,
            epoch=said["epoch"],
            shares=tuple(refs),
            size_bytes=sum(ref.size_bytes for ref in refs) + sum(map(tensor_bytes, documents)),
            at=said["at"],
            metrics=said["metrics"],
            not_finite=entries.not_finite_of(documents),
            bases=entries.bases_of(documents),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as e:
        raise DamagedError(f"{keys[0]}: it does not describe its checkpoint") from e
    entries.decode_commit(entries.encode(made), 0)  # raises if no entry can hold it
    verify.glance(storage, made)
    return made


def _read_sealed(storage: Storage, key: str) -> bytes:
    """Return a share document that is as it was sealed. Raises DamagedError or MissingError."""

    def read() -> bytes:
        data = storage.get(key)
        if not is_sealed(data):
            raise DamagedError(f"{key}: not an unchanged share document")
        return data

    return retry_damaged(read)


def _adopt(
    storage: Storage, writer: CommitWriter, journal: Journal, commit: Commit, *, may_be_newest: bool
) -> Commit | None:
    """Commit again, at the position of a damaged entry or as the newest; return None if it does not seem to be
    missing."""
    position = _position_for(journal, commit)
    if position is not None:
        below = [other.number for other in journal.commits if other.position < position]
        try:
            adopted = writer.adopt(replace(commit, number=max(below, default=0) + 1), position)
        except FencedError:
            raise
        except StorageError as e:  # for example a folder in its place
            log.warning("%s: journal entry %d cannot be replaced: %s", storage.url, position, e)
        else:
            journal.damaged.remove(position)
            journal.commits.append(adopted)
            return adopted
    if not may_be_newest:
        return None
    adopted = writer.adopt(commit)
    journal.commits.append(adopted)
    return adopted


def _order(commit: Commit) -> tuple[int, int]:
    save = entries.save_of(commit.folder)
    return save.order if save is not None else (commit.generation, 0)


def _position_for(journal: Journal, commit: Commit) -> int | None:
    """Return the lowest position of a damaged entry between the commits of older saves and those of newer ones."""
    order = _order(commit)
    for position in sorted(journal.damaged):
        if all((_order(other) < order) == (other.position < position) for other in journal.commits):
            return position
    return None
