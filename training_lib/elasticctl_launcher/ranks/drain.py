"""A drain: the ranks of a generation agree on a step, commit it and wait to be stopped, so that no step is lost.

If the drain is for newcomers, or for a peer that has to leave, it has no time limit: training continues until the ranks
have committed. If this worker itself has to leave, the drain ends shortly before the worker is killed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from elasticctl_launcher.rank_reports import RankReports

DEFAULT_GRACE_S = 20.0
LEAVE = "leave"
"""The content of the file that asks ranks to drain, if it is their own worker that has to leave."""
FAREWELL_S = 5.0
"""The time that the launcher needs before it is killed, to tell the service and to upload the last lines."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
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
            words.write_text(LEAVE if to_leave else "")
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

    def note(self, generation: int, global_rank: int) -> None:
        """Record that a rank has committed the step."""
        if generation == self._generation:
            self._drained.add(global_rank)

    def is_done(self, global_ranks: Iterable[int]) -> bool:
        """True once all of these ranks have committed the step."""
        return bool(self._drained) and self._drained.issuperset(global_ranks)
