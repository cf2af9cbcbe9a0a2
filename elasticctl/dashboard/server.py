"""The dashboard's HTTP interface: a page, a stream of events, details of a job, and four changes of a job.

    GET  /BASE/?ticket=…                     lets a browser in, once
    GET  /BASE/                              the page, and its files beside it
    GET  /BASE/events                        server-sent events: hello, jobs, projects, trouble, well, alive
    GET  /BASE/jobs/{namespace}/{name}       everything about one job
    GET  /BASE/jobs/{namespace}/{name}/compare        how another job differs: ?with=namespace/name
    GET  /BASE/jobs/{namespace}/{name}/logs           lines: ?worker=…|rank=…&find=…&since=…&until=…&skip=…&all=1
    GET  /BASE/jobs/{namespace}/{name}/metrics        its curves: ?m=loss&m=lr&x=step|samples|time&from=…&to=…&points=…
    GET  /BASE/jobs/{namespace}/{name}/metrics.csv    every value
    POST /BASE/jobs/{namespace}/{name}/stacks         where its ranks are: a look into its workers
    POST /BASE/jobs/{namespace}/{name}/{scale|suspend|resume|cancel}     {"uid": …, "workers": 4}

`jobs` events carry an id; a browser that reconnects sends the last one it has seen and gets what changed since.
`alive` is sent when nothing else is: a browser that receives nothing for long knows that it is disconnected.
An error is `{"error": one line}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import quote

from aiohttp import web

from elasticctl.api.errors import ClusterError, ConflictError, ElasticctlError, NotFoundError, UsageError
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Cluster, Manifest, is_owned
from elasticctl.cluster.inside import Inside
from elasticctl.dashboard.access import COOKIE, ChangeRequest, Gate, ScalePatch, apply_change, is_cross_site, is_local
from elasticctl.dashboard.feed import JobFeed, Key, ProjectPoller, run_in_thread
from elasticctl.dashboard.logs import Page
from elasticctl.dashboard.page_data import Projects, job_details
from elasticctl.dashboard.run_metrics import Results, RunMetrics, View
from elasticctl.dashboard.stacks import stacks_data

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = (
    "index.html",
    "style.css",
    "icon.svg",
    "address.js",
    "ansi.js",
    "app.js",
    "charts.js",
    "course.js",
    "curves.js",
    "dialogs.js",
    "differences.js",
    "dom.js",
    "feed.js",
    "job.js",
    "list.js",
    "logs.js",
    "machines.js",
    "plan.js",
    "projects.js",
    "stacks.js",
    "svg.js",
    "team.js",
    "words.js",
    "vendor/uPlot.esm.js",
    "vendor/uPlot.min.css",
)


HOST = "127.0.0.1"
MAX_BODY_BYTES = 4096
MAX_VIEWERS = 16
HEARTBEAT_S = 15.0
RETRY_MS = 2000
PODS_FRESH_S = 2.0
MAX_CALLS = 4
"""How many requests about single jobs may run at once."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Server": "elasticctl",
}
_STATUSES: Mapping[type[ElasticctlError], int] = {UsageError: 400, NotFoundError: 404, ConflictError: 409}
_NOT_LET_IN = "Open this page with the link that `elasticctl dashboard` prints; each link works once.\n"

Compare = Callable[[Sequence[ElasticJob], Sequence[Results]], Mapping[str, Any]]
"""Returns what `elasticctl compare` prints of two jobs, as JSON: `rows`, `code`, `lines`, how many `more`. Blocks."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asset:
    """One file and its content type."""

    content: bytes
    content_type: str


def assets() -> dict[str, Asset]:
    """Path relative to the page -> file; the page itself is "". No other file can be requested."""
    folder = resources.files("elasticctl.dashboard").joinpath("page")
    found = {}
    for name in _FILES:
        kind = _TYPES[name.rpartition(".")[2]]
        found["" if name == "index.html" else name] = Asset(folder.joinpath(name).read_bytes(), kind)
    return found


@dataclass(frozen=True, slots=True)
class Scope:
    """What is shown: the jobs in `namespace` (None: in all) of the context's cluster; `inside` is asked for stacks."""

    cluster: Cluster
    context: str
    namespace: str | None
    inside: Callable[[], Inside] | None = None


@dataclass(slots=True)
class ViewerState:
    """What one browser has been sent; `version` is that of the rows, None: nothing yet."""

    version: int | None
    trouble: str = ""
    projects: Projects | None = None


@dataclass(slots=True)
class Dashboard:
    """The handlers of one run. `on_entry` is called for each browser that is let in."""

    place: Scope
    scaled: ScalePatch
    compared: Compare
    on_entry: Callable[[], None] = lambda: None
    gate: Gate = field(default_factory=Gate)
    poll_s: float = 2.0
    feed: JobFeed = field(init=False)
    watching: asyncio.Task[None] | None = None
    _run_metrics: RunMetrics = field(default_factory=RunMetrics)
    _files: dict[str, Asset] = field(default_factory=assets)
    _life: str = field(default_factory=lambda: secrets.token_hex(4))
    _ending: asyncio.Event = field(default_factory=asyncio.Event)
    _calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS))
    _pods: dict[Key, tuple[float, asyncio.Task[Sequence[Manifest]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster, namespace = self.place.cluster, self.place.namespace
        self.feed = JobFeed(lambda: cluster.list_jobs(namespace), ProjectPoller(cluster, namespace).poll, self.poll_s)

    def app(self) -> web.Application:
        """The aiohttp application; serve it on the loopback only."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        base, job = self.gate.base, self.gate.base + "jobs/{namespace}/{name}"
        app.add_routes(
            [
                web.get(base + "events", self._events, allow_head=False),
                web.get(job, self._details),
                web.get(job + "/compare", self._compare),
                web.get(job + "/logs", self._logs),
                web.get(job + "/metrics", self._metrics),
                web.get(job + "/metrics.csv", self._table),
                web.post(job + "/stacks", self._stacks),
                web.post(job + "/{verb}", self._change),
                web.get(base + "{file:.*}", self._file),
            ]
        )
        app.on_response_prepare.append(_harden)
        app.on_shutdown.append(self._end)
        app.cleanup_ctx.append(self._watch)
        return app

    async def _watch(self, _: web.Application) -> AsyncIterator[None]:
        self.watching = asyncio.create_task(self.feed.run())
        yield
        for task in (self.watching, *(asking for _, asking in self._pods.values())):
            task.cancel()

    async def _end(self, _: web.Application) -> None:
        self._ending.set()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check every request before a handler answers it."""
        if not is_local(request.headers.get("Host", "")) or is_cross_site(request.headers):
            return _error(403, "the request comes from another site")
        if "ticket" in request.query and request.path == self.gate.base:
            return self._entry(request)
        if not self.gate.admits(request.cookies.get(COOKIE, "")):
            return web.Response(status=403, text=_NOT_LET_IN)
        if request.method not in ("GET", "HEAD") and not self.gate.may_change(request.headers):
            return _error(403, "the request does not come from the page")
        try:
            return await handler(request)
        except web.HTTPException as e:
            return _error(e.status, e.reason)
        except ElasticctlError as e:
            return _error(next((status for kind, status in _STATUSES.items() if isinstance(e, kind)), 502), str(e))

    def _entry(self, request: web.Request) -> web.StreamResponse:
        if not self.gate.redeem(request.query["ticket"]):
            return web.Response(status=403, text=_NOT_LET_IN)
        answer = web.Response(status=303, headers={"Location": self.gate.base})
        # Lax, not Strict: the first request comes from wherever the link was clicked.
        answer.set_cookie(COOKIE, self.gate.session, path=self.gate.base, httponly=True, samesite="Lax")
        self.on_entry()
        return answer

    async def _file(self, request: web.Request) -> web.Response:
        asset = self._files.get(request.match_info["file"])
        if asset is None:
            raise web.HTTPNotFound
        return web.Response(body=asset.content, headers={"Content-Type": asset.content_type})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.feed.viewers >= MAX_VIEWERS:
            return _error(503, f"{MAX_VIEWERS} pages are open already. FIX: close one")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        with self.feed.viewing():
            await stream.prepare(request)
            hello = {"context": self.place.context, "namespace": self.place.namespace, "token": self.gate.token}
            await stream.write(f"retry: {RETRY_MS}\n".encode() + _event("hello", hello))
            seen = ViewerState(self._version(request.headers.get("Last-Event-ID", "")))
            while not self._ending.is_set():
                await stream.write(b"".join(self._pending_events(seen)) or _event("alive", {}))
                await self._wait()
        return stream

    def _pending_events(self, seen: ViewerState) -> Iterator[bytes]:
        """Yield what is new for this browser, and note it as sent."""
        feed = self.feed
        if feed.trouble != seen.trouble:
            seen.trouble = feed.trouble
            yield _event("trouble", {"message": feed.trouble}) if feed.trouble else _event("well", {})
        if feed.polled and seen.version != feed.rows.version:
            update = feed.rows.since(seen.version)
            seen.version = update.version
            data = {"whole": update.whole, "rows": update.rows, "gone": update.gone, "now": time.time()}
            yield _event("jobs", data, f"{self._life}.{seen.version}")
        if feed.projects is not None and feed.projects is not seen.projects:
            seen.projects = feed.projects
            yield _event("projects", feed.projects)

    async def _wait(self) -> None:
        """Wait for a change, for the end, or until the next `alive` is due."""
        waits = [asyncio.ensure_future(wait) for wait in (self.feed.wait_for_change(HEARTBEAT_S), self._ending.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _version(self, event_id: str) -> int | None:
        """The version that a browser has seen; None for nothing, or if it is of an earlier run."""
        life, _, number = event_id.partition(".")
        return int(number) if life == self._life and number.isascii() and number.isdigit() else None

    async def _details(self, request: web.Request) -> web.Response:
        found = self._job(request)
        pods = await self._pods_of((found.namespace, found.name))
        job = self._job(request)  # may be newer by now
        own = [pod for pod in pods if is_owned(pod, job.uid)]  # they may be of one that had its name before
        return web.json_response(job_details(job, own, time.time()))

    def _job(self, request: web.Request) -> ElasticJob:
        """The job that a request is about. Raises NotFoundError."""
        name = request.match_info["name"]
        job = self.feed.job((request.match_info["namespace"], name))
        if job is None:
            raise NotFoundError(f"the job {name} no longer exists")
        return job

    async def _compare(self, request: web.Request) -> web.Response:
        namespace, _, name = request.query.get("with", "").partition("/")
        other = self.feed.job((namespace, name))
        if other is None:
            raise NotFoundError(f"the job {name} no longer exists")
        jobs = [self._job(request), other]

        def answer() -> Mapping[str, Any]:
            results = [self._run_metrics.results(job) for job in jobs]
            troubles = [f"{job.name}: {trouble}" for job, (_, trouble) in zip(jobs, results, strict=True) if trouble]
            return {**self.compared(jobs, [found for found, _ in results]), "troubles": troubles}

        async with self._calls:
            return web.json_response(await run_in_thread(answer))

    async def _metrics(self, request: web.Request) -> web.Response:
        job, view = self._job(request), View.parse(request.query, request.query.getall("m", []))
        async with self._calls:
            return web.json_response(await run_in_thread(lambda: self._run_metrics.answer(job, view)))

    async def _logs(self, request: web.Request) -> web.Response:
        job, page = self._job(request), Page.parse(request.query)
        async with self._calls:
            return web.json_response(await run_in_thread(lambda: page.read(self.place.cluster, job)))

    async def _stacks(self, request: web.Request) -> web.Response:
        job, inside = self._job(request), self.place.inside
        if inside is None:
            raise NotFoundError("this dashboard cannot look into workers")
        async with self._calls:
            return web.json_response(await run_in_thread(lambda: stacks_data(inside(), self.place.cluster, job)))

    async def _table(self, request: web.Request) -> web.StreamResponse:
        job = self._job(request)
        async with self._calls:
            lines = await run_in_thread(lambda: self._run_metrics.table(job))
        name = f"attachment; filename*=UTF-8''{quote(job.name)}.csv"
        headers = {"Content-Type": "text/csv; charset=utf-8", "Content-Disposition": name}
        return web.Response(text="".join(lines), headers=headers)

    async def _pods_of(self, key: Key) -> Sequence[Manifest]:
        """A job's pods, listed once for all viewers of it; empty if the cluster refuses.

        A viewer that has gone on to another job does not cancel the request, so that clicking around never has more
        than MAX_CALLS requests running.
        """
        now = time.monotonic()
        asked_at, asking = self._pods.get(key, (0.0, None))
        if asking is None or (asking.done() and now - asked_at >= PODS_FRESH_S):
            self._pods = {k: v for k, v in self._pods.items() if not v[1].done() or now - v[0] < PODS_FRESH_S}
            asking = asyncio.create_task(self._list_pods(key))
            self._pods[key] = now, asking
        return await asyncio.shield(asking)

    async def _list_pods(self, key: Key) -> Sequence[Manifest]:
        async with self._calls:
            try:
                return await run_in_thread(lambda: self.place.cluster.list_pods(*key))
            except ClusterError as e:
                log.debug("pods of %s: %s", key, e)
                return ()

    async def _change(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as e:
            raise UsageError("the request is not JSON") from e
        wish = ChangeRequest.parse(request.match_info["verb"], body)
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        if self.place.namespace not in (None, namespace):
            raise NotFoundError(f"this page shows only the namespace {self.place.namespace}")
        async with self._calls:
            await run_in_thread(lambda: apply_change(self.place.cluster, namespace, name, wish, self.scaled))
        self.feed.poll_now()
        return web.json_response({})


async def serve(dashboard: Dashboard, port: int, ready: Callable[[int], None]) -> None:
    """Serve on the loopback until SIGINT, SIGTERM or SIGHUP; `ready(port)` is called once it answers.

    Raises UsageError if the port cannot be used.
    """
    runner = web.AppRunner(dashboard.app(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    ending, watching = asyncio.create_task(ended.wait()), dashboard.watching
    try:
        ready(await _listen(runner, port))
        await asyncio.wait([task for task in (ending, watching) if task], return_when=asyncio.FIRST_COMPLETED)
        if watching is not None and watching.done():
            await watching  # it never ends by itself: raise our bug
    finally:
        ending.cancel()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, port: int) -> int:
    site = web.TCPSite(runner, HOST, port)
    try:
        await site.start()
    except OSError as e:
        why = os.strerror(e.errno).lower() if e.errno else str(e)  # asyncio's message repeats the address
        raise UsageError(f"cannot listen on {HOST}:{port}: {why}. FIX: --port 0 takes a free one") from e
    chosen: int = runner.addresses[0][1]
    return chosen


async def _harden(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _event(name: str, data: Mapping[str, Any], event_id: str = "") -> bytes:
    """One server-sent event; JSON has no newlines of its own."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: {json.dumps(data)}\n\n".encode()
