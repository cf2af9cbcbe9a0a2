"""What a run notes beside its checkpoints, and takes along when it moves: what it knows of losses, its rollbacks.

interruptions.json     how often its work was lost (see `elasticctl_train.interruptions`); only a help
rollbacks/…            see `rollbacks`
"""

from __future__ import annotations

from elasticctl_store.checkpoints import rollbacks
from elasticctl_store.errors import DamagedError, MissingError
from elasticctl_store.storage import Storage, all_keys

INTERRUPTIONS = "interruptions.json"


def copy(source: Storage, target: Storage) -> None:
    """Have the target know what the source does. Raises StorageError; DamagedError for a rollback that is none."""
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
