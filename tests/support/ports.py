"""Ports for processes that tests start and tell where to listen."""

from __future__ import annotations

import itertools
import random
import socket

_BEGIN, _END = 20_000, 29_999
"""Below the range from which the kernel gives ports to whoever asks for any, connections among them."""
_numbers = itertools.count(random.randrange(_END - _BEGIN))


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on, and that this process has not been given before."""
    for number in itertools.islice(_numbers, _END - _BEGIN):
        port = _BEGIN + number % (_END - _BEGIN)
        try:
            socket.create_server((address, port)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"no port of {address} from {_BEGIN} to {_END} is free")
