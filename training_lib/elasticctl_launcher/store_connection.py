"""Connects to the c10d store of another agent, without a time limit.

The host of a new generation's store may be lost after it has joined. Its store then refuses connections, drops packets,
or accepts a connection and never answers. None of this is a failure: the attempt is repeated until it succeeds or the
service reports that the generation is over. torch's client cannot be interrupted and waits for an answer without a
limit (its timeout covers only the connection). Each attempt therefore runs in a thread, which is ended by shutting down
its connection.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from elasticctl_launcher.service.client import RetryPauses
from elasticctl_launcher.system import start_thread

CONNECT_S = 0.5
FIRST_ANSWER_S, LONGEST_ANSWER_S = 2.0, 30.0
"""How long a store may take to answer before another attempt is made. In a large group, a thousand clients connect at
once.
"""
STEP_S = 0.05
END_S = 5.0

log = logging.getLogger(__name__)


def connect_to_store(host: str, port: int, name: str, timeout: timedelta, stale: threading.Event) -> TCPStore | None:
    """Return a client of the store at `host`:`port`, in the agent of the worker `name`; None once `stale` is set.

    `timeout` applies to later operations on the store. An exception of a signal handler may interrupt the call.
    """
    answer_s, backoff, said = FIRST_ANSWER_S, RetryPauses(), False
    while not stale.is_set():
        attempt = _Attempt(host, port)
        try:
            store = attempt.wait(answer_s, stale)
        finally:
            attempt.end()
        if store is not None:
            store.set_timeout(timeout)
            return store
        if not said and not stale.is_set():
            said = True
            log.warning("the store of %s at %s:%d cannot be reached yet (%s): trying again", name, host, port, attempt)
        answer_s = min(LONGEST_ANSWER_S, answer_s * 2)
        stale.wait(backoff.next_s())
    return None


class _Attempt:
    """One attempt, which starts immediately in its own thread."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._store: TCPStore | None = None
        self._error = "no answer"
        self._done = threading.Event()
        start_thread(self._run, name="store")

    def __str__(self) -> str:
        return self._error

    def wait(self, timeout_s: float, stale: threading.Event) -> TCPStore | None:
        """Return the store, or None if the attempt has failed, `timeout_s` is over, or `stale` is set."""
        left = int(timeout_s / STEP_S)
        while left > 0 and not self._done.wait(STEP_S) and not stale.is_set():
            left -= 1
        return self._store

    def end(self) -> None:
        """End the thread if it still waits for an answer: a process that exits while it runs may crash."""
        deadline = time.monotonic() + END_S
        while not self._done.is_set() and time.monotonic() < deadline:
            _shut_down_connections(self._port)
            self._done.wait(STEP_S)

    def _run(self) -> None:
        try:
            store = TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=CONNECT_S))
            self._store = store
        except RuntimeError as error:
            self._error = str(error).splitlines()[0]
        self._done.set()


def _shut_down_connections(port: int) -> None:
    """Shut down this process's connections to that port, because torch does not reveal which socket it uses."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                        connection.shutdown(socket.SHUT_RDWR)
