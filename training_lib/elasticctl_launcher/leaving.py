"""How a worker leaves, and how a generation ends in order.

In a drain, the ranks of a generation agree on a step, commit it and wait to be stopped, so that no step is lost. If it
is for newcomers, or for a peer that has to leave, it has no time limit: training continues until the ranks have
committed. If this worker itself has to leave, the drain ends shortly before the worker is killed.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from elasticctl_launcher.rank_reports import RankReports
from elasticctl_launcher.service.questions import Inquiries
from elasticctl_launcher.spot_notice import SpotNotice
from elasticctl_protocol.local import NOTICE_LEAVE

DEFAULT_GRACE_S = 20.0
FAREWELL_S = 5.0
"""The time that the launcher needs before it is killed, to report to the service and to upload the last lines."""
BY_SIGNAL = "SIGTERM"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits in seconds.

    `stop_grace_s`: the time between SIGTERM and SIGKILL for ranks. `hang_timeout_s`: how long the ranks may stand still
    before the group restarts (0: no limit; None: by the job's own pace). `grace_s`: how long after SIGTERM the launcher
    itself is killed.
    """

    stop_grace_s: float = 5.0
    hang_timeout_s: float | None = None
    grace_s: float = DEFAULT_GRACE_S

    def drain_s(self, left_s: float) -> float:
        """Return how long the ranks may take to commit a step, if their worker is killed in `left_s` seconds.

        The rest is left to stop them and to end the launcher.
        """
        return max(left_s / 2, left_s - self.stop_grace_s - FAREWELL_S)

    def last_grace_s(self, left_s: float | None) -> float:
        """Return how long the ranks of a worker that has to leave may take to end.

        They have nearly as long as the worker, which is killed in `left_s` seconds (None: unknown), because nothing
        waits for them any more.
        """
        return self.stop_grace_s if left_s is None else max(left_s / 2, left_s - FAREWELL_S)


class Drain:
    """The drain of one generation, whether or not one is ever requested."""

    def __init__(self, generation: int, reports: RankReports, clock: Callable[[], float] = time.monotonic) -> None:
        self._generation, self._reports, self._clock = generation, reports, clock
        self._drained: set[int] = set()
        self._deadline: float | None = None

    @property
    def is_exporting(self) -> bool:
        """True once the ranks have made their last step, and there is none left to agree on."""
        return self._reports.finished_generation >= self._generation

    def request(self, *, to_leave: bool = False) -> bool:
        """Ask the ranks to drain; return False if that is impossible.

        It is if their script does not, or no longer, use the training library, or if the file cannot be written.
        `to_leave`: this worker has to leave, rather than another one.
        """
        if self._reports.newest_generation < self._generation or self.is_exporting:
            return False
        notice = Path(self._reports.notice_file(self._generation))
        words = notice.with_suffix(".new")
        try:
            words.write_text(NOTICE_LEAVE if to_leave else "")
            words.replace(notice)
        except OSError as error:  # for example, a full disk: steps are lost, but the job continues
            log.warning("cannot ask the ranks to commit their step: %s: %s", notice.parent, error.strerror)
            return False
        return True

    def limit(self, limit_s: float) -> None:
        """Let the drain last no longer than `limit_s` seconds from now on."""
        self._deadline = self._clock() + limit_s

    def left_s(self) -> float | None:
        """Return the seconds that are left for the drain; None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def record_drained(self, generation: int, global_rank: int) -> None:
        """Record that a rank has committed the step."""
        if generation == self._generation:
            self._drained.add(global_rank)

    def is_done(self, global_ranks: Iterable[int]) -> bool:
        """True once all of these ranks have committed the step."""
        return bool(self._drained) and self._drained.issuperset(global_ranks)


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
        self._got_signal, self._reason = False, ""

    @property
    def why(self) -> str:
        """The reason in one line; empty if there is none yet."""
        return self._notice.words if self._notice is not None else BY_SIGNAL if self._got_signal else self._reason

    def expect(self, notice: SpotNotice) -> None:
        """Announce that the next signal stands for this notice; may be called from any thread."""
        self._expected.append(notice)

    def record_signal(self) -> None:
        """Record that SIGTERM has arrived; call from the signal handler."""
        if self._expected:
            self._notice = self._expected.popleft()
            self._record_end(self._notice.left_s())
        else:
            self._got_signal = True
            self._record_end(self._grace_s)

    def record_reason(self, reason: str) -> None:
        """Record that the service makes this worker leave, with its reason; may be called from any thread."""
        self._reason = reason

    def ask_to_stay(self) -> bool:
        """Ask the service whether this worker may keep training; the answer holds for `stay_s()` seconds."""
        notice = None if self._got_signal else self._notice
        stay = self._service.ask_to_stay(self.why, notice)
        if 0 < stay.left_s < math.inf:
            self._killed_at = time.monotonic() + stay.left_s
        self._stay_until = None if stay.stay_s == math.inf else time.monotonic() + stay.stay_s
        return stay.stay_s > 0

    def stay_s(self) -> float | None:
        """Return the seconds until this worker has to ask again; None: it may stay until the service makes it leave."""
        return None if self._stay_until is None else max(0.0, self._stay_until - time.monotonic())

    def left_s(self) -> float | None:
        """Return the seconds until this worker is killed; None if that is unknown."""
        return None if self._killed_at is None else max(0.0, self._killed_at - time.monotonic())

    def _record_end(self, left_s: float | None) -> None:
        """Record a deadline. If it has already passed, only the clocks differ, so the full grace period is assumed."""
        if left_s is not None:
            at = time.monotonic() + (left_s or self._grace_s)
            self._killed_at = at if self._killed_at is None else min(at, self._killed_at)
