"""The dashboard of one user, served on this machine's loopback.

GET  /BASE/?ticket=…    lets a browser in, once
GET  /BASE/             the page, and its files next to it; what it requests is in `user_api`
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web

from elasticctl.api.errors import UsageError
from elasticctl.dashboard.access import COOKIE, Gate, is_cross_site, is_local
from elasticctl.dashboard.page_files import file_routes, harden
from elasticctl.dashboard.user_api import Handler, Scope, UserApi, error_response, page_routes, respond

HOST = "127.0.0.1"
MAX_BODY_BYTES = 4096
MAX_HEADER_BYTES = 32 << 10
"""ID tokens of people with many groups are long."""

_NOT_LET_IN = "Open this page with the link that `elasticctl dashboard` prints; each link works once.\n"


@dataclass(slots=True)
class Dashboard:
    """The handlers of one run. `on_entry` is called for each browser that is let in."""

    place: Scope
    on_entry: Callable[[], None] = lambda: None
    gate: Gate = field(default_factory=Gate)
    poll_s: float = 2.0
    api: UserApi = field(init=False)

    def __post_init__(self) -> None:
        self.api = UserApi(self.place, self.gate.token, self.poll_s)

    def app(self) -> web.Application:
        """The aiohttp application; serve it on the loopback only."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes([*page_routes(self.gate.base, self._api_of), *file_routes(self.gate.base)])
        app.on_response_prepare.append(harden)
        app.on_shutdown.append(self._end)
        app.cleanup_ctx.append(self._watch)
        return app

    async def _api_of(self, _: web.Request) -> UserApi:
        return self.api

    async def _watch(self, _: web.Application) -> AsyncIterator[None]:
        self.api.start()
        yield
        self.api.stop()

    async def _end(self, _: web.Application) -> None:
        self.api.end_streams()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check every request before a handler answers it."""
        if not is_local(request.headers.get("Host", "")) or is_cross_site(request.headers):
            return error_response(403, "the request comes from another site")
        if "ticket" in request.query and request.path == self.gate.base:
            return self._entry(request)
        if not self.gate.admits(request.cookies.get(COOKIE, "")):
            return web.Response(status=403, text=_NOT_LET_IN)
        if request.method not in ("GET", "HEAD") and not self.gate.may_change(request.headers):
            return error_response(403, "the request does not come from the page")
        return await respond(handler, request)

    def _entry(self, request: web.Request) -> web.StreamResponse:
        if not self.gate.redeem(request.query["ticket"]):
            return web.Response(status=403, text=_NOT_LET_IN)
        answer = web.Response(status=303, headers={"Location": self.gate.base})
        # Lax, not Strict: the first request comes from wherever the link was clicked.
        answer.set_cookie(COOKIE, self.gate.session, path=self.gate.base, httponly=True, samesite="Lax")
        self.on_entry()
        return answer


async def serve(
    app: web.Application,
    host: str,
    port: int,
    ready: Callable[[int], None],
    watching: Callable[[], asyncio.Task[None] | None] = lambda: None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; `ready(port)` is called once it answers. `host` "": on all addresses.

    `watching()` is a task that never ends by itself: what it raises is raised. Raises UsageError if the port cannot
    be used.
    """
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True, max_field_size=MAX_HEADER_BYTES
    )
    await runner.setup()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    ending, watched = asyncio.create_task(ended.wait()), watching()
    try:
        ready(await _listen(runner, host, port))
        await asyncio.wait([task for task in (ending, watched) if task], return_when=asyncio.FIRST_COMPLETED)
        if watched is not None and watched.done():
            await watched
    finally:
        ending.cancel()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> int:
    site = web.TCPSite(runner, host or None, port)
    try:
        await site.start()
    except OSError as e:
        why = os.strerror(e.errno).lower() if e.errno else str(e)  # asyncio's message repeats the address
        raise UsageError(f"cannot listen on {host}:{port}: {why}. FIX: --port 0 takes a free one") from e
    chosen: int = runner.addresses[0][1]
    return chosen
