"""`Checkpointer`: saves beside training, restores the newest whole checkpoint.

    checkpoints = Checkpointer(storage.open("file:///runs/a"))      # takes the URL over from any older run
    restored = checkpoints.restore()                                # None, or the newest whole checkpoint
    checkpoints.save({"model": model.state_dict()}, Label(step=100))    # copies, then writes in the background
    checkpoints.settle()                                            # waits until it is committed

With several ranks all of them make the same calls in the same order; only `save` and `busy` involve no message.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticctl_train import commits, shares
from elasticctl_train.commits import Commit, Retention
from elasticctl_train.dist import World
from elasticctl_train.errors import DamagedError, FencedError, MissingError, SaveError, StorageError
from elasticctl_train.journal import Writer, read_commits
from elasticctl_train.storage import Storage

log = logging.getLogger("elasticctl_train")

SHARE_TIMEOUT_S = 600.0
"""How long rank 0 waits for the other ranks' shares before it gives a save up."""


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
    ) -> None:
        """Take over the URL. `on_commit(commit, duration_s)` is called on rank 0, in the background thread."""
        self._storage, self._world = storage, world
        self._keep, self._on_commit = keep, on_commit
        self._writer = Writer.take_over(storage) if world.rank == 0 else None
        mine = self._writer.generation if self._writer else None
        number, run_id = world.broadcast([mine.generation, mine.run_id] if mine else None)
        self.generation: int = number
        self._run_id: str = run_id
        self._saves = 0
        self._failed_save = 0
        self._error: Exception | None = None
        self._fenced: FencedError | None = None
        self._abandon = threading.Event()
        self._thread: threading.Thread | None = None
        self._share: shares.Share | None = None
        self._committed_save = 0
        self.skipped = 0

    @property
    def url(self) -> str:
        """Where the checkpoints are."""
        return self._storage.url

    @property
    def busy(self) -> bool:
        """Is this rank still writing its share, or, on rank 0, not done with the commit?"""
        return self._thread is not None and self._thread.is_alive()

    def restore(self) -> Restored | None:
        """Read the newest checkpoint that is whole on every rank; damaged ones are logged and passed over."""
        candidates = read_commits(self._storage) if self._world.rank == 0 else None
        while True:
            newest = next(candidates, None) if candidates else None
            message = self._world.broadcast([newest.position, commits.encode(newest).decode()] if newest else None)
            if message is None:
                return None
            commit = commits.decode_commit(message[1].encode(), message[0])
            restored = self._read(commit)
            if not any(self._world.highest(restored is None)):
                return restored

    def save(
        self,
        state: Mapping[str, Any],
        label: Label,
        *,
        local: Mapping[str, Any] | None = None,
        rank_0_only: Collection[str] = (),
    ) -> None:
        """Copy the state now and write it in the background; waits first for a save that is still in flight.

        `state` is the same on all ranks, `local` this rank's own; see `shares.make`. Raises StateError, having written
        nothing. Storage errors go to the log and to `settle`.
        """
        if self._thread is not None:
            self._thread.join()
        started_s = time.monotonic()
        buffer = self._share.buffer if self._share else None
        rank, size = self._world.rank, self._world.size
        self._share = shares.make(state, local or {}, rank, size, rank_0_only=rank_0_only, buffer=buffer)
        self._saves += 1
        folder = commits.save_folder(self.generation, self._saves, label.step, self._run_id)
        self._abandon.clear()
        arguments = (self._share, folder, label, started_s)
        self._thread = threading.Thread(target=self._write, args=arguments, name="elasticctl-save", daemon=True)
        self._thread.start()

    def agree(self, due: bool, next_check: int, notice: bool = False) -> tuple[bool, int, bool]:
        """All ranks meet: is a save to be started now, when is the next check, has any rank seen notice?

        Rank 0's `due` and `next_check` count, and anybody's `notice`. A save that is due while one is in flight on any
        rank is skipped and counted. Raises FencedError on every rank when a younger run has taken over.
        """
        mine = (due, next_check) if self._world.rank == 0 else (0, 0)
        anyone_due, check, noticed, busy, failed, fenced = self._world.highest(
            *mine, notice, self.busy, self._failed_save, self._fenced is not None
        )
        self._react(failed, fenced)
        if anyone_due and busy:
            self.skipped += 1
            if self.skipped & (self.skipped - 1) == 0:  # the 1st, 2nd, 4th, …: enough to be told
                log.info("a save came due while the last is still being written: skipped (%d so far)", self.skipped)
        return bool(anyone_due and not busy), check, bool(noticed)

    def settle(self) -> bool:
        """Wait, on all ranks, until no save is in flight; False, on all of them, if the last one was not committed.

        Raises FencedError on every rank when a younger run has taken over.
        """
        if self._thread is not None and self._world.rank != 0:
            self._thread.join()
        self._react(*self._world.highest(self._failed_save, self._fenced is not None))
        if self._thread is not None:
            self._thread.join()
        fenced, committed = self._world.highest(self._fenced is not None, self._committed_save)
        self._react(0, fenced)
        return committed == self._saves

    def failure(self) -> SaveError:
        """The last failed save as an error to be raised."""
        reason = self._error or "another rank could not write its share; see its log"
        return SaveError(f"{self.url}: the last checkpoint was not committed: {reason}")

    def abandon(self, grace_s: float) -> None:
        """Give a save in flight `grace_s` seconds, then give it up: for a run that is failing. No message is sent."""
        if self._thread is not None:
            self._thread.join(grace_s)
            self._abandon.set()

    def _react(self, failed_save: int, fenced: int) -> None:
        if fenced:
            raise self._fenced or FencedError(f"{self.url}: rank 0 found that a younger run has taken over")
        if failed_save and failed_save == self._saves:
            self._abandon.set()

    def _read(self, commit: Commit) -> Restored | None:
        try:
            try:
                state, local = shares.read(self._storage, commit, self._world.rank)
            except DamagedError as e:  # in the storage, or only on its way from there?
                log.warning("%s: %s; reading it once more", self.url, e)
                state, local = shares.read(self._storage, commit, self._world.rank)
        except (DamagedError, MissingError) as e:
            log.warning(
                "%s: the checkpoint of step %d is damaged (%s); trying the one before", self.url, commit.step, e
            )
            return None
        return Restored(commit, state, local)

    def _write(self, share: shares.Share, folder: str, label: Label, started_s: float) -> None:
        """The background thread: write the share; rank 0 then gathers, commits and retires."""
        try:
            share.write(self._storage, commits.share_key(folder, self._world.rank, self._world.size))
            if self._writer is not None:
                self._commit(self._writer, folder, label, started_s)
        except FencedError as e:
            self._fenced = e
            log.error("%s", e)
        except Exception as e:  # noqa: BLE001 - the edge of a thread: whatever it is must reach the log and finish()
            self._error, self._failed_save = e, self._saves
            if self._writer is not None:
                self._writer.sweep_again()
            log.error("the checkpoint of step %d was not saved: %s", label.step, e)

    def _commit(self, writer: Writer, folder: str, label: Label, started_s: float) -> None:
        refs, size_bytes = shares.gather(self._storage, folder, self._world.size, self._abandon, SHARE_TIMEOUT_S)
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
