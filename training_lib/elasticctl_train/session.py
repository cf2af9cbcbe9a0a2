"""`Session`: what `Run` and the hooks into other frameworks share.

It takes over the storage URL, saves at the policy's intervals, responds to notice and reports. Its user decides what
the state consists of.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NoReturn

import torch

from elasticctl_store import storage
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.errors import TrainError
from elasticctl_train import dist
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label, Like, Restored
from elasticctl_train.checkpoint.memory.copies import Copies
from elasticctl_train.data.sample_order import Cursor
from elasticctl_train.inplace.group import ElasticGroup
from elasticctl_train.interruptions import Hazard, Interruptions, this_machine, unknown_hazard
from elasticctl_train.non_finite_loss import LossGuard
from elasticctl_train.progress import Notice, Progress, Reporter
from elasticctl_train.save_policy import Cadence, SavePolicy
from elasticctl_train.start_state import STORAGE_VARIABLE, Start, find_start
from elasticctl_train.wait_reports import WaitReporter

log = logging.getLogger("elasticctl_train")

USED_URLS: set[str] = set()
"""The storage URLs to which sessions of this process have saved."""
_ABANDON_GRACE_S = _NOTE_GRACE_S = 2.0
_LONG_S = 3600.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What to save now: `state` is the same on all ranks, `local` is this rank's own (see `Checkpointer.save`).

    `parameters` names the tensors in it that should contain no NaN or infinity, `until_step` the parts that belong to
    optimizers.
    """

    state: Mapping[str, Any]
    local: Mapping[str, Any]
    rank_0_only: Collection[str] = field(default_factory=set)
    parameters: Collection[str] = ()
    until_step: Collection[str] = ()


class Session:
    """One incarnation of a training run on this rank. All ranks must make the same calls in the same order.

    `cursor` is how far training is; the user sets it. `losses` watches for losses that are not finite.
    `is_place_shared`: after a step, all ranks must be at the same position in the data; otherwise the script is wrong.
    `calls_digest()` must be the same on all ranks, too: if not, `on_calls_differ()` is called on all of them.
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
        """Take over the storage URL (default: $ELASTICCTL_STORAGE; without it, nothing is saved) and read what is
        there.

        `snapshot` is called for what to save, `like` before anything is read (see `Checkpointer.restore`). With
        `group`, this process stays when the group changes (see `move`); without it, `restarts_because` says why not.
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
        self._wait_reporter = WaitReporter(
            self._reporter, lambda: self._notice.given(), self._obstacle, self.progress.tell_rest
        )
        self._start = Start()
        self._said_of_copies = "", 0
        self._resumed: dict[str, Any] = {}
        self._group, self._restarts_because = group, "" if group is not None else restarts_because
        self._given_url = url or os.environ.get(STORAGE_VARIABLE, "")
        self._is_open = False
        self.is_place_shared = False
        self.calls_digest: Callable[[], int] = lambda: 0
        self.on_calls_differ: Callable[[], None] = lambda: None
        self.losses = LossGuard(self.progress)
        if group is None or not group.has_state:
            with self._wait_reporter.standing_still(nothing_to_save=True):
                self._checkpoints, self._is_open = self._take_over(self._given_url), True
                goes_back = self.losses.goes_back
                self._start = find_start(self._checkpoints, like, self._waits, goes_back=goes_back)
            self._note_group(work_lost=not self._start.is_copy)
        if self.restored is not None:
            self.progress.metrics.restore(self.restored.commit.step, self.restored.commit.metrics)

    @property
    def url(self) -> str:
        """The storage URL of the checkpoints; empty if none are saved."""
        return self._checkpoints.url if self._checkpoints else self._given_url

    @property
    def generation(self) -> int:
        """The number of this incarnation among all that have taken over the URL; 0 if no checkpoints are saved."""
        return self._checkpoints.generation if self._checkpoints else 0

    @property
    def restored(self) -> Restored | None:
        """The checkpoint that was found, until the first step is done."""
        return self._start.restored

    @property
    def skip_to(self) -> Mapping[str, Any] | None:
        """The position in the data from which training continues instead of the checkpoint's, if this run has gone
        back."""
        return None if self._start.back is None else self._start.back.skip_to

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing a save."""
        return self._checkpoints is not None and self._checkpoints.busy

    def begin(self, cursor: Cursor) -> None:
        """Start or resume training here. Call it once, after the state has been restored."""
        self.cursor = cursor
        is_saved = self._start.restored is not None and not (self._start.origin or self._start.is_copy)
        self._saved = cursor if is_saved else Cursor()  # what another rank has handed over may not be saved here yet
        if self.world.rank == 0:
            self._start.log_place(cursor, self._checkpoints.url if self._checkpoints else "", self.world.size)
        self._cadence = Cadence(
            self._policy, cursor.step, notice_possible=self._notice.possible, hazard=self._expected_hazard
        )
        self._next_check = self._cadence.first_check
        self._wait_reporter.step = cursor.step
        self._report_resumed()

    def move(self, world: dist.World, generation: int) -> None:
        """Continue from `cursor` in this process, after the group has changed.

        The storage is only taken over once there is something to save, so nobody waits for it now.
        """
        self.world = world
        if self._checkpoints is not None:
            self._checkpoints.abandon(0.0)  # it may be waiting for the share of a lost rank
        self._checkpoints = None
        self._is_open = self._prepared = self._owed = False
        self._saved, self._said_of_copies = Cursor(), ("", 0)
        self._reporter.move(world.rank, generation)
        self._notice = Notice.from_environment()
        self._next_check = self.cursor.step + 1
        self._wait_reporter.step = self.cursor.step
        self.progress.times.restart()
        self._report_resumed()

    def stop_staying(self, why: str) -> None:
        """Have this process restarted, from now on, when the group changes."""
        if self._group is not None:
            self._group.close()
            self._group, self._restarts_because = None, why
            self._report_protection()

    def _report_resumed(self) -> None:
        source = "memory" if self._group is not None and self._group.has_state else None
        if source is None and self.restored is not None:
            source = "copies" if self._start.is_copy else "storage"
        is_own = source == "storage" and not self._start.origin
        why = self._checkpoints.why_storage if self._checkpoints and is_own else None
        self._resumed = {"step": self.cursor.step, "source": source, "source_because": why or None}
        self._report_protection()

    def _report_protection(self) -> None:
        stays, because = self._group is not None, self._restarts_because or None
        self._reporter.send("resumed", **self._resumed, stays=stays, restarts_because=because)

    def step(
        self, cursor: Cursor, samples: int, loss: torch.Tensor | float | None = None, *, hold: bool = False
    ) -> None:
        """Record that an optimizer step over `samples` samples of all ranks is done, and that training is at `cursor`.

        Counts, reports, and saves when it is time. After notice it does not return: all ranks commit the same step and
        wait to be stopped. `hold` defers both to the next step. Raises FencedError if a newer run has taken over the
        storage URL, and NotFiniteError for a loss that is not finite, if that ends the job.
        """
        self.cursor = cursor
        self._wait_reporter.step = cursor.step
        self.progress.step(cursor, samples, loss)
        self.losses.heed(self.cursor)
        if not self._prepared:
            self._prepare()
        if cursor.step >= self._next_check and not hold:
            self._meet()

    def log(self, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Report metrics of the user's own; the newest value of each also goes into the next checkpoint's entry."""
        self.progress.metrics.note(self.cursor.step, metrics, self.progress.samples_at(self.cursor))
        self.progress.send(self.cursor)
        self.losses.heed(self.cursor)

    def report_inputs(self, examples: str) -> None:
        """Report what the model is called with, for newcomers (see `inplace.warmup`)."""
        self._reporter.send("inputs", step=self.cursor.step, examples=examples)

    def finish(self) -> None:
        """Commit the end of training and wait for it; a second call does nothing. Raises SaveError."""
        if self._finished:
            return
        self.losses.go_back_if_lost(self.world, self.cursor, self._open)
        self.losses.look(self.cursor)
        self._commit_surely()
        self._note_end()
        self._wait_reporter.stop()
        self.progress.send(self.cursor)
        self.progress.send_rows(surely=True)
        self.world.highest(0)  # a barrier: no rank destroys the group while another still uses it
        self._finished = True
        if self._group is not None:
            self._group.close()
        self._reporter.send("finished", step=self.cursor.step)
        self._reporter.close()
        self._checkpoints = None
        dist.leave(self.world)

    def start_again(self) -> NoReturn:
        """Commit this step, and have the launcher start all ranks again from it. Call it on all ranks of a group whose
        processes stay. Raises SaveError."""
        self._commit_surely()
        self._note_end()
        with suppress(RuntimeError):  # a barrier, which a rank that has passed it may break
            self.world.highest(0)
        if self._group is not None:
            self._group.decline(
                "the script goes by a count of its own, which differs between ranks once a step was repeated or a "
                f"worker has joined: all ranks start again from step {self.cursor.step}. FIX: go by run.steps_done"
            )
        raise dist.GroupOver

    def warn_of_unsaved(self) -> None:
        """Say which steps are not saved, because the script exits in the middle of training as if it had succeeded.

        They cannot be saved now: this may be one rank of several.
        """
        if self.url and not self._finished and self.cursor != self._saved:
            log.warning(
                "the script exits inside `with Run(...)` after step %d; the last save is of step %d. FIX: to save the "
                "end, leave the block first, or call run.finish(), on all ranks",
                self.cursor.step,
                self._saved.step,
            )

    def abandon(self) -> None:
        """After a failure of training: report the last values, and give a save in flight a moment. Does not
        communicate."""
        self._wait_reporter.stop()
        self.progress.tell_rest()
        self.progress.send_rows(surely=True)
        if self._checkpoints is not None:
            self._checkpoints.abandon(_ABANDON_GRACE_S)

    def _open(self) -> Checkpointer | None:
        """Take over the storage URL, unless that is done; return None if no checkpoints are saved."""
        if not self._is_open:
            self._checkpoints, self._is_open = self._take_over(self._given_url), True
            if self._checkpoints is not None:
                self._checkpoints.recall()
            self._note_group(work_lost=False)  # a process has stayed, this one or another rank's
        return self._checkpoints

    def _take_over(self, url: str) -> Checkpointer | None:
        if not url:
            if self.world.rank == 0:
                log.warning("no storage URL and no $%s: no checkpoints are saved", STORAGE_VARIABLE)
            return None
        kept = storage.open(url, waits=self._waits)
        USED_URLS.add(kept.url)
        checkpoints = Checkpointer(
            kept, self.world, keep=self._policy.retention, on_commit=self._committed, waits=self._waits
        )
        self._interruptions = Interruptions(kept) if self._policy.auto else None
        return checkpoints

    def _note_group(self, *, work_lost: bool) -> None:
        """On all ranks: record that this group has begun, and whether the work since the last commit was lost."""
        if self._interruptions is not None:
            machines = self.world.gather(this_machine())
            if self.world.rank == 0:
                self._interruptions.begin(machines, work_lost=work_lost)

    def _note_end(self) -> None:
        """Record that this group ends without losing anything."""
        if self._interruptions is not None and self.world.rank == 0:
            self._interruptions.end(_NOTE_GRACE_S)

    def _expected_hazard(self) -> Hazard:
        return unknown_hazard() if self._interruptions is None else self._interruptions.hazard()

    def _prepare(self) -> None:
        """Get ready to save, after the first step, which has given the optimizer its state."""
        self._prepared = True
        self._start = replace(self._start, restored=None)  # free it: everything has been loaded
        if self._checkpoints is not None:
            first = self._snapshot()
            self._checkpoints.prepare(first.state, local=first.local, rank_0_only=first.rank_0_only)

    def _meet(self) -> None:
        """Agree with all ranks on whether to save or to stop, and on when to meet again."""
        if self.is_place_shared:
            self._compare_places()
        self.losses.go_back_if_lost(self.world, self.cursor, self._open)
        due, stop = self._agree()
        if stop:
            self._drain()
        with self.progress.times.saving():
            if due and self._checkpoints is not None:
                self._save(self._checkpoints)
            elif self._checkpoints is not None and self._checkpoints.copies is not None:
                self._copy(self._checkpoints, self._checkpoints.copies)

    def _agree(self) -> tuple[bool, bool]:
        """Return whether all ranks save now, and whether they stop; set the step at which they meet again."""
        due, next_check = self._cadence.check(self.cursor.step)
        if self._checkpoints is None:
            return self._agree_without_checkpoints(due, next_check)
        due |= self._owed and not self.busy
        granted, self._next_check, stop = self._checkpoints.agree(due, next_check, self._notice.given())
        self._owed = due and not granted and self._policy.every_steps is None
        return granted, stop

    def _agree_without_checkpoints(self, due: bool, next_check: int) -> tuple[bool, bool]:
        """The same in a group that has not taken over the storage yet, or that saves nothing; rank 0 says when."""
        mine = (next_check, due) if self.world.rank == 0 else (0, 0)
        self._next_check, anyone_due, noticed = self.world.highest(*mine, self._notice.given())
        if anyone_due and not self._is_open:
            return self._get_ready_to_save(), bool(noticed)
        return bool(anyone_due), bool(noticed)

    def _compare_places(self) -> None:
        """Raise TrainError, on all ranks, if some have left a loop over batches that others are still in.

        Call `on_calls_differ` if their optimizers have made different steps since a new rank joined them.
        """
        here = self.cursor.epoch, self.cursor.position, self.calls_digest()
        last_epoch, last, digest, *lowest = self.world.highest(*here, *(-number for number in here))
        first_epoch, first, other_digest = (-number for number in lowest)
        if (first_epoch, first) != (last_epoch, last):
            raise TrainError(
                f"after step {self.cursor.step}, the ranks are at different positions in the data: in epoch "
                f"{first_epoch} and {last_epoch}, at sample {first} and {last}. FIX: leave the loop over the batches on"
                " all ranks in the same step, by run.steps_done or a value that they share, not by a count of a rank's"
                " own batches or by its own loss"
            )
        if digest != other_digest:
            self.on_calls_differ()

    def _copy(self, checkpoints: Checkpointer, copies: Copies) -> None:
        """Copy this step's state to launchers' memory, if it is time; report how far back a loss goes from now on."""
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
        """Take over the storage; return True if this very step must be saved, rather than one soon after, which costs
        less."""
        self._open()
        self._prepare()
        if self._checkpoints is not None and self._policy.every_steps is None:
            self._owed, self._next_check = True, self.cursor.step + 1
            return False
        return self._checkpoints is not None

    def _drain(self) -> NoReturn:
        """Commit this step on all ranks, tell the launcher, and wait for it to stop this process.

        If processes stay, raises GroupOver on those whose worker need not leave. Nothing is committed if the notice is
        only for newcomers; if a worker has to leave, others may get notice at any moment.
        """
        stays = self._group is not None and not self._notice.is_to_leave()
        if self._group is not None and all(self.world.gather(stays)):
            self._leave_group()
        kept = self._open()
        if kept is not None and self._commit_here(kept):
            self._note_end()
        elif kept is not None and not kept.has_given_up:
            log.warning("%s; the job will resume from an older one", kept.failure())
        if stays:
            self._leave_group()
        self._wait_to_be_stopped()

    def _leave_group(self) -> NoReturn:
        """Tell the launcher that this rank is ready for the next group."""
        self._reporter.send_surely("drained", step=self.cursor.step)
        raise dist.GroupOver

    def _wait_to_be_stopped(self) -> NoReturn:
        """Tell the launcher that this rank has drained, and wait until the launcher ends this process, or dies."""
        if self._checkpoints is not None and self._checkpoints.has_given_up and self.world.rank == 0:
            said = "step %d is not saved, because the storage is unavailable; the job will resume from an older one"
            log.warning(said, self.cursor.step)
        self.progress.send(self.cursor)
        _end_on_sigterm()
        self._reporter.send_surely("drained", step=self.cursor.step)
        while True:
            time.sleep(_LONG_S)

    def _commit_surely(self) -> None:
        """Commit this very step on all ranks. Does not return if it was given up after notice. Raises SaveError."""
        kept = self._open()
        if kept is not None and not self._commit_here(kept):
            if kept.has_given_up:
                self._wait_to_be_stopped()
            raise kept.failure()

    def _commit_here(self, checkpoints: Checkpointer) -> bool:
        """Commit this very step on all ranks; return False if that failed, or was given up after notice.

        The storage may be unavailable. A rank that has notice does not wait for it.
        """
        with self._wait_reporter.standing_still(nothing_to_save=False):
            is_saved = self._saved == self.cursor
            if checkpoints.settle(self._notice.given, is_last=is_saved) and is_saved:
                return True
            if checkpoints.has_given_up:
                return False
            self._save(checkpoints)
            return checkpoints.settle(self._notice.given, is_last=True)

    def _obstacle(self) -> str:
        """Return what this rank or, as far as it knows, another one waits for; "" if nothing.

        While training continues, also return why the last save failed: the next one may fail, too.
        """
        others = self._checkpoints is not None and self._checkpoints.is_away
        waits = self._waits.reason() or ("another rank waits for its storage" if others else "")
        if waits or self._checkpoints is None or self._wait_reporter.stands_still:
            return waits
        return self._checkpoints.trouble

    def _save(self, checkpoints: Checkpointer) -> None:
        self.losses.look(self.cursor)
        started_s = time.monotonic()
        now = self._snapshot()
        self._saved = self.cursor
        label = Label(self.cursor.step, self.cursor.epoch, dict(self.progress.metrics.finite), now.parameters)
        checkpoints.save(now.state, label, local=now.local, rank_0_only=now.rank_0_only, until_step=now.until_step)
        self._cadence.saved(time.monotonic() - started_s, quietly=self.world.rank != 0)  # rank 0's interval counts

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
    """Have SIGTERM end this process after the script's own handler, if there is one, has run.

    The last step is committed, so there is nothing to continue for. A handler that only sets a flag for the script to
    check after the next step must not keep the worker waiting.
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
    """Print this library's few log lines to stderr if the script has not set up logging itself."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("elasticctl: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
