"""The journal in a storage: take over, append commits, find the newest. `entries` describes the rules."""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.entries import Commit, Generation, Moved
from elasticctl_store.checkpoints.reader import retry_damaged
from elasticctl_store.errors import (
    DamagedError,
    ExistsError,
    FencedError,
    FormatError,
    MissingError,
    MovedError,
    StorageError,
)
from elasticctl_store.parallel import each
from elasticctl_store.storage import Patience, Storage, all_keys
from elasticctl_store.storage.outages import JITTER

log = logging.getLogger("elasticctl_train")

PATIENCE = Patience(tries=10, longest_pause_s=2.0)
"""For a create that is refused because the entry exists: another run was faster, or the service is mistaken."""


def read_entries(storage: Storage, least: int = 0) -> Iterator[tuple[int, entries.Entry | DamagedError]]:
    """Yield (position, entry), newest first, reading only as far as asked; a damaged entry is yielded as its error.

    An entry at `least`, or a later one, is known to exist: a listing without any is wrong, and repeated.
    """
    for position, entry in _scan(storage, least):
        if entry is not None:  # otherwise it was deleted after the page was listed
            yield position, entry


def read_commits(storage: Storage, least: int = 0) -> Iterator[Commit]:
    """Yield the commits, newest first; damaged entries are logged and skipped. `least`: see `read_entries`."""
    for _, entry in read_entries(storage, least):
        if isinstance(entry, DamagedError):
            log.warning("%s: %s; skipped", storage.url, entry)
        elif isinstance(entry, Commit):
            yield entry


def delete_commit(storage: Storage, commit: Commit, others: Iterable[Commit] = ()) -> None:
    """Delete a commit: the marker, then the entry, then the data.

    With the entry gone first, every commit that is listed is complete. With the marker gone before it, no run takes the
    save for one that has lost its entry. One of the `others` may refer to the same data, if an entry was restored for
    one that could not be read at that time; then only the entry is deleted.

    Never call this for the newest entry of a journal that a run still appends to: its position would be used again, and
    the fence between two runs relies on that never happening. Raises StorageError.
    """
    if any(other.folder == commit.folder and other.position != commit.position for other in others):
        storage.delete([entries.key_of(commit.position)])
        return
    storage.delete([entries.marker_key(commit.folder), entries.key_of(commit.position)])
    storage.delete(list(all_keys(storage, commit.folder)))


def delete_bases(storage: Storage, deleted: Iterable[Commit], remaining: Iterable[Commit]) -> None:
    """Delete the base files of deleted commits that none of the `remaining` commits needs. `remaining` must be
    complete."""
    needed = {base for commit in remaining for base in commit.bases}
    for base in sorted({base for commit in deleted for base in commit.bases} - needed):
        storage.delete(list(all_keys(storage, base)))


class CommitWriter:
    """The one run that may append, until another one takes over. Used by rank 0 only, by one thread at a time."""

    def __init__(self, storage: Storage, mine: Generation, commits_so_far: int) -> None:
        self._storage = storage
        self._mine = mine
        self._tail = mine.position
        self._number = commits_so_far
        self._appended: list[Commit] = []

    @classmethod
    def take_over(cls, storage: Storage) -> CommitWriter:
        """Append a new generation, which fences every older run. Raises StorageError; MovedError if the journal is
        closed."""
        run_id, host = secrets.token_hex(4), socket.gethostname()
        for _ in _count_tries(storage):
            position, generation, number = _newest(storage)
            generation = max(generation, _stored_generation(storage))
            mine = Generation(position + 1, generation + 1, run_id, host, time.time())
            try:
                storage.put(entries.key_of(mine.position), [entries.encode(mine)], if_absent=True)
            except ExistsError:
                continue  # another run was faster: take over from it
            if _is_outrun(storage, mine):
                continue
            _check_precondition(storage, mine)
            break
        _discard_unfinished(storage)
        return cls(storage, mine, number)

    @property
    def generation(self) -> Generation:
        """This run's own entry."""
        return self._mine

    @property
    def appended(self) -> Sequence[Commit]:
        """The commits of this run, oldest first, including those that have been deleted since."""
        return self._appended

    def append(self, commit: Commit) -> Commit:
        """Make a checkpoint visible, after this run's last entry; return it with its position and number.

        Raises FencedError if another run has taken over.
        """
        while True:
            commit = replace(commit, position=self._tail + 1, number=self._number + 1)
            created = self._create(commit)
            earlier = commit if created else self._own_commit(commit.position)
            if earlier is None:
                raise self._fenced()
            self._add(earlier)
            if earlier.folder == commit.folder:
                return earlier
            # The entry belongs to a save that failed because the response to its commit was lost.

    def adopt(self, commit: Commit, position: int | None = None) -> Commit:
        """Make a complete checkpoint whose entry is lost visible again: at the `position` of its damaged entry, or as
        the newest.

        Raises FencedError if another run has taken over.
        """
        self.check_fence()
        if position is not None:
            commit = replace(commit, position=position)
            self._storage.put(entries.key_of(position), [entries.encode(commit)])
            self._number = max(self._number, commit.number)
            return commit
        commit = replace(commit, position=self._tail + 1, number=self._number + 1, generation=self._mine.generation)
        if not self._create(commit):
            raise self._fenced()
        self._tail, self._number = commit.position, commit.number
        return commit

    def close(self, to: str) -> None:
        """Append that the job continues at the URL `to`. After that, no run can take over or commit here any more.

        Raises FencedError if another run has taken over; the journal is not closed then.
        """
        entry = Moved(self._tail + 1, self._mine.generation, to, time.time())
        if not self._create(entry):
            raise self._fenced()

    def check_fence(self) -> None:
        """Raise FencedError if another run has taken over: this one may no longer delete anything."""
        if self._is_followed():
            raise self._fenced()

    def look_for_younger(self) -> None:
        """Raise FencedError if another run has taken over. Another thread may call this while this run appends."""
        for _, entry in read_entries(self._storage):
            if not isinstance(entry, DamagedError):
                if isinstance(entry, Moved) or entry.generation > self._mine.generation:
                    raise self._fenced()
                return

    def _add(self, commit: Commit) -> None:
        self._tail, self._number = commit.position, commit.number
        self._appended.append(commit)

    def _own_commit(self, position: int) -> Commit | None:
        """Return the entry at `position` if it is a commit of this very run."""
        try:
            entry = read_entry(self._storage, position)
        except (DamagedError, MissingError):
            return None
        if isinstance(entry, Commit) and entries.run_of(entry.folder) == self._mine.run_id:
            return entry
        return None

    def _create(self, entry: Commit | Moved) -> bool:
        """Create the entry after this run's last; return False if another run's is there. A refusal alone does not
        prove that."""
        for _ in _count_tries(self._storage):
            try:
                self._storage.put(entries.key_of(entry.position), [entries.encode(entry)], if_absent=True)
            except ExistsError:
                if self._is_followed():
                    return False
            else:
                break
        return True

    def _is_followed(self) -> bool:
        """Return whether another run has taken over, or has started over after the journal was deleted.

        If only this run's last entries are missing, the storage has lost them.
        """
        if next(positions(self._storage), 0) > self._tail:
            return True
        try:  # a listing may lag behind what was written
            return read_entry(self._storage, self._tail).generation != self._mine.generation
        except (DamagedError, MissingError):
            return not self._is_known()

    def _is_known(self) -> bool:
        """Return whether the entry with which this run took over is still there. If it is damaged, it is, unless a run
        that is no older can be read: only who has taken over writes to that position again."""
        try:
            entry = read_entry(self._storage, self._mine.position)
        except MissingError:
            return False
        except DamagedError:
            others = (entry for _, entry in read_entries(self._storage) if not isinstance(entry, DamagedError))
            return not any(self._is_younger(entry) for entry in others)
        return isinstance(entry, Generation) and entry.run_id == self._mine.run_id

    def _is_younger(self, entry: entries.Entry) -> bool:
        if isinstance(entry, Generation):
            return entry.generation >= self._mine.generation and entry.run_id != self._mine.run_id
        return isinstance(entry, Moved) or entry.generation > self._mine.generation

    def _fenced(self) -> FencedError:
        who = ""
        for _, entry in read_entries(self._storage):
            if isinstance(entry, Generation) and entry.run_id != self._mine.run_id:
                who = f", generation {entry.generation} on {entry.host},"
                break
        return FencedError(
            f"{self._storage.url}: a newer run{who} has taken over; this one (generation {self._mine.generation}) "
            f"stops. FIX: give each job a storage URL of its own"
        )


def _count_tries(storage: Storage) -> Iterator[int]:
    """Count tries to append, with pauses between them. Raises StorageError after the last one."""
    tries = 1
    yield tries
    while tries < PATIENCE.tries:
        time.sleep(PATIENCE.pause_s(tries, JITTER.random()))
        tries += 1
        yield tries
    raise StorageError(
        f"{storage.url}: the service refused the next entry of the journal {tries} times because it exists, but does"
        " not list it. FIX: check the service, and that no other job uses this URL"
    )


def moved_to(storage: Storage) -> Moved | None:
    """Return where the job continues, if its journal is closed, which its newest entry says. Raises StorageError."""
    for position in positions(storage):
        try:
            entry = read_entry(storage, position)
        except (DamagedError, MissingError):
            return None
        return entry if isinstance(entry, Moved) else None
    return None


def read_entry(storage: Storage, position: int) -> entries.Entry:
    """Read an entry, again and again if it looks damaged. Raises MissingError, or DamagedError if it is damaged in the
    storage."""
    key = entries.key_of(position)
    return retry_damaged(lambda: entries.decode(storage.get(key), position), level=logging.DEBUG)


def _scan(storage: Storage, least: int = 0) -> Iterator[tuple[int, entries.Entry | DamagedError | None]]:
    """Yield every listed position, newest first, with its entry, its damage, or None if it has been deleted since.

    Most callers only need the newest, so that is read alone, and then more and more entries in parallel.
    """
    upcoming, at_a_time = _positions_from(storage, least), 1
    while batch := list(itertools.islice(upcoming, at_a_time)):
        found: dict[int, entries.Entry | DamagedError | None] = {}

        def read(position: int, into: dict[int, entries.Entry | DamagedError | None] = found) -> None:
            try:
                into[position] = read_entry(storage, position)
            except DamagedError as e:
                into[position] = e
            except MissingError:
                into[position] = None

        each(read, batch, threads=8)
        yield from ((position, found[position]) for position in batch)
        at_a_time = min(2 * at_a_time, 64)


def _positions_from(storage: Storage, least: int) -> Iterator[int]:
    """Return the listed positions, newest first, of a listing that begins at `least` or later. Raises StorageError."""
    for tries in itertools.count(1):
        found = positions(storage)
        newest = next(found, 0)
        if newest >= least:
            return itertools.chain([newest] if newest else [], found)
        if tries >= PATIENCE.tries:
            break
        time.sleep(PATIENCE.pause_s(tries, JITTER.random()))
    raise StorageError(f"{storage.url}: the service does not list journal entry {least}. FIX: check the service")


def _newest(storage: Storage) -> tuple[int, int, int]:
    """Return the newest position, generation and number of a commit; 0 for those that do not exist.

    Raises MovedError if the journal is closed, and StorageError if another version has written an entry that this one
    cannot read.
    """
    top, generation = 0, 0
    for position, entry in _scan(storage):
        if isinstance(entry, Moved) and not top:
            raise MovedError(f"{storage.url}: this job has been moved to {entry.to}, and continues only there")
        if isinstance(entry, FormatError):  # skipping it would mean to start over, and to delete its data
            raise StorageError(f"{storage.url}: {entry}. FIX: continue with that version, or use another storage URL")
        top = top or position  # even if it is deleted before it can be read: the position after it is taken then
        if entry is None or isinstance(entry, DamagedError):
            continue
        generation = generation or entry.generation
        if isinstance(entry, Commit):
            return top, generation, entry.number
    return top, generation, 0


def _stored_generation(storage: Storage) -> int:
    """Return the highest generation that has saved anything here; 0 if none has.

    The journal may have lost that generation. What a later run saves must have the newest name too, for `repair`.
    """
    saves = (entries.save_of(entries.folder_of(key)) for key in all_keys(storage, entries.DATA))
    found = (save.generation for save in saves if save is not None and save.generation < entries.MOST_GENERATIONS)
    return max(found, default=0)


def _is_outrun(storage: Storage, mine: Generation) -> bool:
    """Return whether an older run has committed after `mine`: then it had used that position before, and freed it."""
    for position, entry in read_entries(storage):
        if position <= mine.position:
            break
        if not isinstance(entry, DamagedError):
            return entry.generation < mine.generation
    return False


def _check_precondition(storage: Storage, mine: Generation) -> None:
    """Raise StorageError if the storage ignores the precondition of a create: commits and the fence rely on it.

    It tries to create the entry that it has just written, in bytes that differ but mean the same, so nothing is lost if
    the service accepts.
    """
    try:
        storage.put(entries.key_of(mine.position), [entries.encode(mine), b"\n"], if_absent=True)
    except ExistsError:
        return
    raise StorageError(
        f"{storage.url}: the service replaces an object that was to be created only if absent (it ignores "
        "If-None-Match or ifGenerationMatch), so two runs could harm each other's checkpoints. FIX: use another service"
    )


def _discard_unfinished(storage: Storage) -> None:
    """Clean up after killed runs, which are all fenced now. If the storage refuses, that only costs space."""
    try:
        storage.discard_unfinished(lambda key: entries.number_of(entries.folder_of(key)) is not None)
    except StorageError as e:
        log.info("unfinished uploads of killed runs could not be deleted: %s", e)


def positions(storage: Storage) -> Iterator[int]:
    """Yield the positions of the journal's entries, newest first."""
    for key in all_keys(storage, entries.JOURNAL):
        position = entries.position_of(key)
        if position is not None:
            yield position
