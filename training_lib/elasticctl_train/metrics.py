"""The newest value of each metric, since when metrics are not finite, and every value.

Every loss is examined, but not one by one: reading a tensor from a GPU waits for it, so losses are read together, twice
a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elasticctl_protocol.reports import NotFiniteValue

LOSS = "loss"
Row = dict[str, float | str]
"""`step`, `at` (seconds since the epoch), `samples` if known, and the metrics of that moment; a value that is not
finite is a word."""
RESERVED = ("step", "at", "samples")

_READ_EVERY_S = 0.5
_MAX_UNREAD = 256
_MAX_ROWS = 10_000
"""How many rows to keep, the newest ones, while none are taken."""
_JSON_WORDS = {"NaN": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


@dataclass(frozen=True, slots=True)
class LostMetric:
    """The value of a metric that is not finite ("NaN", "inf" or "-inf"), and since which step."""

    value: str
    step: int


class LoggedMetrics:
    """What `Run.step` and `Run.log` were given. `finite` and `not_finite` have no name in common."""

    def __init__(self) -> None:
        self.finite: dict[str, float] = {}
        self.not_finite: dict[str, LostMetric] = {}
        self._rows: list[Row] = []
        self._unread: list[tuple[int, float, int | None, torch.Tensor]] = []
        self._read_s = -math.inf

    def add_loss(self, step: int, loss: torch.Tensor | float, samples: int | None = None) -> bool:
        """Record the loss of a step, after `samples` in all; return True if it is time to report metrics."""
        if isinstance(loss, torch.Tensor) and _is_elsewhere(loss):
            self._defer(step, samples, loss.detach())
        else:
            self._add_value(LOSS, step, time.time(), _number(loss), samples)
        now_s = time.monotonic()
        if now_s - self._read_s < _READ_EVERY_S:
            return False
        self._read_s = now_s
        self.read_losses()
        return True

    def add(self, step: int, metrics: Mapping[str, torch.Tensor | float], samples: int | None = None) -> None:
        """Record other metrics at this step, after `samples` in all."""
        now = time.time()
        for name, value in metrics.items():
            self._add_value(name, step, now, _number(value), samples)

    def restore(self, step: int, metrics: Mapping[str, float]) -> None:
        """Restore the values of the checkpoint that training resumes from; they are not new."""
        for name, value in metrics.items():
            self._judge(name, step, value)

    def pop_rows(self) -> list[Row]:
        """Return all values since the last call; those of one step and moment form one row."""
        taken, self._rows = self._rows, []
        return taken

    def read_losses(self) -> None:
        """Read the losses that are still on the device, which waits for it."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        values = torch.stack([loss.reshape(()) for *_, loss in unread]).tolist()
        for (step, at, samples, _), value in zip(unread, values, strict=True):
            self._add_value(LOSS, step, at, value, samples)

    def as_data(self) -> dict[str, Any]:
        """Return all metrics, to be reported: JSON cannot represent NaN."""
        lost = {name: NotFiniteValue(item.value, item.step) for name, item in self.not_finite.items()}
        return {**self.finite, **lost}

    def _defer(self, step: int, samples: int | None, loss: torch.Tensor) -> None:
        if self._unread and (
            len(self._unread) >= _MAX_UNREAD
            or (self._unread[-1][-1].device, self._unread[-1][-1].dtype) != (loss.device, loss.dtype)
        ):
            self.read_losses()
        self._unread.append((step, time.time(), samples, loss))

    def _add_value(self, name: str, step: int, at: float, value: float, samples: int | None) -> None:
        self._judge(name, step, value)
        if name in RESERVED:
            return
        last = self._rows[-1] if self._rows else None
        if last is None or last["step"] != step or name in last:
            last = {"step": step, "at": round(at, 3), **({} if samples is None else {"samples": samples})}
            self._rows.append(last)
            del self._rows[:-_MAX_ROWS]
        last[name] = value if math.isfinite(value) else _JSON_WORDS[_word(value)]

    def _judge(self, name: str, step: int, value: float) -> None:
        if math.isfinite(value):
            self.finite[name] = value
            self.not_finite.pop(name, None)
        else:
            self.finite.pop(name, None)
            since = self.not_finite[name].step if name in self.not_finite else step
            self.not_finite[name] = LostMetric(_word(value), since)


def _is_elsewhere(loss: torch.Tensor) -> bool:
    """Return whether the loss is on a device whose work would have to be waited for."""
    return loss.device.type != "cpu"


def _number(value: torch.Tensor | float) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
