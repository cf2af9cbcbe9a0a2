"""What a server needs that every worker of a large job calls at once: file descriptors, a long queue, clear words."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from typing import Any

BACKLOG = 4096
"""Connections that wait to be accepted; the kernel cuts it to net.core.somaxconn."""

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as it may; returns the limit. Each connected worker needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS names a hard limit that it does not grant
        return soft
    return hard


def explain_exhaustion(loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop say in one line when it cannot accept a connection; it tries again after a second by itself."""
    said: set[int] = set()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif error.errno not in said:
            said.add(error.errno)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            log.error(
                "cannot accept more workers: %s (the limit is %d). FIX: raise it (ulimit -n, LimitNOFILE)",
                error.strerror,
                limit,
            )
            loop.call_later(60.0, said.discard, error.errno)

    loop.set_exception_handler(handle)
