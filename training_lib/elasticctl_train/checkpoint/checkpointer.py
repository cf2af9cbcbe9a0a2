"""`Checkpointer`: save in the background, and restore the newest intact checkpoint.

    checkpoints = Checkpointer(storage.open("file:///runs/a"))      # takes the URL over from any older run
    restored = checkpoints.restore()                                # the newest intact checkpoint, or None
    checkpoints.save({"model": model.state_dict()}, Label(step=100))    # copies, then writes in the background
    checkpoints.settle()                                            # waits until it is committed

With several ranks, pass `dist.join()` as the world, on all of them. All ranks must make the same calls in the same
order; only `prepare`, `save` and `busy` do not communicate. Sharded tensors (DTensor) are restored as such if `restore`
is given the live state: `checkpoints.restore({"model": model.state_dict()})`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from elasticctl_store.checkpoints import entries, repair, run_records
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Commit, Retention
from elasticctl_store.checkpoints.reader import fetch_document
from elasticctl_store.checkpoints.retention import take_over
from elasticctl_store.checkpoints.run_records import Rollback
from elasticctl_store.errors import FencedError, MissingError, NotFiniteError, RollbackError, SaveError, StorageError
from elasticctl_store.storage import Storage, Waits
from elasticctl_train.checkpoint.memory.copies import Copies
from elasticctl_train.checkpoint.memory.local_tier import Tier
from elasticctl_train.checkpoint.newest import Like, Newest, Restored
from elasticctl_train.checkpoint.plans import State
from elasticctl_train.checkpoint.restore import RestoreSource
from elasticctl_train.checkpoint.saving import Committer, FenceWatch, Label, Saves
from elasticctl_train.checkpoint.snapshots import Snapshots
from elasticctl_train.dist import World

__all__ = ["Checkpointer", "Label", "Like", "Restored"]

log = logging.getLogger("elasticctl_train")

_ROUND_S, _LONGEST_ROUND_S = 0.005, 0.25
"""While ranks wait for a save to end, they synchronize after this long, and then less and less often."""

_LACKING, _STOPPED = 1, 2

MOST_ROLLBACKS = 10
"""Per storage URL. A run that diverges more often needs attention; this bounds what it costs meanwhile."""


def _lack_of(copies: Copies | None) -> int:
    """Return whether this rank no longer makes copies (`_STOPPED`), or keeps them on this node only (`_LACKING`)."""
    if copies is None:
        return 0
    return _STOPPED if copies.failed else _LACKING if copies.lack else 0


class Checkpointer:
    """The checkpoints of one URL, for as long as no newer run takes it over."""

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

        `waits` must be the one that `storage` was opened with. Raises StorageError; MovedError if the job has moved.
        """
        self._storage, self._world = storage, world
        writer = take_over(storage) if world.rank == 0 else None
        self._committer = Committer(storage, writer, keep, on_commit) if writer else None
        self._least = writer.generation.position if writer else 0
        self._newest = Newest(world, repair.rebuild(storage, writer).rejected if writer else (), self._least)
        run = world.broadcast([writer.generation.generation, writer.generation.run_id] if writer else None)
        self.generation: int = run[0]
        self._fence = FenceWatch(writer.look_for_younger) if writer else None
        self._snapshots = Snapshots(world, Tier.open(storage.url, world.rank, self.generation))
        self._saves = Saves(storage, world, self._snapshots, (run[0], run[1]), self._committer)
        self._waits = waits or Waits()
        copies = Copies.open(storage.url)
        self.copies = None if any(world.highest(copies is None)) else copies
        self.is_copy_granted = False
        self.copies_lack = ""
        self.why_storage = ""
        self.skipped = 0
        self.is_away = self.has_given_up = False

    @property
    def url(self) -> str:
        """The storage URL of the checkpoints."""
        return self._storage.url

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing its share or, on rank 0, has not finished the commit."""
        return self._saves.is_saving

    def restore(self, like: Like | None = None, back: Rollback | None = None) -> Restored | None:
        """Read the newest intact checkpoint; return None if there is none. Damaged ones are logged and skipped.

        With `back`, read one that this note allows, and none that is only in memory.

        Tensors are returned on the CPU, each in its own memory. Where `like` has a sharded tensor, the result has this
        rank's part of it. Raises RestoreError as `like` does, and StorageError, also if checkpoints exist but none can
        be read: starting at step 0 would lose them.
        """
        copy = self._restore_copy(like) if back is None else None
        if copy is not None:
            self.recall()
            return copy
        source = RestoreSource(self._storage, self._world, self._snapshots.tier)
        restored = self._newest.read(source, lambda commit: back is None or back.allows(commit), like)
        if restored is None:
            self._newest.raise_if_lost(self._storage)
        self._snapshots.record_restored(restored.commit.folder if restored else "")
        self._recall(restored.commit if restored else None)
        return restored

    def recall(self) -> None:
        """Call on all ranks instead of `restore` if they have the state: unchanged parts that are stored are not
        written again."""
        newest = next(read_commits(self._storage, self._least), None) if self._world.rank == 0 else None
        found = self._world.broadcast((newest.position, entries.encode(newest).decode()) if newest else None)
        self._recall(entries.decode_commit(found[1].encode(), found[0]) if found else None)

    def _recall(self, commit: Commit | None) -> None:
        """Learn from this rank's share of a commit, if that has as many ranks, which of its pieces are in a base
        file."""
        if commit is None or not commit.bases or len(commit.shares) != self._world.size:
            return
        try:
            self._snapshots.unchanged.recall(fetch_document(self._storage, commit.shares[self._world.rank]))
        except StorageError as e:
            log.info("%s: unchanged parts of the state will be written again: %s", self.url, e)

    def _restore_copy(self, like: Like | None) -> Restored | None:
        """Restore what launchers hold in memory, if it is newer than what is stored; otherwise set `why_storage`."""
        if self.copies is None:
            self.why_storage = "launchers keep no copies here"
            return None
        commit = next(read_commits(self._storage, self._least), None) if self._world.rank == 0 else None
        generation, step = self._world.broadcast((commit.generation, commit.step) if commit else (0, 0))
        restored = self._newest.read_copies(self.copies, (generation, step), like)
        self.why_storage = "" if restored else "no complete copy in workers' memory is newer"
        return restored

    def start_from(self, origin: Storage, step: int | None, like: Like | None = None) -> Restored:
        """Read a checkpoint of another URL without changing anything there: the newest intact one, or that of `step`.

        Otherwise like `restore`. Raises MissingError, on every rank, if there is none.
        """
        source = RestoreSource(origin, self._world, None)
        restored = Newest(self._world).read(source, lambda commit: step is None or commit.step == step, like)
        if restored is None:
            known = list({commit.step: 0 for commit in read_commits(origin)}) if self._world.rank == 0 else None
            steps = ", ".join(map(str, self._world.broadcast(known))) or "none at all"
            wanted = "no intact checkpoint" if step is None else f"no intact checkpoint of step {step}"
            raise MissingError(f"{origin.url} has {wanted} to start from; its steps: {steps}")
        return restored

    def rollback(self) -> Rollback | None:
        """Return the note of a run that has gone back, if nothing has been committed since; the same on all ranks."""
        note = run_records.pending_rollback(self._storage) if self._world.rank == 0 else None
        found = self._world.broadcast(None if note is None else asdict(note))
        return None if found is None else Rollback(**found)

    def go_back(self, step: int, value: str, skip_to: Mapping[str, Any]) -> NoReturn:
        """End this run, on all ranks, so that the next one continues from before the loss of `value` at `step`.

        It skips the batches up to `skip_to`. Raises RollbackError; or NotFiniteError if there is no checkpoint to go
        back to, or if the run has gone back `MOST_ROLLBACKS` times.
        """
        self.settle()
        said = self._world.broadcast(self._note_rollback(step, value, skip_to) if self._world.rank == 0 else None)
        raise (RollbackError if said[0] else NotFiniteError)(said[1])

    def _note_rollback(self, step: int, value: str, skip_to: Mapping[str, Any]) -> tuple[bool, str]:
        """On rank 0: write the note; return whether it was written, and a message that says what follows."""
        note = Rollback(self.generation, step, value, skip_to)
        lost = f"the loss is {value} since step {step}"
        times = len(run_records.read_rollbacks(self._storage)) + 1
        if times > MOST_ROLLBACKS:
            return False, f"{lost}, and this run has gone back {MOST_ROLLBACKS} times already"
        before = next((commit for commit in read_commits(self._storage) if note.allows(commit)), None)
        if before is None:
            return False, f"{lost}, and there is no checkpoint from before that to go back to"
        run_records.write_rollback(self._storage, note)
        where = f"going back to step {before.step} ({times} of at most {MOST_ROLLBACKS} times)"
        return True, f"{lost}: {where}, and skipping the batches up to step {step}"

    def prepare(self, state: State, *, local: State | None = None, rank_0_only: Collection[str] = ()) -> None:
        """Allocate buffers for such states in the background. Without it, the first save takes far longer than later
        ones.

        There is one buffer, or two with a local tier. The arguments are those of `save`. Raises StateError.
        """
        self._join()
        self._snapshots.prepare(state, local or {}, rank_0_only)

    def save(
        self,
        state: State,
        label: Label,
        *,
        local: State | None = None,
        rank_0_only: Collection[str] = (),
        until_step: Collection[str] = (),
    ) -> None:
        """Copy the state now and write it in the background; first wait for a save that is in flight.

        `state` is the same on all ranks, `local` belongs to this rank; see `plans.plan`. The parts in `until_step`
        belong to optimizers: nothing else writes to their tensors, so those in main memory are copied in the background
        until an optimizer's next step begins. If something else does write to them, this save fails, and later ones
        copy everything immediately.

        Raises StateError if the state cannot be stored; nothing is written then. Storage errors are logged and reported
        by `settle`. Call `agree` or `settle` between two saves: that is where ranks other than 0 learn of the commit,
        and until then the local tier keeps the snapshot before it.
        """
        self._join()
        started_s = time.monotonic()
        self._saves.begin_save(
            self._snapshots.take_snapshot(state, local or {}, rank_0_only, until_step), label, started_s
        )

    def copy(
        self,
        state: State,
        label: Label,
        *,
        local: State | None,
        rank_0_only: Collection[str] = (),
        until_step: Collection[str] = (),
    ) -> None:
        """Like `save`, but only to the memory of launchers. Call it when `is_copy_granted` is true."""
        if self.copies is None:
            raise SaveError("no launcher takes copies")
        self._join()
        started_s = time.monotonic()
        share = self._snapshots.take_snapshot(state, local or {}, rank_0_only, until_step)
        self.copies.begin_copy(label.step, time.monotonic() - started_s)
        self._saves.copy(share, label, self.copies)

    def agree(self, due: bool, next_check: int, notice: bool = False) -> tuple[bool, int, bool]:
        """Synchronize all ranks: return whether to save now, the step of the next check, and whether any rank has
        notice.

        Also sets `is_copy_granted`. Rank 0's `due` and `next_check` apply, and any rank's `notice`. A save that is due
        while another is in flight on any rank is skipped and counted. Raises FencedError on every rank if a newer run
        has taken over.
        """
        self._snapshots.confirm()
        mine = (due, next_check) if self._world.rank == 0 else (0, 0)
        saves, copies = self._saves, self.copies
        wants_copy = copies is not None and copies.is_due() and self._world.rank == 0
        hinders_copy = copies is not None and (bool(copies.failed) or saves.busy or not copies.is_ready())
        anyone_due, check, noticed, busy, committed, failed, fenced, away, copy_due, no_copy, lack, damaged = (
            self._world.highest(
                *mine,
                notice,
                saves.is_saving,
                saves.committed,
                saves.failed,
                self._fenced is not None,
                self._waiting(),
                wants_copy,
                hinders_copy,
                _lack_of(copies),
                saves.damaged,
            )
        )
        self._note_lack(lack)
        self.is_copy_granted = bool(copy_due and not no_copy and not anyone_due)
        self.is_away = bool(away)
        self._react(failed, fenced)
        saves.record_commit(committed)
        saves.distrust(damaged, failed)
        if anyone_due and busy:
            self.skipped += 1
            if self._world.rank == 0 and self.skipped & (self.skipped - 1) == 0:  # log the 1st, 2nd, 4th, …
                log.info("skipped a save, because the last one is still being written (%d so far)", self.skipped)
        return bool(anyone_due and not busy), check, bool(noticed)

    def _note_lack(self, worst: int) -> None:
        """Record why copies protect less than they could, on any rank; `worst` is the highest `_lack_of`."""
        copies = self.copies
        if copies is None:
            return
        if worst == _STOPPED:
            copies.stop("see the log of another worker")
        self.copies_lack = copies.failed or (copies.lack or "see the log of another worker" if worst else "")

    def settle(self, give_up: Callable[[], bool] = lambda: False, *, is_last: bool = False) -> bool:
        """Wait, on all ranks, until no save is in flight; return False, on all ranks, if the last one was not
        committed.

        While any rank waits for the storage (`is_away`), all ranks stop waiting as soon as `give_up` is true on one of
        them: then `has_given_up` is set, and the save is still in flight. With `is_last`, no rank waits for the
        deletion of older commits either. Raises FencedError on every rank if a newer run has taken over.
        """
        pause_s, saves = _ROUND_S, self._saves
        while True:
            self._join(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_ROUND_S)
            busy, failed, fenced, committed, away, wanted, damaged = self._world.highest(
                saves.busy,
                saves.failed,
                self._fenced is not None,
                saves.committed,
                self._waiting(),
                give_up(),
                saves.damaged,
            )
            self.is_away = bool(away)
            if wanted and is_last:
                self._hurry()
            self._react(failed, fenced)
            is_committed = committed == saves.number
            self.has_given_up = bool(busy and away and wanted and not is_committed)
            if not busy or self.has_given_up or (is_last and away and is_committed):
                break
        saves.record_commit(committed)
        saves.distrust(damaged, failed)
        return is_committed

    @property
    def trouble(self) -> str:
        """Why this rank's last save failed; empty if none has, or if one has succeeded since."""
        return str(self._saves.error) if self._saves.failed > self._saves.committed else ""

    def failure(self) -> SaveError:
        """Return the last failed save as an error that can be raised."""
        reason = self._saves.error or "another rank could not write its share; see its log"
        return SaveError(f"{self.url}: the last checkpoint was not committed: {reason}")

    def abandon(self, grace_s: float) -> None:
        """Wait up to `grace_s` seconds for a save in flight, then give it up: for a run that is failing. Does not
        communicate."""
        self._join(grace_s)
        self._saves.abandon()
        self._hurry()

    def _join(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight, which may itself be waiting for this thread: see `LateCopy`."""
        self._snapshots.hasten()
        self._saves.join(timeout_s)

    def _hurry(self) -> None:
        if self._committer is not None:
            self._committer.hurry()

    @property
    def _fenced(self) -> FencedError | None:
        """Why this run is over, as far as this rank knows."""
        return self._saves.fenced or (self._fence.found if self._fence is not None else None)

    def _waiting(self) -> bool:
        return bool(self._waits.reason())

    def _react(self, failed_save: int, fenced: int) -> None:
        if fenced:
            raise self._fenced or FencedError(f"{self.url}: rank 0 found that a newer run has taken over")
        if failed_save and failed_save == self._saves.number:
            self._saves.abandon()
