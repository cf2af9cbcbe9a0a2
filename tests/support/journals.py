"""Journals for tests: runs that commit tiny checkpoints, which are whole, and delete old ones; without torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from elasticctl_store.checkpoints import entries, reader, repair, tensor_files
from elasticctl_store.checkpoints.commits import CommitWriter, read_commits
from elasticctl_store.checkpoints.entries import Commit, Generation, ObjectRef, Retention
from elasticctl_store.checkpoints.retention import Keeper
from elasticctl_store.storage import Storage


class Owner:
    """A run that has taken a URL over."""

    def __init__(self, storage: Storage) -> None:
        self._writer = CommitWriter.take_over(storage)
        self._keeper = Keeper(storage, self._writer)

    @property
    def generation(self) -> Generation:
        return self._writer.generation

    def append(self, commit: Commit) -> Commit:
        return self._writer.append(commit)

    def retire(self, keep: Retention) -> None:
        self._keeper.retire(keep)

    def check_fence(self) -> None:
        self._writer.check_fence()

    def sweep_again(self) -> None:
        self._keeper.sweep_again()


def commit(storage: Storage, writer: CommitWriter | Owner, step: int) -> Commit:
    """A commit of a state without tensors."""
    ref, size_bytes = write_share(storage, share_key(writer, step))
    return writer.append(Commit(0, writer.generation.generation, 0, step, 0, (ref,), size_bytes))


def write_share(storage: Storage, key: str) -> tuple[ObjectRef, int]:
    """Store the only share of a checkpoint; returns what its document is, and how large both objects are."""
    header = tensor_files.lay_out({}).header
    file = ObjectRef(entries.tensors_key(key), len(header), entries.checksum([header]))
    save = entries.save_of(entries.folder_of(key))
    document = {
        "rank": 0,
        "world_size": 1,
        "fingerprint": "",
        "state": {},
        "local": {},
        "tensors": asdict(file),
        "pieces": [],
        "label": repair.label(save.step if save else 0, 0, {}, 0.0),
    }
    data = reader.seal(document)
    storage.put(file.key, [header])
    storage.put(key, [data])
    return ObjectRef(key, len(data), entries.checksum([data])), len(header) + len(data)


def share_key(writer: CommitWriter | Owner, step: int) -> str:
    """The key of what a run writes for a step; its saves are numbered as its steps."""
    mine = writer.generation
    return entries.share_key(entries.save_folder(mine.generation, step, step, mine.run_id), 0, 1)


def steps(storage: Storage) -> list[int]:
    """The steps that are committed, newest first."""
    return [entry.step for entry in read_commits(storage)]


def flip(root: Path, found: Commit) -> None:
    """Change a byte of a commit's tensor file: no glance finds it."""
    path = root / entries.tensors_key(found.shares[0].key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
