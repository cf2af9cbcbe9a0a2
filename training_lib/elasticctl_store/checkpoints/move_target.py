"""The storage that a job is being moved to: held while the job's own storage is open, released once that is closed.

A hold is an entry of the target's journal which says that the job continues at the *source*, so no run can take over
the target. Its position is that of the move in the source's journal, where no commit can be; the copied commit has a
lower position. The release is an entry after it.
"""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress

from elasticctl_store.checkpoints import commits, entries, repair, run_records
from elasticctl_store.checkpoints.entries import Commit, Generation, Moved
from elasticctl_store.errors import ExistsError, StorageError
from elasticctl_store.storage import Storage

_TRIAL = "trial-of-a-move"


def check(source: Storage, target: Storage) -> None:
    """Raise StorageError if a run has used the target, or if another job is being moved to it."""
    for _, entry in commits.read_entries(target):
        if isinstance(entry, Generation):
            raise StorageError(f"{target.url}: a job has been running there. FIX: choose an empty target")
        if isinstance(entry, Moved) and entry.to != source.url:
            raise StorageError(
                f"{target.url}: the job of {entry.to} has moved there, or is about to. FIX: choose an empty target"
            )


def try_to_write(target: Storage) -> None:
    """Raise StorageError if this process may not write to the target."""
    target.put(_TRIAL, [b"to see whether a job can be moved here"])
    with suppress(StorageError):  # a move does not need the right to delete
        target.delete([_TRIAL])


def hold(source: Storage, target: Storage, position: int) -> None:
    """Keep every run from taking over the target until `release`.

    `position` is that of the move's own entry in the source's journal. Raises StorageError as `check` does.
    """
    check(source, target)
    key = entries.key_of(position)
    mine = Moved(position, 0, source.url, time.time())
    with suppress(ExistsError):  # another job's, which `check` finds below
        target.put(key, [entries.encode(mine)], if_absent=True)
    try:
        check(source, target)  # if two jobs are moved there at once, each sees the other
    except StorageError:
        if commits.read_entry(target, position) == mine:
            target.delete([key])
        raise


def release(source: Storage, target: Storage) -> None:
    """Let the job continue at the target. May be repeated. Raises StorageError if the source is not closed."""
    moved = commits.moved_to(source)
    if moved is None or moved.to != target.url:
        raise StorageError(f"{source.url}: it has not been moved to {target.url}")
    for position, entry in commits.read_entries(target):
        if isinstance(entry, Moved) and entry.to == source.url:
            start = Generation(position + 1, moved.generation, secrets.token_hex(4), socket.gethostname(), time.time())
            with suppress(ExistsError):  # an earlier try of the same move
                target.put(entries.key_of(start.position), [entries.encode(start)], if_absent=True)
        return


def discard(source: Storage, target: Storage) -> None:
    """Delete what was copied to a target that is still held for this source, because the job continues elsewhere.

    Does nothing if the target's journal contains anything else. Raises StorageError.
    """
    found = dict(commits.read_entries(target))
    holds = {position for position, entry in found.items() if isinstance(entry, Moved) and entry.to == source.url}
    copies = [entry for entry in found.values() if isinstance(entry, Commit)]
    if not holds or max(holds) != max(found) or len(holds) + len(copies) != len(found):
        return
    for copy in copies:
        commits.delete_commit(target, copy)
    target.delete(list(repair.save_keys(target)))
    run_records.delete(target)
    target.delete([entries.key_of(position) for position in sorted(holds)])
