"""A dashboard's server in a thread of the test's process, and the stream of events that a page follows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import ClientResponse, web

from elasticctl.dashboard.server import HOST


class App(Protocol):
    """What can be served."""

    def app(self) -> web.Application:
        """Its application."""


@dataclass(frozen=True, slots=True)
class Host:
    """A server that runs: a link to it, and a way to cut all its connections."""

    link: str
    cut: Callable[[], object]


@contextmanager
def running(page: App) -> Iterator[Host]:
    """Serve it from a thread; the link is its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(page.app(), shutdown_timeout=0.2, handler_cancellation=True, max_field_size=32 << 10)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        return runner

    def cut() -> None:
        for connection in runner.server.connections if runner.server else ():
            connection.force_close()

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield Host(f"http://{HOST}:{runner.addresses[0][1]}", lambda: loop.call_soon_threadsafe(cut))
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


Following = Callable[[str], Awaitable[dict[str, Any]]]


@asynccontextmanager
async def news_of(answer: ClientResponse) -> AsyncIterator[Following]:
    """What is yielded waits for the next event of a name, and returns its data with its id; EOFError: none comes."""

    async def following(name: str) -> dict[str, Any]:
        fields: dict[str, str] = {}
        while line := (await answer.content.readline()).decode():
            if line != "\n":
                key, _, fields[key] = line.rstrip("\n").partition(": ")
            elif fields.get("event") == name:
                return {"id": fields.get("id", ""), **json.loads(fields["data"])}
            else:
                fields = {}
        raise EOFError

    try:
        yield following
    finally:
        answer.close()
