"""A run in several processes: failures are printed immediately, and a process that hangs is detected and ended.

A test's time limit is a signal. It does nothing for a process that hangs in C, is stopped, or waits between two tests;
and one that has died is not missed while a child that it forked holds the pipe by which pytest-xdist would notice.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

HALT_S = 1500.0
"""Longer than any test may take: when nothing is heard of any process for so long, one has come to a halt."""
SHOW_STACKS = signal.SIGUSR2


class Watch:
    """In the process that hands the tests out: which tests run, and the other processes."""

    def __init__(self, config: pytest.Config, halt_s: float) -> None:
        self._config, self._halt_s = config, halt_s
        self._heard, self._ended = time.monotonic(), threading.Event()
        self._running: dict[str, float] = {}
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A process begins with a test."""
        self._heard = self._running[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test is done: a failure is shown now, too, in case that the summary is never reached."""
        self._heard = time.monotonic()
        if report.failed:
            self._say(f"{report.nodeid} failed in {report.when}:\n{report.longreprtext}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test is over."""
        self._heard = time.monotonic()
        self._running.pop(nodeid, None)

    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport, sched: Any) -> None:
        """A process has died. A test that it had not begun goes to another one."""
        if crashitem not in self._running:
            report.outcome, report.longrepr = "skipped", ("", 0, "Skipped: not begun, and given to another process")
            sched.mark_test_pending(crashitem)
        self._running.pop(crashitem, None)

    def pytest_sessionfinish(self) -> None:
        """All is over."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(min(10.0, self._halt_s / 4)):
            if time.monotonic() - self._heard >= self._halt_s:
                self._end_halted()
                self._heard = time.monotonic()

    def _end_halted(self) -> None:
        now = time.monotonic()
        running = [f"{nodeid} for {now - began:.0f} s" for nodeid, began in self._running.items()]
        self._say(f"nothing was heard for {self._halt_s:.0f} s; running: {', '.join(running) or 'no test'}")
        scheduler = self._config.pluginmanager.getplugin("dsession").sched
        tests = {node: scheduler.collection[pending[0]] for node, pending in scheduler.node2pending.items() if pending}
        for node, test in tests.items():
            if test in self._running or not self._running:
                self._end(node, test)

    def _end(self, node: Any, test: str) -> None:
        with suppress(psutil.Error, ProcessLookupError):
            worker = psutil.Process(node.gateway._rinfo().pid)
            processes = [worker, *worker.children(recursive=True)]
            for process in processes:
                place, command = _read(f"/proc/{process.pid}/wchan"), " ".join(process.cmdline())
                self._say(f"{node.gateway.id}, {test}: {process.pid} {process.status()} {place} {command[:200]}")
            worker.resume()
            worker.send_signal(SHOW_STACKS)
            self._ended.wait(2.0)
            for process in processes:
                process.kill()

    def _say(self, text: str) -> None:
        print(f"\n[{time.strftime('%T')}] {text}", file=sys.__stderr__, flush=True)


class Watched:
    """In a process that runs tests: what it forks lets go of the pipe, so that its end is noticed immediately."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """The connection is there now."""
        plugins = session.config.pluginmanager.get_plugins()
        interactor = next(plugin for plugin in plugins if type(plugin).__name__ == "WorkerInteractor")
        pipe = interactor.channel.gateway._io.outfile.fileno()
        os.register_at_fork(after_in_child=lambda: os.close(pipe))


def pytest_configure(config: pytest.Config) -> None:
    """Watch, or let yourself be watched."""
    if hasattr(config, "workerinput"):
        stderr = os.fdopen(os.dup(2), "w")  # before what tests print is captured
        config.add_cleanup(stderr.close)
        faulthandler.register(SHOW_STACKS, stderr, all_threads=True)
        config.pluginmanager.register(Watched())
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(Watch(config, float(os.environ.get("TEST_HALT_S", HALT_S))))


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text()
    return "?"
