"""The bodies of requests: how large and how slow they may be, and how much work they may cause.

A small body is read and parsed at once. Each job may send one large body at a time, and large bodies are parsed beside
the event loop, one after the other: thousands of members take a tenth of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from aiohttp import web

from elasticctl_controller.rendezvous.requests import Caller, Refused, parse_body

MAX_BODY_BYTES = 2 * 1024 * 1024
"""A `watch` may list its whole generation: some 100 bytes per member."""
BODY_S = 10.0
"""How long a body may take to arrive; a launcher that is cut off tries again."""
SMALL_BYTES = 32 * 1024
_DRAINED_BYTES = 2 * MAX_BODY_BYTES

T = TypeVar("T")


class Bodies:
    """Reads the bodies of requests from workers that have shown their token."""

    def __init__(self) -> None:
        self._large = WeakValueDictionary[str, asyncio.Lock]()  # by job uid, while somebody holds it or waits for it
        self._worker = ThreadPoolExecutor(1, "bodies")

    async def read(self, request: web.Request, caller: Caller) -> Mapping[str, Any]:
        """The JSON object in a request. Raises Refused, also if the body takes too long to arrive."""
        size = request.content_length
        if "Transfer-Encoding" in request.headers or size is None:
            raise Refused(411, "a body needs a Content-Length")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(415, "the body must not be encoded")
        if size > MAX_BODY_BYTES:
            await _drain(request)
            raise Refused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        if size <= SMALL_BYTES:
            return parse_body(await _receive(request))
        async with self._large.setdefault(caller.job_uid, asyncio.Lock()):
            raw = await _receive(request)
            return await self.work(lambda: parse_body(raw))

    async def work(self, work: Callable[[], T]) -> T:
        """Do slow work beside the event loop; returns, or raises, what it does."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


async def _receive(request: web.Request) -> bytes:
    try:
        return await asyncio.wait_for(request.read(), BODY_S)
    except TimeoutError as error:
        raise Refused(408, "the body did not arrive in time") from error
    except (ConnectionError, RuntimeError) as error:  # the worker has died meanwhile: nobody reads this
        raise Refused(400, "the body is not whole") from error


async def _drain(request: web.Request) -> None:
    """Read part of a body that is too large, so that the sender gets to read the refusal."""

    async def drain() -> None:
        left = _DRAINED_BYTES
        while left > 0 and (chunk := await request.content.readany()):
            left -= len(chunk)

    try:
        await asyncio.wait_for(drain(), BODY_S)
    except (TimeoutError, ConnectionError, RuntimeError):
        return
