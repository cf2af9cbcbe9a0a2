"""What a run stores in addition to its checkpoints and takes along when it moves.

interruptions.json     how often its work was lost (see `elasticctl_train.interruptions`); only an optimization
rollbacks/…            see `rollbacks`
"""

from __future__ import annotations

from elasticctl_store.checkpoints import rollbacks
from elasticctl_store.errors import DamagedError, MissingError
from elasticctl_store.storage import Storage, all_keys

INTERRUPTIONS = "interruptions.json"


def copy(source: Storage, target: Storage) -> None:
    """Copy the source's notes to the target. Raises StorageError; DamagedError for an invalid rollback note."""
    for note in rollbacks.read_all(source):
        rollbacks.write(target, note)
    try:
        seen = source.get(INTERRUPTIONS)
    except (MissingError, DamagedError):
        return
    target.put(INTERRUPTIONS, [seen])


def delete(storage: Storage) -> None:
    """Delete all notes. Raises StorageError."""
    storage.delete([INTERRUPTIONS, *all_keys(storage, rollbacks.PREFIX)])
