"""What a rank reports to its launcher, and the notice that it gets.

Reports are datagrams, which never wait. Ranks that wait for a storage make no steps, so a thread of its own reports
what they wait for, and responds to notice meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from elasticctl_protocol import variables
from elasticctl_protocol.local import NOTICE_LEAVE
from elasticctl_protocol.reports import DrainedReport, Report, UnsavedReport, WaitingReport, encode_report


@dataclass(frozen=True, slots=True)
class NoticeFile:
    """Where notice appears; `path` is empty if none can be given."""

    path: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> NoticeFile:
        """Return the launcher's file for this generation."""
        return cls(environ.get(variables.NOTICE_FILE, ""))

    @property
    def possible(self) -> bool:
        """Whether a launcher may give notice."""
        return bool(self.path)

    def is_to_leave(self) -> bool:
        """Return whether it is this rank's own worker that has to leave."""
        with suppress(OSError), open(self.path) as file:
            return file.read() == NOTICE_LEAVE
        return False

    def given(self) -> bool:
        """Return whether notice has been given; costs one access to the file system."""
        return self.possible and os.path.exists(self.path)


SURELY_S = 5.0
TICK_S = 0.2
REPEAT_EVERY_S = 5.0


class Reporter:
    """Sends reports to the launcher's socket; does nothing if the environment names none."""

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self.move(rank)
        self._path = environ.get(variables.REPORTS_SOCKET, "")
        self._socket: socket.socket | None = None
        if self._path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    def move(self, rank: int) -> None:
        """Report as this rank from now on, in the generation that the environment names."""
        generation = self._environ.get(variables.GENERATION, "")
        self._rank, self._generation = rank, int(generation) if generation.isdigit() else 0

    @property
    def rank(self) -> int:
        """The rank that reports."""
        return self._rank

    @property
    def is_heard(self) -> bool:
        """Whether there is a launcher."""
        return self._socket is not None

    def send(self, report: Report) -> bool:
        """Send one report of this rank; return False if it cannot be delivered now."""
        taken = self._socket  # another thread may close it
        if taken is None:
            return False
        report = replace(report, rank=self._rank, generation=self._generation)
        data = json.dumps(encode_report(report)).encode()
        with suppress(OSError):  # no listener yet or any longer, or its queue is full
            taken.sendto(data, self._path)
            return True
        return False

    def send_surely(self, report: Report) -> bool:
        """Send one report that somebody waits for: block until there is room for it, for at most `SURELY_S`."""
        taken = self._socket
        if taken is None:
            return False
        try:
            with suppress(OSError):  # closed meanwhile
                taken.settimeout(SURELY_S)
            return self.send(report)
        finally:
            with suppress(OSError):
                taken.setblocking(False)

    def close(self) -> None:
        """Close the socket; later reports are dropped."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class WaitReporter:
    """A thread next to training, if there is a launcher to report to.

    It reports what training is stopped for as `waiting`, with a `reason` and again every few seconds, and what only
    saves wait for as `unsaved`; each with an empty reason when it is over.
    """

    def __init__(
        self,
        reporter: Reporter,
        *,
        step: Callable[[], int],
        noticed: Callable[[], bool],
        reason: Callable[[], str],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`step()` returns where training is, `noticed()` whether there is notice, `reason()` what is waited for.
        `tick()` is called in every round."""
        self._reporter, self._noticed, self._reason, self._tick = reporter, noticed, reason, tick
        self._step = step
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
        reported: type[WaitingReport | UnsavedReport] | None = None
        reported_s, answered = -math.inf, False
        while not self._stopped.wait(TICK_S):
            self._tick()
            reason, now_s = self._reason(), time.monotonic()
            kind = WaitingReport if self.stands_still else UnsavedReport
            if reported is not None and (not reason or kind is not reported):
                self._reporter.send(reported(step=self._step()))
                reported, reported_s = None, -math.inf
            if reason and now_s - reported_s >= REPEAT_EVERY_S:
                self._reporter.send(kind(step=self._step(), reason=reason))
                reported, reported_s = kind, now_s
            if self._nothing_to_save and not answered and self._noticed():
                answered = True
                self._reporter.send_surely(DrainedReport(step=self._step()))
