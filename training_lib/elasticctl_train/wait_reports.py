"""Report to the launcher what a rank waits for, from a thread of its own, and respond to notice while no step is made.

Ranks that wait for a storage make no steps, so nothing else could report that to their launcher, or respond to it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elasticctl_train.progress import Reporter

TICK_S = 0.2
TELL_EVERY_S = 5.0


class WaitReporter:
    """A thread beside training, if there is a launcher to report to. `step` is where training is.

    It reports what training is stopped for as `waiting`, with a `reason` and again every few seconds, and what only
    saves wait for as `unsaved`; each with an empty reason when it is over. `tick()` is called in every round.
    """

    def __init__(
        self,
        reporter: Reporter,
        noticed: Callable[[], bool],
        reason: Callable[[], str],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._reporter, self._noticed, self._reason, self._tick = reporter, noticed, reason, tick
        self.step = 0
        self.stands_still = self._nothing_to_save = False
        self._stopped = threading.Event()
        if reporter.is_heard:
            threading.Thread(target=self._run, name="elasticctl-watch", daemon=True).start()

    @contextmanager
    def standing_still(self, *, nothing_to_save: bool) -> Iterator[None]:
        """No steps are made inside. With `nothing_to_save`, respond to notice at once with `drained`."""
        self.stands_still, self._nothing_to_save = True, nothing_to_save
        try:
            yield
        finally:
            self.stands_still = self._nothing_to_save = False

    def stop(self) -> None:
        """Stop reporting."""
        self._stopped.set()

    def _run(self) -> None:
        told, told_s, answered = "", -math.inf, False
        while not self._stopped.wait(TICK_S):
            self._tick()
            reason, now_s = self._reason(), time.monotonic()
            kind = "waiting" if self.stands_still else "unsaved"
            if told and (not reason or kind != told):
                self._reporter.send(told, step=self.step, reason="")
                told, told_s = "", -math.inf
            if reason and now_s - told_s >= TELL_EVERY_S:
                self._reporter.send(kind, step=self.step, reason=reason)
                told, told_s = kind, now_s
            if self._nothing_to_save and not answered and self._noticed():
                answered = True
                self._reporter.send_surely("drained", step=self.step)
