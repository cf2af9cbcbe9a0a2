"""`Session`: what `Run` and the hooks into other frameworks share.

It finds what training starts from, saves at the policy's intervals, responds to notice and reports. Its user decides
what the state consists of, and its strategy what becomes of the process when the group changes.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import NoReturn

import torch

from elasticctl_protocol.reports import (
    CommittedReport,
    DrainedReport,
    FinishedReport,
    InputsReport,
    ResumedReport,
    StateSource,
)
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_train import dist
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Like, Restored
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Step
from elasticctl_train.launcher_reports import NoticeFile, Progress, Reporter, WaitReporter
from elasticctl_train.meetings import Meetings, Snapshot
from elasticctl_train.non_finite_loss import LossGuard
from elasticctl_train.run_storage import RunStorage
from elasticctl_train.save_policy import SavePolicy
from elasticctl_train.step_times import TimeSums
from elasticctl_train.strategies import Strategy

log = logging.getLogger("elasticctl_train")

_ABANDON_GRACE_S = 2.0
_LONG_S = 3600.0


class Session:
    """One incarnation of a training run on this rank. All ranks must make the same calls in the same order.

    `cursor` is how far training is. `storage` has the checkpoints, `meetings` the steps at which they are saved.
    `losses` watches for losses that are not finite.
    """

    def __init__(
        self,
        url: str | None,
        strategy: Strategy,
        policy: SavePolicy,
        snapshot: Callable[[], Snapshot],
        like: Like | None = None,
        compare_ranks: Callable[[], None] = lambda: None,
    ) -> None:
        """Read what is at the storage URL (default: $ELASTICCTL_STORAGE; without it, nothing is saved), unless the
        ranks have the state in memory.

        `snapshot` is called for what to save, `like` before anything is read (see `Checkpointer.restore`), and
        `compare_ranks` on all ranks wherever they meet. Raises StorageError, and RestoreError as `like` does.
        """
        _show_log()
        self.cursor = Cursor()
        self._strategy, self._compare_ranks = strategy, compare_ranks
        self._reporter = Reporter(strategy.world.rank)
        self.progress = Progress(self._reporter, TimeSums(lambda: self._strategy.reduce_waits_s()))
        self.losses = LossGuard(self.progress)
        self.storage = RunStorage(url, policy, self._record_commit)
        self.meetings = Meetings(self.storage, policy, snapshot, self.losses, self.progress, self._reporter)
        self._notice = NoticeFile.from_environment()
        self._finished = False
        self._resumed = ResumedReport()
        self._wait_reporter = WaitReporter(
            self._reporter,
            step=lambda: self.cursor.step,
            noticed=lambda: self._notice.given(),
            reason=self._reason_to_wait,
            tick=self.progress.report_rest,
        )
        if not strategy.has_state:
            with self._wait_reporter.standing_still(nothing_to_save=True):
                self.storage.find_start(self.world, like, goes_back=self.losses.goes_back)
            self.storage.begin_group(self.world, work_lost=not self.storage.start.is_copy)
        if self.restored is not None:
            self.progress.metrics.restore(self.restored.commit.step, self.restored.commit.metrics)

    @property
    def world(self) -> dist.World:
        """This rank's place among the ranks."""
        return self._strategy.world

    @property
    def restored(self) -> Restored | None:
        """The checkpoint that was found, until the first step is done."""
        return self.storage.start.restored

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing a save."""
        return self.storage.checkpoints is not None and self.storage.checkpoints.busy

    # --- where training is

    def begin_training(self, cursor: Cursor) -> None:
        """Start or resume training here. Call it once, after the state has been restored."""
        self.cursor = cursor
        checkpoints = self.storage.checkpoints
        if self.world.rank == 0:
            self.storage.start.log_place(cursor, checkpoints.url if checkpoints else "", self.world.size)
        self.meetings.start_at(cursor, notice_possible=self._notice.possible)
        self._report_resumed()

    def go_to(self, cursor: Cursor) -> None:
        """Record where training is, other than by a step."""
        self.cursor = cursor

    def continue_in(self, cursor: Cursor, plan: EpochPlan | None) -> None:
        """Record that the epoch continues from `cursor`, in the order of `plan` (None: a stream's)."""
        self.cursor = cursor
        self.progress.expect_order(plan)

    def move(self) -> None:
        """Continue from `cursor` in this process, after the strategy has entered another group.

        The storage is only taken over once there is something to save, so nothing waits for it now.
        """
        self.storage.close(0.0)  # a save may be waiting for the share of a lost rank
        self._reporter.move(self.world.rank)
        self._notice = NoticeFile.from_environment()
        self.meetings.move(self.cursor)
        self.progress.times.restart()
        self._report_resumed()

    def switch_strategy(self, strategy: Strategy) -> None:
        """Continue with another strategy."""
        self._strategy = strategy
        self._report_protection()

    def step(self, step: Step, *, hold: bool = False) -> None:
        """Record that a step was made.

        Counts, reports, and saves when it is time. After notice it does not return: all ranks commit the same step and
        wait to be stopped. `hold` defers both to the next step. Raises FencedError if a newer run has taken over the
        storage URL, and NotFiniteError for a loss that is not finite, if that ends the job.
        """
        self.cursor = step.cursor
        self.progress.record_step(step)
        self.losses.check(self.cursor)
        self.meetings.prepare()
        if self.meetings.is_due(self.cursor.step) and not hold:
            self._meet()

    def log(self, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Report metrics of the user's own; the newest value of each also goes into the next checkpoint's entry."""
        self.progress.metrics.add(self.cursor.step, metrics, self.progress.samples_at(self.cursor))
        self.progress.send(self.cursor)
        self.losses.check(self.cursor)

    def report_inputs(self, examples: str) -> None:
        """Report what the model is called with, for newcomers (see `inplace.warmup`)."""
        self._reporter.send(InputsReport(step=self.cursor.step, examples=examples))

    # --- the end

    def finish(self) -> None:
        """Commit the end of training and wait for it; a second call does nothing. Raises SaveError."""
        if self._finished:
            return
        self.losses.go_back_if_lost(self.world, self.cursor, lambda: self.storage.open(self.world))
        self.losses.check_all(self.cursor)
        self._commit_surely()
        self.storage.end_group(self.world)
        self._wait_reporter.stop()
        self.progress.send(self.cursor)
        self.progress.send_rows(surely=True)
        self.world.highest(0)  # a barrier: no rank destroys the group while another still uses it
        self._finished = True
        self._strategy.leave()
        self._reporter.send(FinishedReport(step=self.cursor.step))
        self._reporter.close()
        self.storage.release()
        dist.leave(self.world)

    def save_and_restart(self) -> NoReturn:
        """Commit this step, and have the launcher restart all ranks from it. Call it on all ranks of a group whose
        processes stay. Raises SaveError."""
        self._commit_surely()
        self.storage.end_group(self.world)
        with suppress(RuntimeError):  # a barrier, which a rank that has passed it may break
            self.world.highest(0)
        self._strategy.replace(
            "the script uses its own count of steps, which differs between ranks once a step was repeated or a worker "
            f"has joined: all ranks restart from step {self.cursor.step}. FIX: use run.steps_done"
        )
        raise dist.GroupOver

    def warn_of_unsaved(self) -> None:
        """Say which steps are not saved, because the script exits in the middle of training as if it had succeeded.

        They cannot be saved now: this may be one rank of several.
        """
        if self.storage.url and not self._finished and self.cursor != self.meetings.saved:
            log.warning(
                "the script exits inside `with Run(...)` after step %d; the last save is of step %d. FIX: to save the "
                "end, leave the block first, or call run.finish(), on all ranks",
                self.cursor.step,
                self.meetings.saved.step,
            )

    def abandon(self) -> None:
        """After a failure of training: report the last values, and give a save in flight a moment. Does not
        communicate."""
        self._wait_reporter.stop()
        self.progress.report_rest()
        self.progress.send_rows(surely=True)
        self.storage.close(_ABANDON_GRACE_S)

    # --- where ranks meet

    def _meet(self) -> None:
        """Agree with all ranks on whether to save or to stop, and on when to meet again."""
        self._compare_ranks()
        self.losses.go_back_if_lost(self.world, self.cursor, lambda: self.storage.open(self.world))
        due, stop = self.meetings.agree(self.world, self.cursor.step, noticed=self._notice.given())
        if stop:
            self._drain()
        with self.progress.times.saving():
            self.meetings.save_or_copy(self.cursor, due=due)

    def _drain(self) -> NoReturn:
        """Commit this step on all ranks, report that to the launcher, and wait for it to stop this process.

        If processes stay, raises GroupOver on those whose worker need not leave. Nothing is committed if the notice is
        only for newcomers; if a worker has to leave, others may get notice at any moment.
        """
        stays = self._strategy.stays and not self._notice.is_to_leave()
        if self._strategy.stays and all(self.world.gather(stays)):
            self._leave_group()
        checkpoints = self.storage.open(self.world)
        if checkpoints is not None and self._commit(checkpoints):
            self.storage.end_group(self.world)
        elif checkpoints is not None and not checkpoints.has_given_up:
            log.warning("%s; the job will resume from an older one", checkpoints.failure())
        if stays:
            self._leave_group()
        self._wait_to_be_stopped()

    def _leave_group(self) -> NoReturn:
        """Report that this rank is ready for the next group."""
        self._reporter.send_surely(DrainedReport(step=self.cursor.step))
        raise dist.GroupOver

    def _wait_to_be_stopped(self) -> NoReturn:
        """Report that this rank has drained, and wait until the launcher ends this process, or dies."""
        checkpoints = self.storage.checkpoints
        if checkpoints is not None and checkpoints.has_given_up and self.world.rank == 0:
            said = "step %d is not saved, because the storage is unavailable; the job will resume from an older one"
            log.warning(said, self.cursor.step)
        self.progress.send(self.cursor)
        _end_on_sigterm()
        self._reporter.send_surely(DrainedReport(step=self.cursor.step))
        while True:
            time.sleep(_LONG_S)

    def _commit_surely(self) -> None:
        """Commit this very step on all ranks. Does not return if it was given up after notice. Raises SaveError."""
        checkpoints = self.storage.open(self.world)
        if checkpoints is not None and not self._commit(checkpoints):
            if checkpoints.has_given_up:
                self._wait_to_be_stopped()
            raise checkpoints.failure()

    def _commit(self, checkpoints: Checkpointer) -> bool:
        """Commit this very step; return False if that failed, or was given up after notice."""
        with self._wait_reporter.standing_still(nothing_to_save=False):
            return self.meetings.commit(checkpoints, self.cursor, self._notice.given)

    # --- reports

    def _report_resumed(self) -> None:
        source, why = (StateSource.MEMORY, None) if self._strategy.has_state else self.storage.source()
        self._resumed = ResumedReport(step=self.cursor.step, source=source, source_because=why)
        self._report_protection()

    def _report_protection(self) -> None:
        because = self._strategy.why_restarts or None
        self._reporter.send(replace(self._resumed, stays=self._strategy.stays, restarts_because=because))

    def _record_commit(self, commit: Commit, duration_s: float) -> None:
        self.meetings.record_commit(duration_s)
        self._reporter.send(
            CommittedReport(
                step=commit.step,
                committed=commit.number,
                size_bytes=commit.size_bytes,
                duration_s=round(duration_s, 4),
                url=self.storage.checkpoints.url if self.storage.checkpoints else None,
            )
        )

    def _reason_to_wait(self) -> str:
        """Return what this rank or, as far as it knows, another one waits for; "" if nothing.

        While training continues, also return why the last save failed: the next one may fail, too.
        """
        checkpoints = self.storage.checkpoints
        others = checkpoints is not None and checkpoints.is_away
        waits = self.storage.waits.reason() or ("another rank waits for its storage" if others else "")
        if waits or checkpoints is None or self._wait_reporter.stands_still:
            return waits
        return checkpoints.trouble


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
