"""What is asked of the connections that this library keeps open: to the launcher's service, to a cloud's storage."""

from __future__ import annotations

import select
import socket


def has_ended(idle: socket.socket) -> bool:
    """True when the other side has hung up: nothing else makes an idle connection readable."""
    poll = select.poll()
    poll.register(idle, select.POLLIN)
    return bool(poll.poll(0))
