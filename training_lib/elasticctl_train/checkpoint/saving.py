"""The part of a save that runs in the background: each rank stores its share; rank 0 makes room, commits and
retires."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from elasticctl_store.checkpoints import entries, repair
from elasticctl_store.checkpoints.commits import CommitWriter
from elasticctl_store.checkpoints.entries import Commit, ObjectRef, Retention
from elasticctl_store.checkpoints.retention import Keeper
from elasticctl_store.errors import FencedError, FullError, MissingError, NoMemoryError, StorageError
from elasticctl_store.storage import Storage
from elasticctl_train.checkpoint import rank_shares
from elasticctl_train.checkpoint.memory.copies import Copies
from elasticctl_train.checkpoint.memory.copying import Background
from elasticctl_train.checkpoint.snapshots import Snapshots
from elasticctl_train.dist import World

log = logging.getLogger("elasticctl_train")

_DOCUMENT_BYTES = 1 << 16
"""About the size of a share without its tensors."""
ROOM_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""The pauses between tries of a rank that finds the storage full: rank 0 may be making room, and a quota may count that
late."""
FENCE_EVERY_S = 30.0
NICENESS = 10
"""Of the thread that saves and those that it starts: a save only gets the processor time that training leaves."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a checkpoint says about itself. Of the tensors in `parameters`, it records which are not finite."""

    step: int
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    parameters: Collection[str] = ()


class Committer:
    """What only rank 0 does: make room, commit gathered shares, and delete what `keep` does not keep."""

    def __init__(
        self, storage: Storage, writer: CommitWriter, keep: Retention, on_commit: Callable[[Commit, float], None] | None
    ) -> None:
        self.writer = writer
        self._storage, self._keep, self._on_commit = storage, keep, on_commit
        self._has_to_hurry = threading.Event()
        self._keeper = Keeper(storage, writer, self._keep_on_reading)

    def hurry(self) -> None:
        """Read nothing more just to delete older commits: this process has to stop."""
        self._has_to_hurry.set()

    def sweep_again(self) -> None:
        """Delete what a failed save has left, with the next commit."""
        self._keeper.sweep_again()

    def make_room(self, needed_bytes: int, number: int, *, is_full: bool) -> bool:
        """Return whether anything was deleted for save `number`. If deleting fails, the save is still tried.

        Raises FencedError.
        """
        try:
            return self._keeper.make_room(needed_bytes, number, is_full=is_full)
        except FencedError:
            raise
        except StorageError as e:
            log.warning("could not make room for the next checkpoint: %s", e)
            return False

    def gather(self, folder: str, world_size: int, label: Label, abandon: threading.Event) -> Commit:
        """Wait for the shares of all ranks; return what is to be committed. Raises StorageError."""
        found = rank_shares.gather(self._storage, folder, world_size, abandon, self.writer.check_fence)
        return Commit(
            position=0,
            generation=self.writer.generation.generation,
            number=0,
            step=label.step,
            epoch=label.epoch,
            shares=found.refs,
            size_bytes=found.size_bytes,
            at=time.time(),
            metrics=label.metrics,
            not_finite=found.not_finite,
            bases=found.bases,
        )

    def younger_run(self) -> FencedError | None:
        """Return the error of a fenced run if a newer one has taken over; None otherwise."""
        try:
            self.writer.check_fence()
        except FencedError as e:
            return e
        return None

    @property
    def damaged(self) -> int:
        """The number of commits found to be damaged so far."""
        return self._keeper.damaged

    def commit(self, draft: Commit) -> Commit:
        """Append what has been gathered to the journal. Raises FencedError and StorageError."""
        commit = self.writer.append(draft)
        if lost := commit.not_finite:
            log.warning("the checkpoint of step %d has parameters that are NaN or infinite: %s", commit.step, lost[0])
        return commit

    def committed(self, commit: Commit, duration_s: float) -> None:
        """Report the commit, then delete what need not be kept any longer. Raises FencedError."""
        if self._on_commit is not None:
            self._on_commit(commit, duration_s)
        try:
            self._keeper.retire(self._keep)
        except FencedError:
            raise
        except StorageError as e:
            log.warning("old checkpoints were not deleted: %s", e)

    def _keep_on_reading(self, count: int) -> None:
        """Raise StorageError if this process has to stop: old commits are only deleted after a newer one has been
        read."""
        if self._has_to_hurry.is_set():
            raise StorageError("this process is stopping, so no newer checkpoint was verified")


class Saves:
    """This rank's saves, one at a time, in a thread of their own.

    They are counted from 1: `number` is that of the newest, `committed` and `failed` those of the last that did either.
    """

    def __init__(
        self, storage: Storage, world: World, snapshots: Snapshots, run: tuple[int, str], committer: Committer | None
    ) -> None:
        """`run` is (generation, id) of the run whose saves these are."""
        self.number = self.committed = self.failed = 0
        self.error: Exception | None = None
        self.fenced: FencedError | None = None
        self._storage, self._world, self._snapshots = storage, world, snapshots
        self._run, self._committer = run, committer
        self._distrusted = (0, 0)
        self._abandon = threading.Event()
        self._is_copying = False
        self._background = Background("elasticctl-save", NICENESS)

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing its share or, on rank 0, has not finished the commit."""
        return self._background.busy

    @property
    def is_saving(self) -> bool:
        """Whether this rank is busy with a save, as opposed to a copy for other workers' memory."""
        return self.busy and not self._is_copying

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is in flight, or for `timeout_s` seconds."""
        self._background.join(timeout_s)

    def begin_save(self, share: rank_shares.Share | NoMemoryError, label: Label, started_s: float) -> None:
        """Store the share, in the background. The save before must be over."""
        self.number += 1
        generation, run_id = self._run
        folder = entries.save_folder(generation, self.number, label.step, run_id)
        self._abandon.clear()
        self._is_copying = False
        self._background.start(lambda: self._write(share, folder, label, started_s))

    def copy(self, share: rank_shares.Share | NoMemoryError, label: Label, copies: Copies) -> None:
        """Keep the share in memory, in the background, without storing it. The save before must be over."""
        generation, run_id = self._run
        folder = copies.next_folder(generation, label.step, run_id)
        if isinstance(share, NoMemoryError):
            copies.fail(str(share))
            return
        said = repair.label(label.step, label.epoch, label.metrics, time.time())
        self._is_copying = True
        self._background.start(lambda: copies.keep_share(replace(share, label=said), folder, self._world))

    def abandon(self) -> None:
        """Stop waiting for the shares of other ranks, and for room."""
        self._abandon.set()

    @property
    def damaged(self) -> int:
        """On rank 0: the number of commits found to be damaged so far."""
        return self._committer.damaged if self._committer is not None else 0

    def distrust(self, damaged: int, failed: int) -> None:
        """Have the next save refer to nothing that is stored, if there is a damaged commit or a failed save on any rank
        that was not known at the last call."""
        if (damaged, failed) != self._distrusted:
            self._distrusted = damaged, failed
            self._snapshots.unchanged.forget_stored()

    def record_commit(self, committed: int) -> None:
        """On ranks other than 0, which do not commit: learn that this save has been committed."""
        if committed == self.number != self.committed:
            self.committed = committed
            self._background.join()
            self._background.start(self._snapshots.keep_snapshot)

    def _write(self, share: rank_shares.Share | NoMemoryError, folder: str, label: Label, started_s: float) -> None:
        """Write the share; on rank 0, then gather, commit and retire. Runs in the background thread."""
        try:
            if isinstance(share, NoMemoryError):
                raise share
            self._snapshots.finish()
            share = replace(share, label=repair.label(label.step, label.epoch, label.metrics, time.time()))
            key = entries.share_key(folder, self._world.rank, self._world.size)
            unchanged = self._snapshots.unchanged
            files = self._with_room(share, partial(share.write, self._storage, key, label.parameters, unchanged))
            rank_shares.check_stored(self._storage, key)
            self._snapshots.stored(share, files)
            if self._committer is not None:
                gathered = self._committer.gather(folder, self._world.size, label, self._abandon)
                commit = self._committer.commit(gathered)
                self.committed = self.number
                self._committer.committed(commit, time.monotonic() - started_s)
                self._snapshots.keep_snapshot()
        except Exception as e:  # noqa: BLE001 - the edge of a thread: every error must reach the log and finish()
            fenced = self._as_fenced(e)
            if fenced is not None:
                self.fenced = fenced
                log.error("%s", fenced)
                return
            self.error, self.failed = e, self.number
            self._snapshots.unchanged.forget_stored()
            if self._committer is not None:
                self._committer.sweep_again()
            log.error("the checkpoint of step %d was not saved: %s", label.step, e)

    def _as_fenced(self, error: Exception) -> FencedError | None:
        """Return the error of a fenced run, if this is one; a newer run may have swept what was being written."""
        if isinstance(error, MissingError) and self._committer is not None:
            with suppress(StorageError):
                return self._committer.younger_run()
        return error if isinstance(error, FencedError) else None

    def _with_room(self, share: rank_shares.Share, write: Callable[[], tuple[ObjectRef, ...]]) -> tuple[ObjectRef, ...]:
        """Return what `write` returns; retry while the storage is full and something can be deleted. Rank 0 makes the
        room."""
        needed_bytes = self._world.size * (self._snapshots.unchanged.to_write_bytes(share) + _DOCUMENT_BYTES)
        committer = self._committer
        is_made = committer is not None and committer.make_room(needed_bytes, self.number, is_full=False)
        has_waited, pauses_s = True, iter(ROOM_PAUSES_S)
        while True:
            try:
                return write()
            except FullError:
                # Rank 0 deletes what it can, and tries again as long as there was something; all other ranks wait, and
                # so does rank 0 once: a quota may count later what has been deleted.
                if committer is not None and has_waited:
                    if committer.make_room(needed_bytes, self.number, is_full=True):
                        is_made, has_waited = True, False
                        continue
                    if not is_made:
                        raise
                pause_s = next(pauses_s, None)
                if pause_s is None or self._abandon.wait(pause_s):
                    raise
                has_waited = True


class FenceWatch:
    """Checks, next to training, whether a newer run has taken over the storage; `found` is the error once one has.

    A zombie, a group that was cut off and replaced, may have minutes until its next save. It finds out by two small
    requests per minute.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises FencedError once there is a newer run. It may block while the storage is unavailable."""
        self._found: list[FencedError] = []
        over = threading.Event()
        arguments = check, self._found, over
        threading.Thread(target=_watch_fence, args=arguments, name="elasticctl-fence", daemon=True).start()
        weakref.finalize(self, over.set)  # the thread does not reference this object, and ends with it

    @property
    def found(self) -> FencedError | None:
        """Why this run is over; None if it is not."""
        return self._found[0] if self._found else None


def _watch_fence(check: Callable[[], None], found: list[FencedError], over: threading.Event) -> None:
    while not over.wait(FENCE_EVERY_S):
        try:
            check()
        except FencedError as e:
            found.append(e)
            return
        except StorageError:  # the next save reports it
            continue
