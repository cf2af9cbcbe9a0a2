"""The end of a worker that has to leave: the reason, the time at which it is killed, and how long it may stay."""

from __future__ import annotations

import time
from collections import deque

from elasticctl_launcher.service.agent_requests import Inquiries
from elasticctl_launcher.spot_notice import SpotNotice

BY_SIGNAL = "SIGTERM"


class Termination:
    """Tracks why and when this worker has to leave.

    The service knows whether a successor takes this worker's place, and by when a deleted pod has to end. After a
    signal, the worker is killed within `grace_s` seconds, unless the service knows better.
    """

    def __init__(self, service: Inquiries, grace_s: float) -> None:
        self._service, self._grace_s = service, grace_s
        self._expected: deque[SpotNotice] = deque()
        self._notice: SpotNotice | None = None
        self._killed_at: float | None = None
        self._stay_until: float | None = None
        self._got_signal, self._told = False, ""

    @property
    def why(self) -> str:
        """The reason in one line; empty if there is none yet."""
        return self._notice.words if self._notice is not None else BY_SIGNAL if self._got_signal else self._told

    def expect(self, notice: SpotNotice) -> None:
        """Announce that the next signal stands for this notice; may be called from any thread."""
        self._expected.append(notice)

    def note_signal(self) -> None:
        """Record that SIGTERM has arrived; call from the signal handler."""
        if self._expected:
            self._notice = self._expected.popleft()
            self._note_end(self._notice.left_s())
        else:
            self._got_signal = True
            self._note_end(self._grace_s)

    def note_told(self, reason: str) -> None:
        """Record that the service makes this worker leave, with its reason; may be called from any thread."""
        self._told = reason

    def ask_to_stay(self) -> bool:
        """Ask the service whether this worker may keep training; the answer holds for `stay_s()` seconds."""
        notice = None if self._got_signal else self._notice
        stay = self._service.ask_to_stay(self.why, notice)
        if stay.left_s is not None and stay.left_s > 0:
            self._killed_at = time.monotonic() + stay.left_s
        self._stay_until = None if stay.stay_s is None else time.monotonic() + stay.stay_s
        return stay.stay_s is None or stay.stay_s > 0

    def stay_s(self) -> float | None:
        """Return the seconds until this worker has to ask again; None: it may stay until it is told to leave."""
        return None if self._stay_until is None else max(0.0, self._stay_until - time.monotonic())

    def left_s(self) -> float | None:
        """Return the seconds until this worker is killed; None if that is unknown."""
        return None if self._killed_at is None else max(0.0, self._killed_at - time.monotonic())

    def _note_end(self, left_s: float | None) -> None:
        """Record a deadline. If it has already passed, only the clocks differ, so the full grace period is assumed."""
        if left_s is not None:
            at = time.monotonic() + (left_s or self._grace_s)
            self._killed_at = at if self._killed_at is None else min(at, self._killed_at)
