"""How training goes, as numbers: speed, steps to go and the user's metrics, sent to the launcher with every step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping

import torch

from elasticctl_train.data import Cursor, EpochPlan
from elasticctl_train.report import Reporter

_RATE_WINDOW_S = 10.0
_METRICS_EVERY_S = 0.5


class Progress:
    """Counts what `Run.step` and `Run.log` tell it and reports it."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._marks: deque[tuple[float, int]] = deque()  # (monotonic time, samples done by then), oldest first
        self._samples = 0
        self._metrics_s = -math.inf
        self.metrics: dict[str, float] = {}
        self.total_epochs: int | None = None
        self.total_steps: int | None = None
        self._expected: int | None = None
        self.plan: EpochPlan | None = None

    def step(self, cursor: Cursor, samples: int, loss: torch.Tensor | float | None) -> None:
        """One optimizer step over `samples` samples of the whole group is done.

        Reads `loss` twice a second at most: reading a CUDA tensor waits for the GPU.
        """
        now_s = time.monotonic()
        self._samples += samples
        self._marks.append((now_s, self._samples))
        while now_s - self._marks[0][0] > _RATE_WINDOW_S:
            self._marks.popleft()
        metrics = None
        if loss is not None and now_s - self._metrics_s >= _METRICS_EVERY_S:
            self._metrics_s = now_s
            self.note({"loss": loss})
            metrics = self.metrics
        to_go = self._steps_to_go(cursor, samples)
        self._expected = None if to_go is None else cursor.step + to_go
        self.send(cursor, metrics)

    def note(self, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Keep the newest value of each metric; nan and infinities, which JSON has no word for, are left out."""
        values = {n: float(v.detach() if isinstance(v, torch.Tensor) else v) for n, v in metrics.items()}
        self.metrics |= {name: value for name, value in values.items() if math.isfinite(value)}

    def send(self, cursor: Cursor, metrics: Mapping[str, float] | None) -> None:
        """Report where training is, and in how many steps it will be done as far as the last one told."""
        self._reporter.send(
            "progress",
            step=cursor.step,
            total_steps=self.total_steps if self._expected is None else self._expected,
            epoch=cursor.epoch,
            total_epochs=self.total_epochs,
            samples_per_s=self._samples_per_s(),
            metrics=metrics,
        )

    def _samples_per_s(self) -> float | None:
        if len(self._marks) < 2:
            return None
        (start_s, start), (end_s, end) = self._marks[0], self._marks[-1]
        return round((end - start) / (end_s - start_s), 1) if end_s > start_s and end > start else None

    def _steps_to_go(self, cursor: Cursor, samples: int) -> int | None:
        """Steps left if all go on to be of this size: several batches each where gradients are accumulated."""
        if self.total_epochs is None or self.plan is None:
            return None
        per_step = max(samples, self.plan.global_batch)
        this_epoch = math.ceil(max(0, self.plan.end - cursor.position) / per_step)
        return this_epoch + (self.total_epochs - cursor.epoch - 1) * math.ceil(self.plan.end / per_step)
