"""What a rank reports to its launcher, and the notice that it gets.

Reports are datagrams, which never wait. Ranks that wait for a storage make no steps, so a thread of its own reports
what they wait for, and responds to notice meanwhile.

`Progress` reports speed, remaining steps and the user's metrics with a step. Not every short step is reported, because
each report wakes up the launcher. On a machine whose cores are all busy, that stops a rank for longer than everything
else that this library does in a step.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from elasticctl_protocol import variables
from elasticctl_protocol.local import NOTICE_LEAVE
from elasticctl_protocol.reports import (
    DrainedReport,
    MetricRows,
    ProgressReport,
    Report,
    StepSums,
    UnsavedReport,
    WaitingReport,
    encode_report,
)
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Step
from elasticctl_train.metrics import LoggedMetrics
from elasticctl_train.step_times import TimeSums


@dataclass(frozen=True, slots=True)
class NoticeFile:
    """Where notice appears; `path` is empty if none can be given."""

    path: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> NoticeFile:
        """Return the launcher's file for this generation."""
        return cls(environ.get(variables.NOTICE_FILE, ""))

    @property
    def possible(self) -> bool:
        """Whether a launcher may give notice."""
        return bool(self.path)

    def is_to_leave(self) -> bool:
        """Return whether it is this rank's own worker that has to leave."""
        with suppress(OSError), open(self.path) as file:
            return file.read() == NOTICE_LEAVE
        return False

    def given(self) -> bool:
        """Return whether notice has been given; costs one access to the file system."""
        return self.possible and os.path.exists(self.path)


SURELY_S = 5.0
TICK_S = 0.2
REPEAT_EVERY_S = 5.0


class Reporter:
    """Sends reports to the launcher's socket; does nothing if the environment names none."""

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self.move(rank)
        self._path = environ.get(variables.REPORTS_SOCKET, "")
        self._socket: socket.socket | None = None
        if self._path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    def move(self, rank: int) -> None:
        """Report as this rank from now on, in the generation that the environment names."""
        generation = self._environ.get(variables.GENERATION, "")
        self._rank, self._generation = rank, int(generation) if generation.isdigit() else 0

    @property
    def rank(self) -> int:
        """The rank that reports."""
        return self._rank

    @property
    def is_heard(self) -> bool:
        """Whether there is a launcher."""
        return self._socket is not None

    def send(self, report: Report) -> bool:
        """Send one report of this rank; return False if it cannot be delivered now."""
        taken = self._socket  # another thread may close it
        if taken is None:
            return False
        report = replace(report, rank=self._rank, generation=self._generation)
        data = json.dumps(encode_report(report)).encode()
        with suppress(OSError):  # no listener yet or any longer, or its queue is full
            taken.sendto(data, self._path)
            return True
        return False

    def send_surely(self, report: Report) -> bool:
        """Send one report that somebody waits for: block until there is room for it, for at most `SURELY_S`."""
        taken = self._socket
        if taken is None:
            return False
        try:
            with suppress(OSError):  # closed meanwhile
                taken.settimeout(SURELY_S)
            return self.send(report)
        finally:
            with suppress(OSError):
                taken.setblocking(False)

    def close(self) -> None:
        """Close the socket; later reports are dropped."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class WaitReporter:
    """A thread next to training, if there is a launcher to report to.

    It reports what training is stopped for as `waiting`, with a `reason` and again every few seconds, and what only
    saves wait for as `unsaved`; each with an empty reason when it is over.
    """

    def __init__(
        self,
        reporter: Reporter,
        *,
        step: Callable[[], int],
        noticed: Callable[[], bool],
        reason: Callable[[], str],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`step()` returns where training is, `noticed()` whether there is notice, `reason()` what is waited for.
        `tick()` is called in every round."""
        self._reporter, self._noticed, self._reason, self._tick = reporter, noticed, reason, tick
        self._step = step
        self.stands_still = self._nothing_to_save = False
        self._stopped = threading.Event()
        if reporter.is_heard:
            threading.Thread(target=self._run, name="elasticctl-watch", daemon=True).start()

    @contextmanager
    def standing_still(self, *, nothing_to_save: bool) -> Iterator[None]:
        """No steps are made inside. With `nothing_to_save`, respond to notice immediately with `drained`."""
        self.stands_still, self._nothing_to_save = True, nothing_to_save
        try:
            yield
        finally:
            self.stands_still = self._nothing_to_save = False

    def stop(self) -> None:
        """Stop reporting."""
        self._stopped.set()

    def _run(self) -> None:
        reported: type[WaitingReport | UnsavedReport] | None = None
        reported_s, answered = -math.inf, False
        while not self._stopped.wait(TICK_S):
            self._tick()
            reason, now_s = self._reason(), time.monotonic()
            kind = WaitingReport if self.stands_still else UnsavedReport
            if reported is not None and (not reason or kind is not reported):
                self._reporter.send(reported(step=self._step()))
                reported, reported_s = None, -math.inf
            if reason and now_s - reported_s >= REPEAT_EVERY_S:
                self._reporter.send(kind(step=self._step(), reason=reason))
                reported, reported_s = kind, now_s
            if self._nothing_to_save and not answered and self._noticed():
                answered = True
                self._reporter.send_surely(DrainedReport(step=self._step()))


REPORT_EVERY_S = 0.1
_RATE_WINDOW_S = 10.0
_ROWS_EVERY_S = 0.5
_ROWS_BYTES = 32_768
"""The size of the rows in one report; the launcher reads up to twice that."""
_MAX_ROWS = 20_000
"""How many rows to keep, the newest ones, while the launcher accepts none."""


class Progress:
    """Counts what `Run.step` and `Run.log` pass to it and reports it."""

    def __init__(self, reporter: Reporter, times: TimeSums | None = None) -> None:
        self._reporter, self.times = reporter, times or TimeSums()
        self._marks: deque[tuple[float, int]] = deque()  # (monotonic time, samples done by then), oldest first
        self._samples = 0
        self._samples_before: int | None = None
        self._rows: deque[str] = deque(maxlen=_MAX_ROWS)
        self._rows_sent_s = -math.inf
        self.metrics = LoggedMetrics()
        self._total_epochs: int | None = None
        self.total_steps: int | None = None
        self._plan: EpochPlan | None = None
        self._newest: Step | None = None
        self._reported, self._reported_s = -1, -math.inf

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which reports for all."""
        return self._reporter.rank == 0

    def expect(self, total_epochs: int | None = None, total_steps: int | None = None) -> None:
        """Record how many epochs or steps training has in all, as far as its user knows."""
        self._total_epochs, self.total_steps = total_epochs, total_steps

    def expect_order(self, plan: EpochPlan | None) -> None:
        """Record the order of the epoch, from which the number of steps follows; None if it is a stream's."""
        self._plan = plan

    def count_samples_from(self, before: int) -> None:
        """Start counting after `before` samples, for users whose cursors do not contain the number of samples."""
        self._samples_before, self._samples = before, 0

    def samples_at(self, cursor: Cursor) -> int | None:
        """Return the number of samples trained on so far; None if unknown."""
        return cursor.samples if self._samples_before is None else self._samples_before + self._samples

    def record_step(self, step: Step) -> None:
        """Record that a step is done; report metrics twice a second."""
        now_s, cursor = time.monotonic(), step.cursor
        self._samples += step.samples
        self._newest = step
        times = self.times.due_report(now_s)
        is_time = step.loss is not None and self.metrics.add_loss(cursor.step, step.loss, self.samples_at(cursor))
        if not is_time and times is None and now_s - self._reported_s < REPORT_EVERY_S:
            return
        self._marks.append((now_s, self._samples))
        while now_s - self._marks[0][0] > _RATE_WINDOW_S:
            self._marks.popleft()
        self.send(cursor, with_metrics=is_time, times=times)

    def send(self, cursor: Cursor, *, with_metrics: bool = True, times: StepSums | None = None) -> None:
        """Report where training is, and its expected end as estimated from the last step."""
        self._reported, self._reported_s = cursor.step, time.monotonic()
        self._reporter.send(
            ProgressReport(
                step=cursor.step,
                total_steps=self._expected_steps(),
                epoch=cursor.epoch,
                total_epochs=self._total_epochs,
                samples_per_s=self._samples_per_s(),
                metrics=self.metrics.as_data() if with_metrics else None,
                times=times,
            )
        )
        if with_metrics:
            self.send_rows()

    def report_rest(self) -> None:
        """Report the newest step, unless that has been done. Thread-safe."""
        newest = self._newest
        if newest is not None and newest.cursor.step != self._reported:
            self.send(newest.cursor, with_metrics=False)

    def send_rows(self, *, surely: bool = False) -> None:
        """Send all values that rank 0 was given, to be stored; at most twice a second, unless `surely`."""
        now_s = time.monotonic()
        if not surely and now_s - self._rows_sent_s < _ROWS_EVERY_S:
            return
        self._rows_sent_s = now_s
        rows = self.metrics.pop_rows()
        if not self.is_main or not self._reporter.is_heard:
            return
        self._rows.extend(text for text in map(json.dumps, rows) if len(text) < _ROWS_BYTES)
        send = self._reporter.send_surely if surely else self._reporter.send
        while self._rows:
            sizes = itertools.accumulate(len(row) + row.count('"') + 4 for row in self._rows)  # escaped as JSON in JSON
            batch = max(1, sum(1 for _ in itertools.takewhile(lambda size: size <= _ROWS_BYTES, sizes)))
            if not send(MetricRows(rows=tuple(itertools.islice(self._rows, batch)))):
                return
            for _ in range(batch):
                self._rows.popleft()

    def _samples_per_s(self) -> float | None:
        if len(self._marks) < 2:
            return None
        (start_s, start), (end_s, end) = self._marks[0], self._marks[-1]
        return round((end - start) / (end_s - start_s), 1) if end_s > start_s and end > start else None

    def _expected_steps(self) -> int | None:
        """Return the total number of steps if those to come are like the newest one, which may accumulate several
        batches."""
        if self._newest is None or self._total_epochs is None or self._plan is None:
            return self.total_steps
        cursor = self._newest.cursor
        per_step = max(self._newest.samples, self._plan.global_batch)
        this_epoch = math.ceil(max(0, self._plan.end - cursor.position) / per_step)
        return cursor.step + this_epoch + (self._total_epochs - cursor.epoch - 1) * math.ceil(self._plan.end / per_step)
