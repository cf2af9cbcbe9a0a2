"""`Checkpointer`: saves beside training, restores the newest whole checkpoint.

    checkpoints = Checkpointer(storage.open("file:///runs/a"))      # takes the URL over from any older run
    restored = checkpoints.restore()                                # None, or the newest whole checkpoint
    checkpoints.save({"model": model.state_dict()}, Label(step=100))    # copies, then writes in the background
    checkpoints.settle()                                            # waits until it is committed

With several ranks, give it `dist.join()` as its world, on all of them; all make the same calls in the same order, and
only `prepare`, `save` and `busy` involve no message. Sharded tensors (DTensor) are restored as such where `restore` is
given the live state: `checkpoints.restore({"model": model.state_dict()})`.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.commits import CommitWriter, read_commits
from elasticctl_store.checkpoints.entries import Commit, Retention
from elasticctl_store.checkpoints.reader import Contents, fetch_documents, parse
from elasticctl_store.checkpoints.state_trees import decode
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import (
    DamagedError,
    FencedError,
    MissingError,
    NoMemoryError,
    RestoreError,
    SaveError,
    StorageError,
)
from elasticctl_store.storage import Storage, Waits
from elasticctl_train.checkpoint import dtensor, restore, shares, tree
from elasticctl_train.checkpoint.buffers import Background, Buffers, Copier
from elasticctl_train.checkpoint.local_tier import Tier
from elasticctl_train.checkpoint.restore import RestoreSource
from elasticctl_train.dist import World

log = logging.getLogger("elasticctl_train")

_ROUND_S, _LONGEST_ROUND_S = 0.005, 0.25
"""Ranks that wait for a save to end meet after so long, then ever more rarely."""
NICENESS = 10
"""Of the thread that saves and those it starts: a save beside training takes what training leaves of the processors."""

State = Mapping[str, Any]
Like = State | Callable[[dict[str, Any], str], State]
"""The live state, or what returns it, given the state to be restored, whose tensors have no data yet (they are on the
meta device), and the checkpoint's name; the function may raise RestoreError."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint as read. `local` is what this rank saved as its own; None when it was not there at that time."""

    commit: Commit
    state: dict[str, Any]
    local: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Label:
    """What a checkpoint says about itself."""

    step: int
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Checkpointer:
    """The checkpoints of one URL, for as long as no younger run takes it over."""

    def __init__(
        self,
        storage: Storage,
        world: World = World(),  # noqa: B008 - frozen
        *,
        keep: Retention = Retention(),  # noqa: B008 - frozen
        on_commit: Callable[[Commit, float], None] | None = None,
        waits: Waits | None = None,
    ) -> None:
        """Take over the URL. `on_commit(commit, duration_s)` is called on rank 0, in the background thread.

        `waits` are those that `storage` was opened with.
        """
        self._storage, self._world = storage, world
        self._keep, self._on_commit = keep, on_commit
        self._writer = CommitWriter.take_over(storage) if world.rank == 0 else None
        mine = self._writer.generation if self._writer else None
        number, run_id = world.broadcast([mine.generation, mine.run_id] if mine else None)
        self.generation: int = number
        self._run_id: str = run_id
        self._saves = 0
        self._failed_save = 0
        self._error: Exception | None = None
        self._fenced: FencedError | None = None
        self._abandon = threading.Event()
        self._background = Background("elasticctl-save", NICENESS)
        self._copier = Copier()
        self._tier = Tier.open(storage.url, world.rank, number)
        self._plan: shares.Plan | None = None
        self._buffers: Buffers | None = None
        self._restored_folder = ""
        self._committed_save = 0
        self._waits = waits or Waits()
        self.skipped = 0
        self.is_away = self.has_given_up = False

    @property
    def url(self) -> str:
        """Where the checkpoints are."""
        return self._storage.url

    @property
    def busy(self) -> bool:
        """Is this rank still writing its share, or, on rank 0, not done with the commit?"""
        return self._background.busy

    def restore(self, like: Like | None = None) -> Restored | None:
        """Read the newest checkpoint that is whole; damaged ones are logged and passed over.

        Tensors come back on the CPU; where `like` has a sharded one, as that rank's part of it. What is returned may
        share memory: load it and let it go. Raises RestoreError as `like` does, and StorageError.
        """
        restored = self._newest(RestoreSource(self._storage, self._world, self._tier), None, like)
        self._restored_folder = restored.commit.folder if restored else ""
        return restored

    def start_from(self, origin: Storage, step: int | None, like: Like | None = None) -> Restored:
        """Read a checkpoint of another URL, and change nothing there: the newest whole one, or that of `step`.

        Otherwise as `restore`. Raises MissingError, on every rank, when there is no such one.
        """
        restored = self._newest(RestoreSource(origin, self._world, None), step, like)
        if restored is None:
            known = list({commit.step: 0 for commit in read_commits(origin)}) if self._world.rank == 0 else None
            steps = ", ".join(map(str, self._world.broadcast(known))) or "none at all"
            wanted = "a whole checkpoint" if step is None else f"a whole checkpoint of step {step}"
            raise MissingError(f"{origin.url}: {wanted} to start from is not there; the steps that are: {steps}")
        return restored

    def prepare(self, state: State, *, local: State | None = None, rank_0_only: Collection[str] = ()) -> None:
        """Get ready to save such states, beside training: without it, the first save takes far longer than others.

        Makes this rank's buffers, one or with a local tier two. Arguments as for `save`. Raises StateError.
        """
        self._background.join()
        self._arrange(shares.flatten(state, local or {}), rank_0_only)

    def save(
        self, state: State, label: Label, *, local: State | None = None, rank_0_only: Collection[str] = ()
    ) -> None:
        """Copy the state now and write it in the background; waits first for a save that is still in flight.

        `state` is the same on all ranks, `local` this rank's own; see `shares.plan`. Raises StateError, having written
        nothing. Storage errors go to the log and to `settle`. Between two saves call `agree` or `settle`: ranks other
        than 0 hear there of the commit, and until then the local tier keeps the snapshot of the one before.
        """
        self._background.join()
        started_s = time.monotonic()
        with _no_collection():
            share = self._copied(state, local or {}, rank_0_only)
        self._saves += 1
        folder = entries.save_folder(self.generation, self._saves, label.step, self._run_id)
        self._abandon.clear()
        self._background.start(lambda: self._write(share, folder, label, started_s))

    def _copied(self, state: State, local: State, rank_0_only: Collection[str]) -> shares.Share | NoMemoryError:
        """This rank's share, copied, or why there is none: from here on training may change the state."""
        flat = shares.flatten(state, local)
        plan, buffers = self._arrange(flat, rank_0_only)
        try:
            buffer = buffers.next()
        except NoMemoryError as e:
            return e.with_traceback(None)  # whose frames hold the state
        if self._tier is not None and buffer.in_tier:
            self._tier.unlabel(buffer.index)
        return shares.Share(plan, buffer, flat.state, flat.local, plan.fill(buffer, flat, self._copier))

    def agree(self, due: bool, next_check: int, notice: bool = False) -> tuple[bool, int, bool]:
        """All ranks meet: is a save to be started now, when is the next check, has any rank seen notice?

        Rank 0's `due` and `next_check` count, and anybody's `notice`. A save that is due while one is in flight on any
        rank is skipped and counted. Raises FencedError on every rank when a younger run has taken over.
        """
        mine = (due, next_check) if self._world.rank == 0 else (0, 0)
        anyone_due, check, noticed, busy, committed, failed, fenced, away = self._world.highest(
            *mine, notice, self.busy, self._committed_save, self._failed_save, self._fenced is not None, self._waiting()
        )
        self.is_away = bool(away)
        self._react(failed, fenced)
        self._hear(committed)
        if anyone_due and busy:
            self.skipped += 1
            if self.skipped & (self.skipped - 1) == 0:  # the 1st, 2nd, 4th, …: enough to be told
                log.info("a save came due while the last is still being written: skipped (%d so far)", self.skipped)
        return bool(anyone_due and not busy), check, bool(noticed)

    def settle(self, give_up: Callable[[], bool] = lambda: False, *, is_last: bool = False) -> bool:
        """Wait, on all ranks, until no save is in flight; False, on all of them, if the last one was not committed.

        While any rank waits for the storage (`is_away`), all stop waiting as soon as `give_up` is true on one: then
        `has_given_up`, and the save is still in flight. With `is_last` nobody waits for the deletion of older commits
        either. Raises FencedError on every rank when a younger run has taken over.
        """
        pause_s = _ROUND_S
        while True:
            self._background.join(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_ROUND_S)
            busy, failed, fenced, committed, away, wanted = self._world.highest(
                self.busy,
                self._failed_save,
                self._fenced is not None,
                self._committed_save,
                self._waiting(),
                give_up(),
            )
            self.is_away = bool(away)
            self._react(failed, fenced)
            is_committed = committed == self._saves
            self.has_given_up = bool(busy and away and wanted and not is_committed)
            if not busy or self.has_given_up or (is_last and away and is_committed):
                break
        self._hear(committed)
        return is_committed

    def failure(self) -> SaveError:
        """The last failed save as an error to be raised."""
        reason = self._error or "another rank could not write its share; see its log"
        return SaveError(f"{self.url}: the last checkpoint was not committed: {reason}")

    def abandon(self, grace_s: float) -> None:
        """Give a save in flight `grace_s` seconds, then give it up: for a run that is failing. No message is sent."""
        self._background.join(grace_s)
        self._abandon.set()

    def _waiting(self) -> bool:
        return bool(self._waits.reason())

    def _react(self, failed_save: int, fenced: int) -> None:
        if fenced:
            raise self._fenced or FencedError(f"{self.url}: rank 0 found that a younger run has taken over")
        if failed_save and failed_save == self._saves:
            self._abandon.set()

    def _hear(self, committed_save: int) -> None:
        """On ranks other than 0, which do not commit: the last save is known to stand."""
        if committed_save == self._saves != self._committed_save:
            self._committed_save = committed_save
            self._background.join()
            self._background.start(self._keep_snapshot)

    def _newest(self, place: RestoreSource, step: int | None, like: Like | None) -> Restored | None:
        """The newest checkpoint at `place` (of this step, where one is given) that is whole."""
        candidates = self._readable(place.storage, step) if self._world.rank == 0 else iter(())
        while True:
            message = self._world.broadcast(next(candidates, None))
            if message is None:
                return None
            position, entry, documents = message
            commit = entries.decode_commit(entry.encode(), position)
            found = parse(commit, documents)
            alike = self._alike(found, like, f"{place.storage.url}, step {commit.step}")
            try:
                state, local = restore.read(place, found, alike)
            except DamagedError as e:
                self._pass_over(place.storage, commit, e)
                continue
            return Restored(commit, state, local)

    def _readable(self, storage: Storage, step: int | None) -> Iterator[tuple[int, str, list[Any]]]:
        """On rank 0: the commits whose documents are whole, newest first, as a message to all."""
        for commit in read_commits(storage):
            if step is not None and commit.step != step:
                continue
            try:
                documents = fetch_documents(storage, commit)
                parse(commit, documents)
            except (DamagedError, MissingError) as e:
                self._pass_over(storage, commit, e)
                continue
            yield commit.position, entries.encode(commit).decode(), documents

    def _pass_over(self, storage: Storage, commit: Commit, error: StorageError) -> None:
        if self._world.rank == 0:
            said = "%s: the checkpoint of step %d is damaged (%s); trying the one before"
            log.warning(said, storage.url, commit.step, error)

    def _alike(self, found: Contents, like: Like | None, where: str) -> dict[str, torch.Tensor]:
        """The live state's sharded tensors that have a namesake of their shape in the checkpoint."""
        error: RestoreError | None = None
        live: State = {}
        try:
            live = like(decode(found.state, _without_data), where) if callable(like) else like or {}
        except RestoreError as e:
            error = e
        if any(self._world.highest(error is not None)):
            raise error or RestoreError(f"{self.url}: the checkpoint does not fit another rank's state; see its log")
        leaves = (leaf for part, value in live.items() for leaf in tree.leaves(value, part))
        return {
            name: tensor
            for name, tensor in leaves
            if dtensor.is_sharded(tensor) and name in found.tensors and found.tensors[name].shape == tensor.shape
        }

    def _arrange(self, flat: shares.Flat, rank_0_only: Collection[str]) -> tuple[shares.Plan, Buffers]:
        """The plan for such states, and buffers of the right size; made anew only when the states have changed."""
        if self._plan is None or not self._plan.fits(flat, rank_0_only):
            self._plan = shares.plan(flat, self._world.rank, self._world.size, rank_0_only)
        size_bytes = self._plan.size_bytes
        if self._buffers is None or not self._buffers.fit(size_bytes):
            if self._buffers is not None:
                self._buffers.close()
            self._buffers = None  # its memory goes before there is new
            kept = self._tier is not None and self._tier.clear(but_for=self._restored_folder)
            gpu = next((tensor.device for tensor in flat.shared.values() if tensor.is_cuda), None)
            self._buffers = Buffers(size_bytes, tier=self._tier, pin=gpu, one_at_first=kept)
            gc.collect()  # or the first full collection, which the imports have made long, falls into a save
        return self._plan, self._buffers

    def _write(self, share: shares.Share | NoMemoryError, folder: str, label: Label, started_s: float) -> None:
        """The background thread: write the share; rank 0 then gathers, commits and retires."""
        try:
            if isinstance(share, NoMemoryError):
                raise share
            file = share.write(self._storage, entries.share_key(folder, self._world.rank, self._world.size))
            if self._tier is not None and share.buffer.in_tier:
                self._tier.label(share.buffer.index, file)
            if self._writer is not None:
                self._commit(self._writer, folder, label, started_s)
                self._keep_snapshot()
        except FencedError as e:
            self._fenced = e
            log.error("%s", e)
        except Exception as e:  # noqa: BLE001 - the edge of a thread: whatever it is must reach the log and finish()
            self._error, self._failed_save = e, self._saves
            if self._writer is not None:
                self._writer.sweep_again()
            log.error("the checkpoint of step %d was not saved: %s", label.step, e)

    def _keep_snapshot(self) -> None:
        """The last save stands: its buffer holds the newest snapshot, and what a former process left is not needed."""
        if self._restored_folder and self._tier is not None:
            self._tier.clear()
            self._restored_folder = ""
        if self._buffers is not None:
            self._buffers.turn()

    def _commit(self, writer: CommitWriter, folder: str, label: Label, started_s: float) -> None:
        refs, size_bytes = shares.gather(self._storage, folder, self._world.size, self._abandon)
        draft = Commit(
            position=0,
            generation=self.generation,
            number=0,
            step=label.step,
            epoch=label.epoch,
            shares=refs,
            size_bytes=size_bytes,
            at=time.time(),
            metrics=label.metrics,
        )
        commit = writer.append(draft)
        self._committed_save = self._saves
        if self._on_commit is not None:
            self._on_commit(commit, time.monotonic() - started_s)
        try:
            writer.retire(self._keep)
        except FencedError:
            raise
        except StorageError as e:
            log.warning("old checkpoints were not deleted: %s", e)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Put the garbage collector off: a full collection behind the imports of torch takes longer than a copy of 1 GB."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _without_data(name: str, kind: TensorType) -> torch.Tensor:
    return torch.empty(kind.shape, dtype=tree.DTYPES[kind.dtype], device="meta")
