"""The storage that a job is being moved to: held while the job's own is open, released once that is closed.

A hold is an entry of the target's journal that says that the job continues at the *source*, so no run can take the
target over. It stands at the position that the move has in the source's journal, which no commit has there; the copied
commit lies below it. The release is an entry behind it.
"""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress

from elasticctl_store.checkpoints import commits, entries, notes, repair
from elasticctl_store.checkpoints.entries import Commit, Generation, Moved
from elasticctl_store.errors import ExistsError, StorageError
from elasticctl_store.storage import Storage

_TRIAL = "trial-of-a-move"


def check(source: Storage, target: Storage) -> None:
    """Raise StorageError where a run has been, or another job is being moved to."""
    for _, entry in commits.read_entries(target):
        if isinstance(entry, Generation):
            raise StorageError(f"{target.url}: a job has been running there. FIX: choose an empty target")
        if isinstance(entry, Moved) and entry.to != source.url:
            raise StorageError(
                f"{target.url}: the job of {entry.to} is there, or on its way there. FIX: choose an empty target"
            )


def try_to_write(target: Storage) -> None:
    """Raise StorageError where this process may not write."""
    target.put(_TRIAL, [b"to see whether a job can be moved here"])
    with suppress(StorageError):  # whoever may not delete can still be moved here
        target.delete([_TRIAL])


def hold(source: Storage, target: Storage, position: int) -> None:
    """Let nobody take the target over before `release`.

    `position` is that of the move's own entry in the source's journal. Raises StorageError as `check` does.
    """
    check(source, target)
    key = entries.key_of(position)
    mine = Moved(position, 0, source.url, time.time())
    with suppress(ExistsError):  # another job's, which is found now
        target.put(key, [entries.encode(mine)], if_absent=True)
    try:
        check(source, target)  # of two jobs that are moved there at once, each sees the other
    except StorageError:
        if commits.read_entry(target, position) == mine:
            target.delete([key])
        raise


def release(source: Storage, target: Storage) -> None:
    """Let the job go on at the target. Raises StorageError where the source is not closed; once more is no error."""
    moved = commits.moved_to(source)
    if moved is None or moved.to != target.url:
        raise StorageError(f"{source.url}: it has not been moved to {target.url}")
    for position, entry in commits.read_entries(target):
        if isinstance(entry, Moved) and entry.to == source.url:
            start = Generation(position + 1, moved.generation, secrets.token_hex(4), socket.gethostname(), time.time())
            with suppress(ExistsError):  # another try of the same move
                target.put(entries.key_of(start.position), [entries.encode(start)], if_absent=True)
        return


def discard(source: Storage, target: Storage) -> None:
    """Delete what was copied to a target that is still held for this source: the job goes on elsewhere.

    Touches nothing where anything else is in the target's journal. Raises StorageError.
    """
    found = dict(commits.read_entries(target))
    holds = {position for position, entry in found.items() if isinstance(entry, Moved) and entry.to == source.url}
    copies = [entry for entry in found.values() if isinstance(entry, Commit)]
    if not holds or max(holds) != max(found) or len(holds) + len(copies) != len(found):
        return
    for copy in copies:
        commits.delete_commit(target, copy)
    target.delete(list(repair.save_keys(target)))
    notes.delete(target)
    target.delete([entries.key_of(position) for position in sorted(holds)])
