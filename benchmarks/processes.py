"""End exactly the processes that a benchmark started, and kill those that a scenario loses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping

import psutil

MARK = "ELASTICCTL_BENCHMARK"
"""The name of the variable that every process of a trial has in its environment; its value identifies the trial."""


def kill_trees(pids: Iterable[int]) -> float:
    """Send SIGKILL to processes and all their descendants, as if their machines had failed; return when, in Unix
    seconds.

    The given processes are killed first, so that none of them reacts to the end of its descendants.
    """
    tops = [process for process in map(_process, pids) if process is not None]
    below = []
    for top in tops:
        with contextlib.suppress(psutil.Error):
            below += top.children(recursive=True)
    at = time.time()
    for process in [*tops, *below]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return at


def owner_of(pid: int, owners: Mapping[int, int]) -> int | None:
    """Return the key of the process in `owners` (key -> pid) that `pid` is, or descends from; None if there is none."""
    process = _process(pid)
    if process is None:
        return None
    with contextlib.suppress(psutil.Error):
        line = {pid, *(parent.pid for parent in process.parents())}
        return next((key for key, owner in owners.items() if owner in line), None)
    return None


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; do nothing if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def sweep(value: str, name: str = MARK) -> int:
    """Send SIGKILL to every process with `name=value` in its environment, also to stopped ones; return how many there
    were."""
    found = [process for process in psutil.process_iter() if _carries(process, name, value)]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=5.0)
    return len(found)


def free_port() -> int:
    """Return a port of the loopback interface on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _carries(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(name) == value
    except psutil.Error:
        return False
