"""Kernel settings for a server with a connection from every worker of a large job.

Each connection is an open file. The kernel notices within 2 s that a worker's host has vanished, at no cost for any
process: TCP's keepalive, like all data, is acknowledged by the host's kernel, however busy its processes are.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1, "TCP_USER_TIMEOUT": 2000}
"""Probe after a second without data, and give the connection up a second later. Also give it up if data has not been
acknowledged for 2 s, because the kernel does not probe during that time. Launchers connect again."""
LOST_HOST = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as allowed; returns the limit. Each connection needs one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS names a hard limit that it does not grant
        return soft
    return hard


def explain_exhaustion(loop: asyncio.AbstractEventLoop) -> None:
    """Have the event loop log one line when it cannot accept a connection; it tries again by itself after a second."""
    reported: set[int] = set()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif error.errno not in reported:
            reported.add(error.errno)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            log.error(
                "cannot accept more workers: %s (the limit is %d). FIX: raise it (ulimit -n, LimitNOFILE)",
                error.strerror,
                limit,
            )
            loop.call_later(60.0, reported.discard, error.errno)

    loop.set_exception_handler(handle)


def watch_host(transport: asyncio.BaseTransport | None) -> None:
    """Have the kernel notice when the host at the other end no longer answers."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # the connection may have ended
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_lost_host(error: BaseException | None) -> bool:
    """Did a connection end because the host at the other end no longer answers? A process that ends closes it
    immediately."""
    return isinstance(error, OSError) and error.errno in LOST_HOST


def reset(accepted: socket.socket) -> None:
    """Reset a connection, so that the kernel keeps nothing of it."""
    with suppress(OSError):
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()


def peer_uid(connected: socket.socket) -> int | None:
    """The user id at the other end of a Unix socket; None if the system does not report it."""
    if sys.platform != "linux":
        return None
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
