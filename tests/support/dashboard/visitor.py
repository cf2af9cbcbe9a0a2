"""Somebody who looks at pages, and the dashboard's server beside them in a thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from elasticctl.cli.verbs.inspect.compare import compared
from elasticctl.cli.verbs.inspect.dashboard import patch_to_scale
from elasticctl.cluster.base import Cluster
from elasticctl.dashboard.server import HOST, Dashboard
from elasticctl.dashboard.user_api import Scope, Tools
from tests.support.dashboard.looks import PATIENCE_MS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page


class Visitor:
    """Opens pages in browsers that know nothing, and keeps what they complain of."""

    def __init__(self, chromium: Browser) -> None:
        self._chromium = chromium
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        for context in self._contexts:
            context.close()

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1) -> Page:
        """A page in a window of so many pixels."""
        context = self._chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            device_scale_factor=scale,
            reduced_motion="reduce",
        )
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(url)
        return page

    def _note(self, message: ConsoleMessage) -> None:
        """Answers that say no are the business of the tests; what scripts or the content policy complain of is not."""
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)


@dataclass(frozen=True, slots=True)
class Host:
    """A dashboard that runs: a link to it, and a way to cut all its connections."""

    link: str
    cut: Callable[[], object]


@contextmanager
def hosted(cluster: Any, namespace: str | None = "default", access: Callable[[], Any] | None = None) -> Iterator[Host]:
    """A dashboard of `cluster`, which is looked at every tenth of a second."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[str, web.AppRunner]:
        place = Scope(cast(Cluster, cluster), "local", namespace, access)
        dashboard = Dashboard(place, Tools(patch_to_scale, compared), poll_s=0.1)
        runner = web.AppRunner(dashboard.app(), shutdown_timeout=0.2, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        return f"http://{HOST}:{runner.addresses[0][1]}{dashboard.gate.issue()}", runner

    link, runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)

    def cut() -> None:
        for connection in runner.server.connections if runner.server else ():
            connection.force_close()

    try:
        yield Host(link, lambda: loop.call_soon_threadsafe(cut))
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


FLAGS = (
    "--no-sandbox",  # which does not work as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
