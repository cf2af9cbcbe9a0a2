"""Ports for processes that tests start."""

from __future__ import annotations

import itertools
import os
import random
import socket

_BEGIN, _END = 20_000, 29_999
"""Below the range from which the kernel assigns ports, to connections among others."""


def _first_port() -> int:
    """Where this process begins: anywhere, but pytest-xdist's workers far from each other."""
    run = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(_END - _BEGIN)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return run + worker * (_END - _BEGIN) // workers


_numbers = itertools.count(_first_port())


def free_port(address: str = "127.0.0.1") -> int:
    """A port on which no process listens, and that this process has not been given before."""
    for number in itertools.islice(_numbers, _END - _BEGIN):
        port = _BEGIN + number % (_END - _BEGIN)
        try:
            socket.create_server((address, port)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"no port of {address} from {_BEGIN} to {_END} is free")
