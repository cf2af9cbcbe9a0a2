"""Finds the newest checkpoint that is whole, and reads it on all ranks; older ones take the place of damaged ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from elasticctl_store.checkpoints import entries, repair
from elasticctl_store.checkpoints.commits import read_entries
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.checkpoints.reader import Contents, fetch_documents, parse
from elasticctl_store.checkpoints.state_trees import decode
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError, MissingError, RestoreError, StorageError
from elasticctl_store.storage import Storage
from elasticctl_train.checkpoint import dtensor, restore, tree
from elasticctl_train.checkpoint.memory.copies import Copies, find_sets
from elasticctl_train.checkpoint.restore import RestoreSource
from elasticctl_train.checkpoint.shares import State
from elasticctl_train.dist import World

log = logging.getLogger("elasticctl_train")

_SHOWN = 5
"""Of a list in an error no more is shown."""

Like = State | Callable[[dict[str, Any], str], State]
"""The live state, or what returns it, given the state to be restored, whose tensors have no data yet (they are on the
meta device), and the checkpoint's name; the function may raise RestoreError."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint as read. `local` is what this rank saved as its own; None when it was not there at that time.

    `is_copy`: it has not been stored, and comes from the memory of launchers.
    """

    commit: Commit
    state: dict[str, Any]
    local: dict[str, Any] | None
    is_copy: bool = False


class Newest:
    """The newest whole checkpoint, for all ranks, and on rank 0 a note of every one that was passed over."""

    def __init__(self, world: World, unreadable: Collection[str] = ()) -> None:
        """`unreadable` has one line for each checkpoint that is already known to be past reading."""
        self._world = world
        self._unreadable = list(unreadable)
        self._bad_entries: list[str] = []

    def read(self, place: RestoreSource, wanted: Callable[[Commit], bool], like: Like | None) -> Restored | None:
        """The newest checkpoint at `place`, of those that are `wanted` on rank 0, that is whole.

        Raises RestoreError as `like` does, and StorageError.
        """
        candidates = self._readable(place.storage, wanted) if self._world.rank == 0 else iter(())
        while True:
            message = self._world.broadcast(next(candidates, None))
            if message is None:
                return None
            position, entry, documents = message
            commit = entries.decode_commit(entry.encode(), position)
            found = parse(commit, documents)
            alike = self._alike(found, like, place.storage.url, commit.step)
            try:
                state, local = restore.read(place, found, alike)
            except DamagedError as e:
                self._pass_over(place.storage, commit, e)
                continue
            return Restored(commit, state, local)

    def read_copies(self, copies: Copies, newer_than: tuple[int, int], like: Like | None) -> Restored | None:
        """The newest whole copy in launchers' memory that is newer than the commit of that generation and step.

        Raises RestoreError as `like` does.
        """
        for candidate in find_sets(self._world, copies, newer_than):
            commit = candidate.commit
            try:
                found = parse(commit, candidate.documents)
                alike = self._alike(found, like, "a copy in memory", commit.step)
                state, local = restore.read(RestoreSource(copies.storage, self._world, copies), found, alike)
            except StorageError as e:
                if self._world.rank == 0:
                    log.warning("the copy of step %d in workers' memory cannot be used: %s", commit.step, e)
                continue
            return Restored(commit, state, local, is_copy=True)
        return None

    def raise_if_lost(self, storage: Storage) -> None:
        """Raise StorageError, on every rank, where the storage holds checkpoints that cannot be read."""
        mine = [*self._unreadable, *self._bad_entries] if self._world.rank == 0 else None
        if mine and not self._unreadable and not repair.holds_saves(storage):
            mine = []  # entries without data: nothing to lose
        found = self._world.broadcast(mine)
        if found:
            shown = "; ".join(found[:_SHOWN]) + (f"; {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
            raise StorageError(
                f"{storage.url}: there are checkpoints, and none of them can be read: {shown}. FIX: restore what is "
                f"damaged, or delete it and start at step 0: elasticctl checkpoints repair {storage.url} --start-over"
            )

    def _readable(self, storage: Storage, wanted: Callable[[Commit], bool]) -> Iterator[tuple[int, str, list[Any]]]:
        """On rank 0: the commits whose documents are whole, newest first, as a message to all."""
        for position, commit in read_entries(storage):
            if isinstance(commit, DamagedError):
                log.warning("%s: %s; skipped", storage.url, commit)
                self._bad_entries.append(str(commit))
            if not isinstance(commit, Commit) or not wanted(commit):
                continue
            try:
                documents = fetch_documents(storage, commit)
                parse(commit, documents)
            except (DamagedError, MissingError) as e:
                self._pass_over(storage, commit, e)
                continue
            yield position, entries.encode(commit).decode(), documents

    def _pass_over(self, storage: Storage, commit: Commit, error: StorageError) -> None:
        if self._world.rank == 0:
            self._unreadable.append(f"step {commit.step}: {error}")
            said = "%s: the checkpoint of step %d is damaged (%s); trying the one before"
            log.warning(said, storage.url, commit.step, error)

    def _alike(self, found: Contents, like: Like | None, url: str, step: int) -> dict[str, torch.Tensor]:
        """The live state's sharded tensors that have a namesake of their shape in the checkpoint."""
        error: RestoreError | None = None
        live: State = {}
        try:
            live = like(decode(found.state, _without_data), f"{url}, step {step}") if callable(like) else like or {}
        except RestoreError as e:
            error = e
        if any(self._world.highest(error is not None)):
            raise error or RestoreError(f"{url}: the checkpoint does not fit another rank's state; see its log")
        leaves = (leaf for part, value in live.items() for leaf in tree.leaves(value, part))
        return {
            name: tensor
            for name, tensor in leaves
            if dtensor.is_sharded(tensor) and name in found.tensors and found.tensors[name].shape == tensor.shape
        }


def _without_data(name: str, kind: TensorType) -> torch.Tensor:
    return torch.empty(kind.shape, dtype=tree.DTYPES[kind.dtype], device="meta")
