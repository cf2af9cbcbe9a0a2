"""What a run stores in addition to its checkpoints and takes along when it moves.

    interruptions.json              how often its work was lost (see `elasticctl_train.interruptions`)
    rollbacks/<generation>.json     written by the run of that generation, before its processes exit

The first is only an optimization. A rollback is a note that the run has gone back to an earlier checkpoint, and which
of its data it skips from there on. It is valid until a newer generation has committed: what that commits was trained
without those batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.errors import DamagedError, MissingError
from elasticctl_store.storage import Storage, all_keys

INTERRUPTIONS = "interruptions.json"
ROLLBACKS = "rollbacks/"


@dataclass(frozen=True, slots=True)
class Rollback:
    """The run `generation` met a loss of `value` ("NaN", "inf", "-inf") at `step`.

    `skip_to` is its position in its data after the batch of that step, in the format of the code that wrote the note.
    """

    generation: int
    step: int
    value: str
    skip_to: Mapping[str, Any] = field(default_factory=dict)

    def allows(self, commit: Commit) -> bool:
        """Return whether training may continue from this checkpoint."""
        return commit.generation > self.generation or (commit.step < self.step and not commit.not_finite)

    def is_past(self, commit: Commit) -> bool:
        """Return whether this checkpoint was made after the run had gone back."""
        return commit.generation > self.generation


def write_rollback(storage: Storage, note: Rollback) -> None:
    """Store the note. Raises StorageError."""
    storage.put(f"{ROLLBACKS}{note.generation:012d}.json", [json.dumps(asdict(note)).encode()])


def read_rollbacks(storage: Storage) -> list[Rollback]:
    """Return all notes of a URL, oldest first. Raises StorageError; DamagedError for an invalid note."""
    return [_decode(storage.get(key), f"{storage.url}: {key}") for key in all_keys(storage, ROLLBACKS)]


def pending_rollback(storage: Storage) -> Rollback | None:
    """Return the note of a run that has gone back, if nothing has been committed since. Raises as `read_rollbacks`."""
    notes = read_rollbacks(storage)
    newest = next(read_commits(storage), None) if notes else None
    return None if not notes or (newest is not None and notes[-1].is_past(newest)) else notes[-1]


def copy_records(source: Storage, target: Storage) -> None:
    """Copy the source's records to the target. Raises StorageError; DamagedError for an invalid rollback note."""
    for note in read_rollbacks(source):
        write_rollback(target, note)
    try:
        seen = source.get(INTERRUPTIONS)
    except (MissingError, DamagedError):
        return
    target.put(INTERRUPTIONS, [seen])


def delete_records(storage: Storage) -> None:
    """Delete all records. Raises StorageError."""
    storage.delete([INTERRUPTIONS, *all_keys(storage, ROLLBACKS)])


def _decode(data: bytes, where: str) -> Rollback:
    try:
        match json.loads(data):
            case {"generation": int(generation), "step": int(step), "value": str(value), "skip_to": dict(skip_to)}:
                return Rollback(generation, step, value, skip_to)
    except (ValueError, RecursionError):
        pass
    raise DamagedError(f"{where}: this is not a valid rollback note. FIX: delete it")
