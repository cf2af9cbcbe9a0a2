"""The progress of training as numbers: speed, remaining steps and the user's metrics, sent to the launcher with a step.

Not every short step is reported, because each report wakes up the launcher. On a machine whose cores are all busy, that
stops a rank for longer than everything else that this library does in a step.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from elasticctl_train.data.sample_order import Cursor, EpochPlan
from elasticctl_train.metrics import Metrics
from elasticctl_train.step_times import StepTimes

NOTICE_VARIABLE = "ELASTICCTL_NOTICE_FILE"
LEAVE = "leave"
"""The content of the file for a worker that has to leave; for the others it is empty."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Where notice appears; `path` is empty if nobody can give any."""

    path: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Notice:
        """Return the launcher's file for this generation."""
        return cls(environ.get(NOTICE_VARIABLE, ""))

    @property
    def possible(self) -> bool:
        """Whether a launcher may give notice."""
        return bool(self.path)

    def is_to_leave(self) -> bool:
        """Return whether it is this rank's own worker that has to leave."""
        with suppress(OSError), open(self.path) as file:
            return file.read() == LEAVE
        return False

    def given(self) -> bool:
        """Return whether notice has been given; costs one access to the file system."""
        return self.possible and os.path.exists(self.path)


SOCKET_VARIABLE = "ELASTICCTL_AGENT_SOCKET"
GENERATION_VARIABLE = "ELASTICCTL_GENERATION"
SURELY_S = 5.0


class Reporter:
    """Sends reports to the launcher's socket; does nothing if the environment names none."""

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        generation = environ.get(GENERATION_VARIABLE, "")
        self._base = {"rank": rank, "generation": int(generation) if generation.isdigit() else 0}
        self._path = environ.get(SOCKET_VARIABLE, "")
        self._socket: socket.socket | None = None
        if self._path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    def move(self, rank: int, generation: int) -> None:
        """Report as another rank from now on."""
        self._base = {"rank": rank, "generation": generation}

    @property
    def rank(self) -> int:
        """The rank that reports."""
        return self._base["rank"]

    @property
    def is_heard(self) -> bool:
        """Whether there is a launcher."""
        return self._socket is not None

    def send(self, kind: str, **fields: object) -> bool:
        """Send one report, without the fields that are None; return False if it cannot be delivered now."""
        taken = self._socket  # another thread may close it
        if taken is None:
            return False
        known = {name: value for name, value in fields.items() if value is not None}
        data = json.dumps({"kind": kind, **self._base, **known}).encode()
        with suppress(OSError):  # no listener yet or any longer, or its queue is full
            taken.sendto(data, self._path)
            return True
        return False

    def send_surely(self, kind: str, **fields: object) -> bool:
        """Send one report that somebody waits for: block until there is room for it, for at most `SURELY_S`."""
        taken = self._socket
        if taken is None:
            return False
        try:
            with suppress(OSError):  # closed meanwhile
                taken.settimeout(SURELY_S)
            return self.send(kind, **fields)
        finally:
            with suppress(OSError):
                taken.setblocking(False)

    def close(self) -> None:
        """Close the socket; later reports are dropped."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


TELL_EVERY_S = 0.1
_RATE_WINDOW_S = 10.0
_ROWS_EVERY_S = 0.5
_ROWS_BYTES = 32_768
"""The size of the rows in one report; the launcher reads up to twice that."""
_MAX_ROWS = 20_000
"""How many rows to keep, the newest ones, while the launcher accepts none."""


class Progress:
    """Counts what `Run.step` and `Run.log` pass to it and reports it."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._marks: deque[tuple[float, int]] = deque()  # (monotonic time, samples done by then), oldest first
        self._samples = 0
        self._samples_before: int | None = None
        self._rows: deque[str] = deque(maxlen=_MAX_ROWS)
        self._rows_sent_s = -math.inf
        self.metrics = Metrics()
        self.times = StepTimes()
        self.total_epochs: int | None = None
        self.total_steps: int | None = None
        self._newest: tuple[Cursor, int] | None = None
        self._told, self._told_s = -1, -math.inf
        self.plan: EpochPlan | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which reports for all."""
        return self._reporter.rank == 0

    def count_samples_from(self, before: int) -> None:
        """Start counting after `before` samples, for users whose cursors do not contain the number of samples."""
        self._samples_before, self._samples = before, 0

    def samples_at(self, cursor: Cursor) -> int | None:
        """Return the number of samples trained on so far; None if unknown."""
        return cursor.samples if self._samples_before is None else self._samples_before + self._samples

    def step(self, cursor: Cursor, samples: int, loss: torch.Tensor | float | None) -> None:
        """Record that an optimizer step over `samples` samples of the whole group is done; report metrics twice a
        second."""
        now_s = time.monotonic()
        self._samples += samples
        self._newest = cursor, samples
        times = self.times.told(now_s)
        is_time = loss is not None and self.metrics.add_loss(cursor.step, loss, self.samples_at(cursor))
        if not is_time and times is None and now_s - self._told_s < TELL_EVERY_S:
            return
        self._marks.append((now_s, self._samples))
        while now_s - self._marks[0][0] > _RATE_WINDOW_S:
            self._marks.popleft()
        self.send(cursor, with_metrics=is_time, times=times)

    def send(self, cursor: Cursor, *, with_metrics: bool = True, times: Mapping[str, float] | None = None) -> None:
        """Report where training is, and its expected end as estimated from the last step."""
        self._told, self._told_s = cursor.step, time.monotonic()
        self._reporter.send(
            "progress",
            step=cursor.step,
            total_steps=self._expected_steps(),
            epoch=cursor.epoch,
            total_epochs=self.total_epochs,
            samples_per_s=self._samples_per_s(),
            metrics=self.metrics.as_data() if with_metrics else None,
            times=times,
        )
        if with_metrics:
            self.send_rows()

    def tell_rest(self) -> None:
        """Report the newest step, unless that has been done. Thread-safe."""
        newest = self._newest
        if newest is not None and newest[0].step != self._told:
            self.send(newest[0], with_metrics=False)

    def send_rows(self, *, surely: bool = False) -> None:
        """Send all values that rank 0 was given, to be stored; at most twice a second, unless `surely`."""
        now_s = time.monotonic()
        if not surely and now_s - self._rows_sent_s < _ROWS_EVERY_S:
            return
        self._rows_sent_s = now_s
        rows = self.metrics.take_rows()
        if not self.is_main or not self._reporter.is_heard:
            return
        self._rows.extend(text for text in map(json.dumps, rows) if len(text) < _ROWS_BYTES)
        send = self._reporter.send_surely if surely else self._reporter.send
        while self._rows:
            sizes = itertools.accumulate(len(row) + row.count('"') + 4 for row in self._rows)  # escaped as JSON in JSON
            batch = max(1, sum(1 for _ in itertools.takewhile(lambda size: size <= _ROWS_BYTES, sizes)))
            if not send("metrics", rows=list(itertools.islice(self._rows, batch))):
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
        if self._newest is None or self.total_epochs is None or self.plan is None:
            return self.total_steps
        cursor, samples = self._newest
        per_step = max(samples, self.plan.global_batch)
        this_epoch = math.ceil(max(0, self.plan.end - cursor.position) / per_step)
        return cursor.step + this_epoch + (self.total_epochs - cursor.epoch - 1) * math.ceil(self.plan.end / per_step)
