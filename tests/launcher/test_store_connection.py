"""Connecting to the store of a peer that may be lost: it refuses, drops packets, or accepts and never answers."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from elasticctl_launcher.store_connection import connect_to_store
from tests.support.interrupting import Interrupted, interrupt_soon
from tests.support.ports import free_port
from tests.support.waiting import wait_until

TIMEOUT = timedelta(hours=10)
"""Longer than any test takes."""


@pytest.fixture(params=["refuses", "never answers", "drops what it is sent", "hangs up"])
def lost(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a store whose host is lost."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
        if request.param == "never answers":
            listener.listen(100)
        elif request.param == "drops what it is sent":  # as the kernel does once the queue of connections is full
            listener.listen(0)
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", port))
        elif request.param == "hangs up":
            listener.listen(100)
            threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        yield port


def hang_up(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.close()


def connect(port: int, stale: threading.Event) -> TCPStore | None:
    return connect_to_store("127.0.0.1", port, "a-0", TIMEOUT, stale)


def test_the_end_of_the_generation_ends_the_attempts(lost: int, caplog: pytest.LogCaptureFixture) -> None:
    stale = threading.Event()

    def wait() -> None:
        wait_until(lambda: "cannot be reached yet" in caplog.text)
        threading.Timer(1.0, stale.set).start()

    threading.Thread(target=wait).start()
    with caplog.at_level(logging.WARNING):
        assert connect(lost, stale) is None
    assert len([record for record in caplog.records if "cannot be reached yet" in record.getMessage()]) == 1


def test_sigterm_ends_the_attempts(lost: int) -> None:
    with interrupt_soon(1.0), pytest.raises(Interrupted):
        connect(lost, threading.Event())
    assert not [thread for thread in threading.enumerate() if thread.name == "store"]


def test_a_store_that_answers_late_is_reached(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()  # from a range that is not used for outgoing connections
    stores: list[TCPStore] = []

    def serve() -> None:
        stores.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    threading.Timer(2.0, serve).start()
    store = connect(port, threading.Event())
    assert store is not None
    assert store.timeout == TIMEOUT
    store.set("key", "value")
    assert store.get("key") == b"value"
