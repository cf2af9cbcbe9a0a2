"""A question that a cluster is asked again and again: apart, because verbs that watch and verbs that wait ask so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from elasticctl.api.errors import BusyError, UnreachableError
from elasticctl.api.text import span

PATIENCE_S = 600.0
"""For who waits and cannot see whether anybody answers: an API server that is upgraded may be away for minutes."""
_SHARE_OF_TIME = 0.2
"""A cluster that is slow to answer is asked less often: answers are waited for in no more of the time than this."""

T = TypeVar("T")


@dataclass(slots=True)
class Answers(Generic[T]):
    """What a question is answered, again and again; while nobody answers, what was answered last.

    `until`: a moment of the monotonic clock that no pause goes beyond. `patience_s`: how long nobody may answer.
    `say` is told once when that begins. `trouble` says since when nobody does; "" while all is well.
    """

    question: Callable[[], T]
    every_s: float
    until: float = math.inf
    patience_s: float = math.inf
    say: Callable[[str], None] | None = None
    trouble: str = ""

    def each(self) -> Iterator[T]:
        """Yield answers without end. The first question has to be answered; later ones only have to make sense."""
        asked_at = time.monotonic()
        last = self.question()
        heard_at = time.monotonic()
        while True:
            took_s = time.monotonic() - asked_at
            yield last
            time.sleep(self._pause_s(took_s))
            asked_at = time.monotonic()
            try:
                last = self.question()
                self.trouble, heard_at = "", time.monotonic()
            except (UnreachableError, BusyError) as e:
                silent_s = time.monotonic() - heard_at
                if silent_s > self.patience_s:
                    raise
                if self.say is not None and not self.trouble:
                    self.say(f"asking again: {e}")
                self.trouble = f"this is from {span(silent_s)} ago, asking again: {e}"

    def _pause_s(self, took_s: float) -> float:
        wanted_s = max(self.every_s, took_s * (1 / _SHARE_OF_TIME - 1))
        return max(0.0, min(wanted_s, self.until - time.monotonic()))
