"""The progress of training as numbers: speed, remaining steps and the user's metrics, sent to the launcher with a step.

Not every short step is reported, because each report wakes up the launcher. On a machine whose cores are all busy, that
stops a rank for longer than everything else that this library does in a step.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque

from elasticctl_protocol.reports import MetricRows, ProgressReport, StepSums
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Step
from elasticctl_train.launcher_reports import Reporter
from elasticctl_train.metrics import LoggedMetrics
from elasticctl_train.step_times import TimeSums

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
