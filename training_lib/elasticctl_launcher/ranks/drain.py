"""A drain: the ranks of a generation agree on a step, commit it and stand still, to be stopped without losing a step.

A drain for newcomers, or for a peer that has to go, lasts as long as the ranks live: training goes on until they have
committed. One for this worker's own sake ends shortly before the worker is killed.
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
"""What the file that asks ranks to drain says to those of a worker that has to go."""
FAREWELL_S = 5.0
"""What the launcher needs for itself before it is killed: to tell the service, and to upload the last lines."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """`stop_grace_s`: the time from SIGTERM to SIGKILL for ranks. `hang_timeout_s`: how long the ranks may stand still
    before the group re-forms; 0: forever; None: by the job's own pace. `grace_s`: after so many seconds from SIGTERM
    the launcher itself is killed.
    """

    stop_grace_s: float = 5.0
    hang_timeout_s: float | None = None
    grace_s: float = DEFAULT_GRACE_S

    def drain_s(self, left_s: float) -> float:
        """How long the ranks of a worker may take to commit a step that is killed in `left_s` and stops them first."""
        return max(left_s / 2, left_s - self.stop_grace_s - FAREWELL_S)

    def last_grace_s(self, left_s: float | None) -> float:
        """How long the ranks of a worker that has to go may take to end: nobody waits for them any more, so as long as
        the worker itself has, which is killed in `left_s`; None: nobody knows.
        """
        return self.stop_grace_s if left_s is None else max(left_s / 2, left_s - FAREWELL_S)


class Drain:
    """The drain of one generation, from its start on, whether or not one is ever asked for."""

    def __init__(self, generation: int, reports: RankReports, clock: Callable[[], float] = time.monotonic) -> None:
        self._generation, self._reports, self._clock = generation, reports, clock
        self._drained: set[int] = set()
        self._deadline: float | None = None

    @property
    def is_exporting(self) -> bool:
        """True once the ranks have made their last step: there is none left to agree on."""
        return self._reports.finished_generation >= self._generation

    def request(self, *, to_leave: bool = False) -> bool:
        """Ask the ranks; False if their script does not, or no longer, use the training library, or cannot be asked.

        `to_leave`: it is this worker that has to go, and not another that comes or goes.
        """
        if self._reports.newest_generation < self._generation or self.is_exporting:
            return False
        notice = Path(self._reports.notice_file(self._generation))
        words = notice.with_suffix(".new")
        try:
            words.write_text(LEAVE if to_leave else "")
            words.replace(notice)
        except OSError as error:  # what ranks wrote has filled the disk, perhaps: they lose steps, but the job lives
            log.warning("the ranks cannot be asked to commit their step: %s: %s", notice.parent, error.strerror)
            return False
        return True

    def limit(self, limit_s: float) -> None:
        """Let it last no longer than `limit_s` from now on."""
        self._deadline = self._clock() + limit_s

    def left_s(self) -> float | None:
        """The seconds that are left for it; None: any number."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def note(self, generation: int, global_rank: int) -> None:
        """A rank has committed the step."""
        if generation == self._generation:
            self._drained.add(global_rank)

    def is_done(self, global_ranks: Iterable[int]) -> bool:
        """True once all of these ranks have."""
        return bool(self._drained) and self._drained.issuperset(global_ranks)
