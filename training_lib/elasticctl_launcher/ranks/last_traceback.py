"""Holds back a rank's last traceback until it is known whether a lost peer explains it.

The loss of one worker ends the ranks of all others, each with the same twenty lines about a broken connection. If the
group knows that a peer ended first, one line replaces them. Any other traceback is printed as soon as the rank has
ended, or after `HOLD_S` seconds if the rank continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elasticctl_launcher.ranks.failure_evidence import begins_last_words, beside_last_words, find_final_exception

HOLD_S = 2.0
"""How long a rank may run after the first line of a traceback before that is printed."""
MAX_HELD_LINES = 400
MAX_ERROR_CHARS = 300


class LastTraceback:
    """Passes on lines, changed by `reword`: to `note` at once, and to `say` when they are due. Not thread-safe."""

    def __init__(
        self,
        note: Callable[[str], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        reword: Callable[[str], str] = str,
    ) -> None:
        self._note, self._say, self._clock, self._reword = note, say, clock, reword
        self._held: list[str] = []
        self._due: float | None = None

    @property
    def is_holding(self) -> bool:
        """True if there are lines that have not been passed to `say` yet."""
        return bool(self._held)

    def left_s(self) -> float | None:
        """Return the seconds until `release` is due; None if no time is set."""
        return None if self._due is None else max(0.0, self._due - self._clock())

    def add(self, line: str) -> None:
        """Add a line of the rank."""
        line = self._reword(line)
        self._note(line)
        if not self._held:
            if not begins_last_words(line):
                self._say(line)
                return
            self._due = self._clock() + HOLD_S
        self._held.append(line)
        if len(self._held) >= MAX_HELD_LINES:
            self.release()

    def release(self) -> None:
        """Say the held lines: the rank continues, or its end is its own fault."""
        held, self._held, self._due = self._held, [], None
        for line in held:
            self._say(line)

    def rank_ended(self) -> None:
        """Hold a traceback that a lost peer may explain until `settle`, and release any other."""
        self._due = None
        final = find_final_exception(self._held)
        if final is None or not final.is_of_peers:
            self.release()

    def settle(self, *, peers_ended: bool) -> None:
        """Say the held lines, but only one line for a traceback that is explained by a peer that ended first."""
        final = find_final_exception(self._held)
        if not peers_ended or final is None or not final.is_of_peers:
            self.release()
            return
        beside = beside_last_words(self._held, final)
        left_out = len(self._held) - len(beside)
        self._held, self._due = [], None
        self._say(f"a peer was lost: {final.line[:MAX_ERROR_CHARS]} ({left_out} lines of its traceback left out)")
        for line in beside:
            self._say(line)
