"""Find the newest intact checkpoint and read it on all ranks; older ones take the place of damaged ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from elasticctl_store.checkpoints import entries, repair
from elasticctl_store.checkpoints.commits import read_commits, read_entries
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.checkpoints.reader import Contents, fetch_documents, parse
from elasticctl_store.checkpoints.state_trees import decode
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError, MissingError, RestoreError, StorageError
from elasticctl_store.storage import Storage
from elasticctl_train.checkpoint import dtensor, restore, tree
from elasticctl_train.checkpoint.memory.copies import Copies, find_sets
from elasticctl_train.checkpoint.plans import State
from elasticctl_train.checkpoint.restore import RestoreSource
from elasticctl_train.dist import World

log = logging.getLogger("elasticctl_train")


Like = State | Callable[[dict[str, Any], str], State]
"""The live state, or a function that returns it. The function gets the state to be restored, whose tensors are on the
meta device (without data), and the checkpoint's name. It may raise RestoreError."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was read. `local` is what this rank saved as its own; None if that rank did not exist then.

    `is_copy`: it comes from the memory of launchers and is not stored.
    """

    commit: Commit
    state: dict[str, Any]
    local: dict[str, Any] | None
    is_copy: bool = False


class Newest:
    """Finds the newest intact checkpoint for all ranks; rank 0 records those that are skipped."""

    def __init__(self, world: World, unreadable: Collection[str] = (), least: int = 0) -> None:
        """`unreadable` has one line for each checkpoint that is already known to be unreadable; for `least`, see
        `read_entries`."""
        self._world, self._least = world, least
        self._unreadable = list(unreadable)
        self._bad_entries: list[str] = []

    def read(self, place: RestoreSource, wanted: Callable[[Commit], bool], like: Like | None) -> Restored | None:
        """Return the newest intact checkpoint at `place` among those that are `wanted` on rank 0; None if there is
        none.

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
        """Return the newest complete copy in launchers' memory that is newer than the commit of that (generation,
        step).

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
        """Raise StorageError, on every rank, if the storage holds checkpoints, or traces of any, that cannot be read.

        Call this if `read` has found none.
        """
        mine = None
        if self._world.rank == 0:
            holds_saves = repair.holds_saves(storage)
            mine = [*self._unreadable, *self._bad_entries]
            if not self._unreadable and not holds_saves:
                mine = []  # entries without data: there is nothing to lose
            mine = mine or repair.find_traces(storage, self._least)
            if holds_saves and not mine and next(read_commits(storage, self._least), None) is None:
                said = "%s: there is data of saves, but only such as interrupted ones leave: no checkpoint is restored"
                log.warning(said, storage.url)
        found = self._world.broadcast(mine)
        if found:
            shown = repair.name_first(found)
            raise StorageError(
                f"{storage.url}: there are checkpoints, and none of them can be read: {shown}. FIX: restore what is "
                f"damaged, or delete it and start at step 0: elasticctl checkpoints repair {storage.url} --start-over"
            )

    def _readable(self, storage: Storage, wanted: Callable[[Commit], bool]) -> Iterator[tuple[int, str, list[Any]]]:
        """On rank 0: yield the commits whose documents are intact, newest first, as a message to all ranks."""
        for position, commit in read_entries(storage, self._least):
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
            said = "%s: the checkpoint of step %d is damaged (%s); trying an older one"
            log.warning(said, storage.url, commit.step, error)

    def _alike(self, found: Contents, like: Like | None, url: str, step: int) -> dict[str, torch.Tensor]:
        """Return the live state's sharded tensors that have the same name and shape in the checkpoint."""
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
