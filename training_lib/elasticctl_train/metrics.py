"""The newest value of each metric, of those that are no finite numbers any more since which step, and every value.

Every loss is looked at, but not one by one: reading a tensor of a GPU waits for it, so those are read together, twice a
second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

LOSS = "loss"
Row = dict[str, float | str]
"""`step`, `at` (seconds since the epoch), `samples` where they are known, and the metrics of that moment; what is not
finite, as a word."""
RESERVED = ("step", "at", "samples")

_LOOK_EVERY_S = 0.5
_MAX_UNREAD = 256
_MAX_ROWS = 10_000
"""Kept where nobody takes them: the newest."""
_JSON_WORDS = {"NaN": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


@dataclass(frozen=True, slots=True)
class NotFinite:
    """What a metric is instead of a finite number ("NaN", "inf" or "-inf"), and since which step."""

    value: str
    step: int


class Metrics:
    """What `Run.step` and `Run.log` were given. `finite` and `not_finite` have no name in common."""

    def __init__(self) -> None:
        self.finite: dict[str, float] = {}
        self.not_finite: dict[str, NotFinite] = {}
        self._rows: list[Row] = []
        self._unread: list[tuple[int, float, int | None, torch.Tensor]] = []
        self._looked_s = -math.inf

    def add_loss(self, step: int, loss: torch.Tensor | float, samples: int | None = None) -> bool:
        """Take the loss of a step, after so many `samples` in all; True if it is time to report metrics."""
        if isinstance(loss, torch.Tensor) and _is_elsewhere(loss):
            self._keep(step, samples, loss.detach())
        else:
            self._take(LOSS, step, time.time(), _number(loss), samples)
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        self.look()
        return True

    def note(self, step: int, metrics: Mapping[str, torch.Tensor | float], samples: int | None = None) -> None:
        """Take other numbers at this step, after so many `samples` in all."""
        now = time.time()
        for name, value in metrics.items():
            self._take(name, step, now, _number(value), samples)

    def restore(self, step: int, metrics: Mapping[str, float]) -> None:
        """What they were at the checkpoint from which training goes on: nothing new."""
        for name, value in metrics.items():
            self._judge(name, step, value)

    def take_rows(self) -> list[Row]:
        """Every value since the last call, those of one step and moment together."""
        taken, self._rows = self._rows, []
        return taken

    def look(self) -> None:
        """Read the losses that are still on the device; waits for it."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        values = torch.stack([loss.reshape(()) for *_, loss in unread]).tolist()
        for (step, at, samples, _), value in zip(unread, values, strict=True):
            self._take(LOSS, step, at, value, samples)

    def as_data(self) -> dict[str, Any]:
        """All of them as JSON, which has no word for NaN."""
        lost = {name: {"value": item.value, "since_step": item.step} for name, item in self.not_finite.items()}
        return {**self.finite, **lost}

    def _keep(self, step: int, samples: int | None, loss: torch.Tensor) -> None:
        if self._unread and (
            len(self._unread) >= _MAX_UNREAD
            or (self._unread[-1][-1].device, self._unread[-1][-1].dtype) != (loss.device, loss.dtype)
        ):
            self.look()
        self._unread.append((step, time.time(), samples, loss))

    def _take(self, name: str, step: int, at: float, value: float, samples: int | None) -> None:
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
            self.not_finite[name] = NotFinite(_word(value), since)


def _is_elsewhere(loss: torch.Tensor) -> bool:
    """Is it on a device whose work would have to be waited for?"""
    return loss.device.type != "cpu"


def _number(value: torch.Tensor | float) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
