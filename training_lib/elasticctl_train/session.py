"""`Session`: what `Run` and the hooks into other frameworks share.

It takes the storage URL over, saves on the policy's cadence, heeds notice and reports. What the state is made of is
its user's to say.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch

from elasticctl_store import storage
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.checkpoints.rollbacks import Rollback
from elasticctl_store.errors import StorageError, TrainError
from elasticctl_train import dist
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label, Like, Restored
from elasticctl_train.checkpoint.memory.copies import Copies
from elasticctl_train.data.plan import Cursor
from elasticctl_train.inplace.group import ElasticGroup
from elasticctl_train.interruptions import Hazard, Interruptions, this_machine, unknown_hazard
from elasticctl_train.not_finite import LossGuard
from elasticctl_train.policy import Cadence, SavePolicy
from elasticctl_train.progress import Notice, Progress, Reporter
from elasticctl_train.watch import Watch

log = logging.getLogger("elasticctl_train")

STORAGE_VARIABLE = "ELASTICCTL_STORAGE"
START_FROM_VARIABLE = "ELASTICCTL_START_FROM"
"""`<URL>#<step>`, or `<URL>#latest`: the checkpoint to start from while a run has none of its own."""
_ABANDON_GRACE_S = _NOTE_GRACE_S = 2.0
_LONG_S = 3600.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What to save now: `state` is the same on all ranks, `local` this rank's own (see `Checkpointer.save`).

    `parameters` names those tensors of it in which no NaN and no infinity belongs, `until_step` the parts that are
    optimizers'.
    """

    state: Mapping[str, Any]
    local: Mapping[str, Any]
    rank_0_only: Collection[str] = field(default_factory=set)
    parameters: Collection[str] = ()
    until_step: Collection[str] = ()


class Session:
    """One incarnation of a training run on this rank. Every rank makes the same calls in the same order.

    `cursor` says how far training is, and is its user's to change; `restored` is the checkpoint that was found,
    until the first step is done. `losses` watches for those that are no finite numbers. `is_place_shared`: after
    a step, all ranks are at the same place of the data, or the script is wrong.
    """

    def __init__(
        self,
        url: str | None,
        world: dist.World,
        policy: SavePolicy,
        snapshot: Callable[[], Snapshot],
        like: Like | None = None,
        group: ElasticGroup | None = None,
        restarts_because: str = "a framework owns the training loop",
    ) -> None:
        """Take over the storage URL (without one: $ELASTICCTL_STORAGE, or nothing is saved) and read what is there.

        `snapshot` is called for what to save, `like` before anything is read (see `Checkpointer.restore`). With
        `group`, this process stays when the group changes (see `move`), without it `restarts_because` says why not.
        Raises StorageError, and RestoreError as `like` does.
        """
        _show_log()
        self.world = world
        self.cursor = self._saved = Cursor()
        self._policy, self._snapshot = policy, snapshot
        self._reporter = Reporter(world.rank)
        self.progress = Progress(self._reporter)
        self._notice = Notice.from_environment()
        self._interruptions: Interruptions | None = None
        self._cadence = Cadence(policy, 0)
        self._next_check = 0
        self._prepared = self._finished = self._owed = False
        self._waits = storage.Waits()
        self._checkpoints: Checkpointer | None = None
        self._watch = Watch(self._reporter, lambda: self._notice.given(), self._obstacle, self.progress.tell_rest)
        self._origin = ""
        self._said_of_copies = "", 0
        self._group, self._restarts_because = group, "" if group is not None else restarts_because
        self._given_url = url or os.environ.get(STORAGE_VARIABLE, "")
        self.restored: Restored | None = None
        self._is_open = False
        self.is_place_shared = False
        self.losses = LossGuard(self.progress)
        self._back: Rollback | None = None
        if group is None or not group.has_state:
            with self._watch.standing_still(nothing_to_save=True):
                self._checkpoints, self._is_open = self._take_over(self._given_url), True
                self.restored = self._restore(like)
            self._note_group(work_lost=self.restored is None or not self.restored.is_copy)
        if self.restored is not None:
            self.progress.metrics.restore(self.restored.commit.step, self.restored.commit.metrics)

    @property
    def url(self) -> str:
        """Where the checkpoints are; empty where none are saved."""
        return self._checkpoints.url if self._checkpoints else self._given_url

    @property
    def generation(self) -> int:
        """The number of this incarnation among all that took the URL over; 0 where no checkpoints are saved."""
        return self._checkpoints.generation if self._checkpoints else 0

    @property
    def skip_to(self) -> Mapping[str, Any] | None:
        """Where training goes on in the data instead of where the checkpoint was, as this run has noted it before."""
        return None if self._back is None else self._back.skip_to

    @property
    def busy(self) -> bool:
        """Is a save still being written by this rank?"""
        return self._checkpoints is not None and self._checkpoints.busy

    def begin(self, cursor: Cursor) -> None:
        """Training starts, or resumes, here: call it once, with the state that was restored in place."""
        self.cursor = cursor
        is_copy = self.restored is not None and self.restored.is_copy
        self._saved = Cursor() if self._origin or is_copy else cursor  # what lies elsewhere is not saved here
        if self.world.rank == 0:
            self._say_where()
        self._cadence = Cadence(
            self._policy, cursor.step, notice_possible=self._notice.possible, hazard=self._expected_hazard
        )
        self._next_check = self._cadence.first_check
        self._watch.step = cursor.step
        self._report_resumed()

    def move(self, world: dist.World, generation: int) -> None:
        """The group has changed, and training goes on from where `cursor` is, in this process.

        The storage is taken over only when there is something to save: nobody waits for it now.
        """
        self.world = world
        if self._checkpoints is not None:
            self._checkpoints.abandon(0.0)  # it may wait for the share of a rank that is gone
        self._checkpoints = None
        self._is_open = self._prepared = self._owed = False
        self._saved, self._said_of_copies = Cursor(), ("", 0)
        self._reporter.move(world.rank, generation)
        self._notice = Notice.from_environment()
        self._next_check = self.cursor.step + 1
        self._watch.step = self.cursor.step
        self.progress.times.restart()
        self._report_resumed()

    def stop_staying(self, why: str) -> None:
        """From now on this process has to be started again when the group changes."""
        if self._group is not None:
            self._group.close()
            self._group, self._restarts_because = None, why
            self._report_resumed()

    def _report_resumed(self) -> None:
        source = "memory" if self._group is not None and self._group.has_state else None
        if source is None and self.restored is not None:
            source = "copies" if self.restored.is_copy else "storage"
        why = self._checkpoints.why_storage if self._checkpoints and source == "storage" and not self._origin else None
        self._reporter.send(
            "resumed",
            step=self.cursor.step,
            source=source,
            source_because=why or None,
            stays=self._group is not None,
            restarts_because=self._restarts_because or None,
        )

    def step(
        self, cursor: Cursor, samples: int, loss: torch.Tensor | float | None = None, *, hold: bool = False
    ) -> None:
        """One optimizer step over `samples` samples of all ranks is done, and training is at `cursor`.

        Counts, reports, and saves when it is time. After notice it does not return: all ranks commit the same step and
        wait to be stopped. `hold` puts both off to the next step. Raises FencedError when a newer run has taken over
        the storage URL, and NotFiniteError for a loss that is no finite number where that is to end the job.
        """
        self.cursor = cursor
        self._watch.step = cursor.step
        self.progress.step(cursor, samples, loss)
        self.losses.heed(self.cursor)
        if not self._prepared:
            self._prepare()
        if cursor.step >= self._next_check and not hold:
            self._meet()

    def log(self, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Report numbers of the user's own; the newest of each also goes into the next checkpoint's entry."""
        self.progress.metrics.note(self.cursor.step, metrics, self.progress.samples_at(self.cursor))
        self.progress.send(self.cursor)
        self.losses.heed(self.cursor)

    def finish(self) -> None:
        """Commit the end of training and wait for it; a second call is idle. Raises SaveError."""
        if self._finished:
            return
        self.losses.go_back_if_lost(self.world, self.cursor, self._open)
        self.losses.look(self.cursor)
        kept = self._open()
        if kept is not None and not self._commit_here(kept):
            if kept.has_given_up:
                self._wait_to_be_stopped()
            raise kept.failure()
        self._note_end()
        self._watch.stop()
        self.progress.send(self.cursor)
        self.progress.send_rows(surely=True)
        self.world.highest(0)  # nobody takes the group down while another still uses it
        self._finished = True
        if self._group is not None:
            self._group.close()
        self._reporter.send("finished", step=self.cursor.step)
        self._reporter.close()
        self._checkpoints = None
        dist.leave(self.world)

    def abandon(self) -> None:
        """Training has failed: tell its last values, and give a save that is in flight a moment. Ranks do not meet."""
        self._watch.stop()
        self.progress.tell_rest()
        self.progress.send_rows(surely=True)
        if self._checkpoints is not None:
            self._checkpoints.abandon(_ABANDON_GRACE_S)

    def _open(self) -> Checkpointer | None:
        """Take the storage URL over, unless that is done; None where no checkpoints are saved."""
        if not self._is_open:
            self._checkpoints, self._is_open = self._take_over(self._given_url), True
            if self._checkpoints is not None:
                self._checkpoints.recall()
            self._note_group(work_lost=False)  # this process, or another rank's, has stayed
        return self._checkpoints

    def _take_over(self, url: str) -> Checkpointer | None:
        if not url:
            if self.world.rank == 0:
                log.warning("no storage URL and no $%s: no checkpoints are saved", STORAGE_VARIABLE)
            return None
        kept = storage.open(url, waits=self._waits)
        checkpoints = Checkpointer(
            kept, self.world, keep=self._policy.retention, on_commit=self._committed, waits=self._waits
        )
        self._interruptions = Interruptions(kept) if self._policy.auto else None
        return checkpoints

    def _note_group(self, *, work_lost: bool) -> None:
        """All ranks: this group has begun, at the loss of what was done since the last commit or without."""
        if self._interruptions is not None:
            machines = self.world.gather(this_machine())
            if self.world.rank == 0:
                self._interruptions.begin(machines, work_lost=work_lost)

    def _note_end(self) -> None:
        """This group ends, and nothing is lost."""
        if self._interruptions is not None and self.world.rank == 0:
            self._interruptions.end(_NOTE_GRACE_S)

    def _expected_hazard(self) -> Hazard:
        return unknown_hazard() if self._interruptions is None else self._interruptions.hazard()

    def _restore(self, like: Like | None) -> Restored | None:
        """The newest checkpoint; where this run has none yet, the one of another run that it is to start from."""
        if self._checkpoints and self.losses.goes_back:
            self._back = self._checkpoints.rollback()
        restored = self._checkpoints.restore(like, self._back) if self._checkpoints else None
        if restored is None and self._back is not None:
            before = f"the checkpoints from before step {self._back.step}, to which this run was to go back, are gone"
            raise StorageError(f"{self.url}: {before}. FIX: submit it again, under another URL")
        wanted = os.environ.get(START_FROM_VARIABLE, "")
        if restored is not None or not wanted:
            return restored
        url, separator, step = wanted.rpartition("#")
        if not (separator and url and (step == "latest" or (step.isascii() and step.isdigit()))):
            raise TrainError(f"${START_FROM_VARIABLE}={wanted}: give URL#STEP or URL#latest")
        if self._checkpoints is None:
            raise TrainError(f"${START_FROM_VARIABLE} needs a storage URL of this run's own: set ${STORAGE_VARIABLE}")
        self._origin = url
        return self._checkpoints.start_from(
            storage.open(url, waits=self._waits), None if step == "latest" else int(step), like
        )

    def _say_where(self) -> None:
        if self.restored is not None and self.restored.is_copy:
            log.info("resumed from step %d, epoch %d, from workers' memory", self.cursor.step, self.cursor.epoch)
        elif self.restored is not None and self._origin:
            log.info("started from step %d, epoch %d of %s", self.cursor.step, self.cursor.epoch, self._origin)
        elif self.restored is not None and self._back is not None:
            said = "back to step %d, and on from epoch %d, sample %d: the loss was %s at step %d"
            cursor, back = self.cursor, self._back
            log.warning(said, cursor.step, cursor.epoch, cursor.position, back.value, back.step)
        elif self.restored is not None:
            ranks = f"{len(self.restored.commit.shares)} -> {self.world.size} ranks"
            log.info("resumed from step %d, epoch %d (%s, %s)", self.cursor.step, self.cursor.epoch, self.url, ranks)
        elif self._checkpoints is not None:
            log.info("no checkpoint at %s yet: starting at step 0", self.url)

    def _prepare(self) -> None:
        """The first step is done, and with it the optimizer has its state: get ready to save such states."""
        self._prepared = True
        self.restored = None  # what was loaded from it needs it no longer
        if self._checkpoints is not None:
            first = self._snapshot()
            self._checkpoints.prepare(first.state, local=first.local, rank_0_only=first.rank_0_only)

    def _meet(self) -> None:
        """The ranks agree: is it time to save, to stop, and when do they meet again."""
        if self.is_place_shared:
            self._compare_places()
        self.losses.go_back_if_lost(self.world, self.cursor, self._open)
        due, next_check = self._cadence.check(self.cursor.step)
        if self._checkpoints is not None:
            due |= self._owed and not self.busy
            granted, self._next_check, stop = self._checkpoints.agree(due, next_check, self._notice.given())
            self._owed = due and not granted and self._policy.every_steps is None
            due = granted
        else:
            mine = (next_check, due) if self.world.rank == 0 else (0, 0)
            self._next_check, anyone_due, noticed = self.world.highest(*mine, self._notice.given())
            due, stop = bool(anyone_due), bool(noticed)
            if due and not self._is_open:
                due = self._get_ready_to_save()
        if stop:
            self._drain()
        with self.progress.times.saving():
            if due and self._checkpoints is not None:
                self._save(self._checkpoints)
            elif self._checkpoints is not None and self._checkpoints.copies is not None:
                self._copy(self._checkpoints, self._checkpoints.copies)

    def _compare_places(self) -> None:
        """Raise TrainError, on all ranks, if some have left a loop over batches that others are still in."""
        epoch, position = self.cursor.epoch, self.cursor.position
        last_epoch, last, *lowest = self.world.highest(epoch, position, -epoch, -position)
        first_epoch, first = (-number for number in lowest)
        if (first_epoch, first) != (last_epoch, last):
            raise TrainError(
                f"after step {self.cursor.step}, the ranks are at different places of the data: in epoch {first_epoch} "
                f"and {last_epoch}, at sample {first} and {last}. FIX: leave the loop over the batches on all ranks in "
                "the same step, by run.steps_done or a value that they share, not by a count of a rank's own batches"
                " or by its own loss"
            )

    def _copy(self, checkpoints: Checkpointer, copies: Copies) -> None:
        """Have this step's state in launchers' memory, if it is time; say how far back a loss goes from now on."""
        if checkpoints.is_copy_granted:
            now = self._snapshot()
            label = Label(self.cursor.step, self.cursor.epoch, dict(self.progress.metrics.finite))
            checkpoints.copy(now.state, label, local=now.local, rank_0_only=now.rank_0_only, until_step=now.until_step)
        lack, steps = checkpoints.copies_lack, 0 if copies.failed else copies.steps_back
        said_lack, said_steps = self._said_of_copies
        is_news = lack != said_lack or not said_steps / 2 <= steps <= said_steps * 1.25
        if self.world.rank == 0 and is_news:
            self._said_of_copies = lack, steps
            self._reporter.send("copied", step=copies.step, every_steps=steps, lack=lack or None)

    def _get_ready_to_save(self) -> bool:
        """Take the storage over; True if this step has to be saved, and not one soon after, which is felt less."""
        self._open()
        self._prepare()
        if self._checkpoints is not None and self._policy.every_steps is None:
            self._owed, self._next_check = True, self.cursor.step + 1
            return False
        return self._checkpoints is not None

    def _drain(self) -> NoReturn:
        """Commit this step on all ranks, tell the launcher, and wait for it to stop this process.

        Where processes stay, raises GroupOver on those whose worker does not have to go. For newcomers alone nothing is
        committed; if somebody has to go, others may be told so in the next moment.
        """
        stays = self._group is not None and not self._notice.is_to_leave()
        if self._group is not None and all(self.world.gather(stays)):
            self._leave_group()
        kept = self._open()
        if kept is not None and self._commit_here(kept):
            self._note_end()
        elif kept is not None and not kept.has_given_up:
            log.warning("%s; an older one has to do", kept.failure())
        if stays:
            self._leave_group()
        self._wait_to_be_stopped()

    def _leave_group(self) -> NoReturn:
        """Tell the launcher that this rank is ready for the next group."""
        self._reporter.send_surely("drained", step=self.cursor.step)
        raise dist.GroupOver

    def _wait_to_be_stopped(self) -> NoReturn:
        """Tell the launcher that this rank has drained. Nothing but the launcher, or its death, ends the wait."""
        if self._checkpoints is not None and self._checkpoints.has_given_up and self.world.rank == 0:
            log.warning("step %d is not saved, because the storage is away; an older one has to do", self.cursor.step)
        self.progress.send(self.cursor)
        _end_on_sigterm()
        self._reporter.send_surely("drained", step=self.cursor.step)
        while True:
            time.sleep(_LONG_S)

    def _commit_here(self, checkpoints: Checkpointer) -> bool:
        """Have this very step committed, on all ranks; False when that failed, or was given up after notice.

        The storage may be away. Who was given notice does not wait for it.
        """
        with self._watch.standing_still(nothing_to_save=False):
            is_saved = self._saved == self.cursor
            if checkpoints.settle(self._notice.given, is_last=is_saved) and is_saved:
                return True
            if checkpoints.has_given_up:
                return False
            self._save(checkpoints)
            return checkpoints.settle(self._notice.given, is_last=True)

    def _obstacle(self) -> str:
        """What this rank or, as far as it knows, another one waits for; empty: nothing.

        While training goes on, also why the last save failed: the next one may not.
        """
        others = self._checkpoints is not None and self._checkpoints.is_away
        waits = self._waits.reason() or ("another rank waits for its storage" if others else "")
        if waits or self._checkpoints is None or self._watch.stands_still:
            return waits
        return self._checkpoints.trouble

    def _save(self, checkpoints: Checkpointer) -> None:
        self.losses.look(self.cursor)
        started_s = time.monotonic()
        now = self._snapshot()
        self._saved = self.cursor
        label = Label(self.cursor.step, self.cursor.epoch, dict(self.progress.metrics.finite), now.parameters)
        checkpoints.save(now.state, label, local=now.local, rank_0_only=now.rank_0_only, until_step=now.until_step)
        self._cadence.saved(time.monotonic() - started_s)

    def _committed(self, commit: Commit, duration_s: float) -> None:
        self._cadence.written(duration_s)
        self._reporter.send(
            "committed",
            step=commit.step,
            committed=commit.number,
            size_bytes=commit.size_bytes,
            duration_s=round(duration_s, 4),
            url=self._checkpoints.url if self._checkpoints else None,
        )


def _end_on_sigterm() -> None:
    """Have SIGTERM end this process once the script's own handler, if there is one, has run.

    The last step is committed, so there is nothing to go on for: a handler that returns, because its script would look
    at a flag after the next step, must not keep the worker waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGTERM)
    if handler is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    elif callable(handler):

        def run_and_end(number: int, frame: FrameType | None) -> NoReturn:
            handler(number, frame)
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, run_and_end)


def _show_log() -> None:
    """Print this library's few lines to stderr where the script has not set up logging itself."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("elasticctl: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
