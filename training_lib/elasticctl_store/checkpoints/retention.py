"""`Keeper`: delete the commits that a run does not keep, and what killed runs have left.

Nothing is deleted before a newer commit that stays has been read and its checksums verified. So even if the storage
damages data, the newest intact checkpoint is never deleted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from elasticctl_store.checkpoints import entries, reader, repair, verify
from elasticctl_store.checkpoints.commits import CommitWriter, delete_bases, delete_commit, read_entries, read_entry
from elasticctl_store.checkpoints.entries import Commit, ObjectRef, Retention
from elasticctl_store.checkpoints.verify import OnBytes
from elasticctl_store.errors import DamagedError, FullError, MissingError, StorageError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.storage.local import LocalStorage

log = logging.getLogger("elasticctl_train")


def take_over(storage: Storage) -> CommitWriter:
    """Take over like `CommitWriter.take_over`, even if the storage is too full for a single entry.

    In that case interrupted saves are deleted first. One that is still being written belongs to a run that is about to
    be fenced. If that makes no room, the oldest checkpoints are deleted, as long as a newer one is intact, and as long
    as that makes room: if others fill the disk meanwhile, or if a quota counts late, no more are lost to it.
    """
    grows = True
    while True:
        try:
            return CommitWriter.take_over(storage)
        except FullError:
            before_bytes, count = _free_bytes(storage, entries.JOURNAL), len(list(read_entries(storage)))
            if not grows or not _make_room_for_entry(storage):
                raise
            after_bytes = _free_bytes(storage, entries.JOURNAL)
            if before_bytes is not None and after_bytes is not None:
                grows = after_bytes > before_bytes
            else:  # one checkpoint has more room than an entry needs
                grows = len(list(read_entries(storage))) == count


def _free_bytes(storage: Storage, below: str) -> int | None:
    """Return the free space of the disk of a folder's objects `below` a prefix; None if it is unknown."""
    return storage.free_bytes(below) if isinstance(storage, LocalStorage) else None


def _make_room_for_entry(storage: Storage) -> bool:
    """Delete the data of interrupted saves, or else the oldest commit; False if nothing could be deleted."""
    count = _count_keys(storage)
    found = [entry for _, entry in read_entries(storage)]
    known = [entry for entry in found if isinstance(entry, Commit)]
    kept = {folder for commit in known for folder in (commit.folder, *commit.bases)}
    bases = repair.bases_of_complete(storage, but_for=kept)
    kept |= repair.may_be_complete(storage) | (bases or set())
    leftovers = [
        key
        for key in repair.save_keys(storage)
        if entries.folder_of(key) not in kept and not (bases is None and key.startswith(entries.BASE))
    ]
    if leftovers:
        log.warning("%s: the storage is full: deleting the data of interrupted saves", storage.url)
        storage.delete(leftovers)
        if _count_keys(storage) < count:
            return True
    newest = next((commit for commit in known if _is_whole(storage, commit)), None)
    if newest is None or newest == known[-1]:
        return False
    said = "%s: the storage is full: deleting the oldest of %d checkpoints (step %d)"
    log.warning(said, storage.url, len(known), known[-1].step)
    delete_commit(storage, known[-1], known)
    delete_unneeded_bases(storage, known[-1:])
    return _count_keys(storage) < count


def _count_keys(storage: Storage) -> int:
    return sum(1 for _ in all_keys(storage, ""))


def _is_whole(storage: Storage, commit: Commit) -> bool:
    try:
        verify.verify(storage, commit, lambda count: None)
    except (DamagedError, MissingError):
        return False
    return True


def delete_unneeded_bases(storage: Storage, deleted: Sequence[Commit]) -> None:
    """Delete the base files that only these commits, deleted by hand, needed, if all other entries can be read.

    Raises StorageError.
    """
    if any(commit.bases for commit in deleted):
        found = [entry for _, entry in read_entries(storage)]
        if not any(isinstance(entry, DamagedError) for entry in found):
            delete_bases(storage, deleted, [entry for entry in found if isinstance(entry, Commit)])


class Keeper:
    """Deletes on behalf of the run that owns the URL. Used by rank 0 only, by one thread at a time, after its
    appends."""

    def __init__(self, storage: Storage, writer: CommitWriter, on_bytes: OnBytes = lambda count: None) -> None:
        """`on_bytes` is called with the number of bytes just read to verify a checkpoint; it may raise StorageError to
        stop that."""
        self._storage, self._writer, self._on_bytes = storage, writer, on_bytes
        self._commits: list[Commit] | None = None
        self._seen = 0
        self._damaged = set[int]()
        self._bases_proven = Counter[ObjectRef]()
        self._proven: Commit | None = None
        self._swept = False
        self._is_readable = True
        self._marked: Commit | None = None
        self._freed = 0, 0
        """The save for which room was made last, and the bytes of the commits that were deleted for it."""

    def retire(self, keep: Retention) -> None:
        """Mark the newest commit, and delete the commits that `keep` does not keep: the entry first, then the data.

        Damaged commits do not count as kept, and are deleted when they would be if they were intact. The first call
        also deletes what killed runs have left: data that no commit refers to, and half-written entries. It leaves a
        complete save alone if an entry of the journal cannot be read, or if the save is newer than the verified commit.
        If no commit is intact, nothing is deleted.

        Raises FencedError if another run has taken over, and deletes nothing more; that is checked before each commit
        that is deleted. Raises StorageError, after deleting the others, if one of them cannot be deleted.
        """
        self._mark()
        found = self._known()
        strays = [] if self._swept else self._strays(found)
        to_delete = self._choose(found, keep, strays)
        refused: StorageError | None = None
        for old in to_delete:
            self._writer.check_fence()
            try:
                delete_commit(self._storage, old, found)
            except StorageError as e:  # one that cannot be deleted does not keep the others
                refused = e
            else:
                found.remove(old)
        self._drop_bases(to_delete, found)
        stale = self._stale(strays)
        if strays and self._proven is not None:
            self._writer.check_fence()  # they were listed before this, so none belongs to a newer run
            self._storage.delete(stale)
        self._swept = len(stale) == len(strays)
        if not self._swept:
            self._proven = None  # verify a newer one next time
        if refused is not None:
            raise refused

    def make_room(self, needed_bytes: int, number: int, *, is_full: bool = False) -> bool:
        """Delete what can go if there is too little room for this run's save `number`; return whether anything was
        deleted.

        Interrupted saves are deleted first, then the oldest commits, one after the other, but never the newest intact
        one or anything newer, and no more than have the size of what is lacking: the storage may count late what has
        become free. Room is short if the storage says so, or if it has just refused a write (`is_full`); in that case,
        one step is taken. Raises FencedError, StorageError.
        """
        if not (is_full or self._is_short(needed_bytes)):
            return False
        found = self._known()
        strays = self._strays(found, before=number)
        complete = repair.may_be_complete(self._storage)
        if any(entries.folder_of(key) in complete for key in strays):
            self._prove(found, ())
        if self._proven is None:
            kept = (*complete, entries.BASE)
            strays = [key for key in strays if not key.startswith(kept)]
        if strays:
            self._writer.check_fence()
            log.warning("%s: %s: deleting the data of interrupted saves", self._storage.url, self._need(needed_bytes))
            self._storage.delete(strays)
            if is_full:
                return True
        gone = bool(strays)
        freed_bytes = self._freed[1] if self._freed[0] == number else 0
        free_bytes = _free_bytes(self._storage, entries.DATA) or 0
        lacking_bytes = needed_bytes - free_bytes if free_bytes < needed_bytes else needed_bytes
        while (
            len(found) > 1 and freed_bytes < lacking_bytes and (self._is_short(needed_bytes) or (is_full and not gone))
        ):
            oldest = min(found, key=lambda commit: commit.position)
            self._prove(found, [oldest])
            if self._proven is None or oldest.position >= self._proven.position:
                break
            self._writer.check_fence()
            log.warning(
                "%s: %s: deleting the oldest of %d checkpoints (step %d), keeping %d until there is room",
                self._storage.url,
                self._need(needed_bytes),
                len(found),
                oldest.step,
                len(found) - 1,
            )
            freed_bytes += self._bytes_of_alone(oldest, found)
            self._freed = number, freed_bytes
            delete_commit(self._storage, oldest, found)
            found.remove(oldest)
            self._drop_bases([oldest], found)
            gone = True
        return gone

    def _bytes_of_alone(self, commit: Commit, found: Collection[Commit]) -> int:
        """Return the size of what only this one of the commits needs; 0 if that cannot be read."""
        needed = {base for other in found if other is not commit for base in other.bases}
        try:
            contents = reader.read_contents(self._storage, commit)
        except (DamagedError, MissingError):
            return 0
        files = [*commit.shares, *contents.files]
        return sum(file.size_bytes for file in files if entries.folder_of(file.key) not in needed)

    @property
    def damaged(self) -> int:
        """The number of commits found to be damaged so far."""
        return len(self._damaged)

    def _drop_bases(self, deleted: Sequence[Commit], found: Sequence[Commit]) -> None:
        """Delete the base files that only deleted commits needed, unless an entry cannot be read.

        A save in progress needs only base files of the newest commit, which is never deleted.
        """
        if self._is_readable and any(commit.bases for commit in deleted):
            self._writer.check_fence()
            delete_bases(self._storage, deleted, found)

    def _stale(self, strays: Sequence[str]) -> list[str]:
        """Return the strays that may be deleted: all but complete saves that are newer than the verified commit."""
        proven, mine = self._proven, self._writer.generation
        if proven is None:
            return []
        saves = {folder: entries.save_of(folder) for folder in map(entries.folder_of, strays)}
        than = entries.save_of(proven.folder)
        newer = {
            folder
            for folder, save in saves.items()
            if save and than and save.order > than.order and save.run_id != mine.run_id
        }
        if not newer or newer.isdisjoint(repair.may_be_complete(self._storage)):
            return list(strays)
        return [key for key in strays if entries.folder_of(key) not in newer]

    def _is_short(self, needed_bytes: int) -> bool:
        free_bytes = _free_bytes(self._storage, entries.DATA)
        return free_bytes is not None and free_bytes < needed_bytes

    def _need(self, needed_bytes: int) -> str:
        free_bytes = _free_bytes(self._storage, entries.DATA)
        needs = f"a save needs {needed_bytes / 1e6:.1f} MB"
        return needs if free_bytes is None else f"{needs}, {free_bytes / 1e6:.1f} MB are free"

    def sweep_again(self) -> None:
        """Have the next `retire` look for leftovers once more: a save of this run has failed midway."""
        self._swept = False

    def _mark(self) -> None:
        """Write the newest commit's entry next to its data, too, in case the entry gets lost."""
        newest = self._writer.appended[-1] if self._writer.appended else None
        if newest is not None and newest != self._marked:
            self._marked = newest
            try:
                self._storage.put(entries.marker_key(newest.folder), [entries.encode(newest)])
            except StorageError as e:
                log.info("%s: could not write the copy of the entry of step %d: %s", self._storage.url, newest.step, e)

    def _known(self) -> list[Commit]:
        """Return all commits that have not been deleted."""
        own = self._writer.appended
        if self._commits is None:
            read = list(read_entries(self._storage, self._writer.generation.position))
            found = [entry for _, entry in read]
            listed = {position for position, _ in read}
            self._commits = [entry for entry in found if isinstance(entry, Commit)]
            self._commits += [commit for commit in own if commit.position not in listed]  # a listing may lag
            self._is_readable = not any(isinstance(entry, DamagedError) for entry in found)
        else:
            self._commits += own[self._seen :]
        self._seen = len(own)
        return self._commits

    def _choose(self, found: list[Commit], keep: Retention, strays: Collection[str]) -> list[Commit]:
        """Return the commits to delete, oldest first, all of them older than a verified one."""
        while True:
            to_delete = self._by_rule(found, keep)
            if not to_delete and not strays:
                return []
            known_damaged = len(self._damaged)
            self._prove(found, to_delete)
            if self._proven is None:
                log.warning("%s: no checkpoint there is intact: nothing is deleted", self._storage.url)
                return []
            if len(self._damaged) == known_damaged:
                proven = self._proven.position
                return [commit for commit in to_delete if commit.position < proven]

    def _by_rule(self, found: list[Commit], keep: Retention) -> list[Commit]:
        """Return what `keep` does not keep, counting only commits that are not known to be damaged."""
        good = [commit for commit in found if commit.position not in self._damaged]
        to_delete = entries.commits_to_delete(good, keep)
        to_delete += [commit for commit in entries.commits_to_delete(found, keep) if commit not in good]
        return sorted(to_delete, key=lambda commit: commit.position)

    def _prove(self, found: list[Commit], to_delete: Collection[Commit]) -> None:
        """Set `_proven` to an intact commit that stays: the former one, or else the newest intact one.

        The former one is sufficient if it is newer than all that are deleted, and a quick check finds it intact.
        """
        known, self._proven = self._proven, None
        newest_to_delete = max((commit.position for commit in to_delete), default=-1)
        stays = known is not None and known in found and known.position > newest_to_delete
        if known is not None and stays and self._is_whole(known, verify.glance):
            self._proven = known
            return
        for commit in sorted(found, key=lambda commit: -commit.position):
            if commit.position not in self._damaged and self._is_whole(commit, self._read):
                self._proven = commit
                return

    def _read(self, storage: Storage, commit: Commit) -> None:
        verify.verify(storage, commit, self._on_bytes, self._bases_proven)

    def _is_whole(self, commit: Commit, check: Callable[[Storage, Commit], None]) -> bool:
        """Return whether `check` finds nothing wrong with a commit, nor the storage has lost its entry. Damage is
        logged once."""
        try:
            if entries.encode(read_entry(self._storage, commit.position)) != entries.encode(commit):
                raise DamagedError(f"journal entry {commit.position}: it is not as it was written")
            check(self._storage, commit)
        except (DamagedError, MissingError) as e:
            self._damaged.add(commit.position)
            log.warning(
                "%s: the checkpoint of step %d is damaged (%s): keeping an older one in its place",
                self._storage.url,
                commit.step,
                e,
            )
            return False
        return True

    def _strays(self, known: Collection[Commit], before: int = 0) -> list[str]:
        """Return the keys of data that no known commit needs, and of entries that older runs left half-written.

        Later saves of this run are left out, because ranks may be writing one; if save `before` is the next, they are
        not writing an earlier one.
        """
        found = []
        kept = {folder for commit in known for folder in (commit.folder, *commit.bases)}
        prefixes = [entries.DATA, entries.BASE]
        if not self._is_readable:  # an unreadable entry may stand for any complete save
            bases = repair.bases_of_complete(self._storage, but_for=kept)
            kept |= repair.may_be_complete(self._storage) | (bases or set())
            prefixes = prefixes[:1] if bases is None else prefixes
        mine, own = self._writer.generation, self._writer.appended
        saves = entries.number_of(own[-1].folder) or 0 if own else 0
        for key in (key for prefix in prefixes for key in all_keys(self._storage, prefix)):
            folder = entries.folder_of(key)
            number = entries.number_of(folder)
            if number is None or folder in kept:
                continue
            if number <= max(saves, before - 1) or entries.run_of(folder) != mine.run_id:
                found.append(key)
        for key in all_keys(self._storage, entries.JOURNAL):
            position = entries.position_of_partial(key)
            if position is not None and position <= mine.position:  # later ones belong to newer runs or to this one
                found.append(key)
        return found
