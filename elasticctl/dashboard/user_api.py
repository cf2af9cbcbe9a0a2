"""The HTTP interface for one user: a stream of events, details of a job, and four changes to a job.

    GET  BASE/events                               server-sent events: hello, jobs, projects, trouble, well, alive
    GET  BASE/jobs/{namespace}/{name}              everything about one job
    GET  BASE/jobs/{namespace}/{name}/compare      how another job differs: ?with=namespace/name
    GET  BASE/jobs/{namespace}/{name}/logs         lines: ?worker=…|rank=…&find=…&since=…&until=…&skip=…&all=1
    GET  BASE/jobs/{namespace}/{name}/metrics      its curves: ?m=loss&m=lr&x=step|samples|time&from=…&to=…&points=…
    GET  BASE/jobs/{namespace}/{name}/metrics.csv  every value
    POST BASE/jobs/{namespace}/{name}/stacks       the stacks of its ranks
    POST BASE/jobs/{namespace}/{name}/{scale|suspend|resume|cancel}     {"uid": …, "workers": 4}

`jobs` events carry an id; a browser that reconnects sends the last one it has seen and gets what changed since.
`alive` is sent when nothing else is: a browser that receives nothing for long knows that it is disconnected.
An error is `{"error": one line}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from aiohttp import web

from elasticctl.api.errors import (
    BusyError,
    ClusterError,
    ConflictError,
    ElasticctlError,
    ForbiddenError,
    NotFoundError,
    UsageError,
)
from elasticctl.api.observed.workers import runs
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Cluster, Manifest, is_owned
from elasticctl.cluster.stacks import read_stacks
from elasticctl.cluster.worker_access import WorkerAccess
from elasticctl.dashboard.access import ChangeRequest, apply_change
from elasticctl.dashboard.feed import JobFeed, Key, ProjectPoller, run_in_thread
from elasticctl.dashboard.logs import Page
from elasticctl.dashboard.page_data import Projects, job_details
from elasticctl.operations.compare import CodeChanges, JobComparison, compare
from elasticctl.operations.metrics import RunMetrics, View
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context

MAX_VIEWERS = 16
HEARTBEAT_S = 15.0
RETRY_MS = 2000
PODS_FRESH_S = 2.0
MAX_CALLS = 4
"""How many requests about single jobs may run at the same time."""
MAX_STACK_LINES = 20_000
MAX_DIFF_LINES, MAX_LINE = 2_000, 500

_STATUSES: Mapping[type[ElasticctlError], int] = {
    UsageError: 400,
    ForbiddenError: 403,
    NotFoundError: 404,
    ConflictError: 409,
    BusyError: 503,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scope:
    """What is shown: the jobs in `namespace` (None: all) of the context's cluster; `access` provides stacks."""

    cluster: Cluster
    context: Context
    namespace: str | None
    access: Callable[[], WorkerAccess] | None = None


@dataclass(slots=True)
class ViewerState:
    """What one browser has been sent; `version` is that of its rows (None: nothing yet)."""

    version: int | None
    trouble: str = ""
    projects: Projects | None = None


OWN: Mapping[str, Any] = {"user": "", "changes": True, "storages": True}
"""The fields of `hello` for a page without login, which may do what the command line may."""


@dataclass(slots=True)
class UserApi:
    """The handlers for one user and one place. `token` is the page's own, which changes require.

    `hello` has other fields of the first event. Streams end once `is_over()`.
    """

    place: Scope
    token: str
    poll_s: float = 2.0
    hello: Mapping[str, Any] = field(default_factory=lambda: OWN)
    is_over: Callable[[], bool] = lambda: False
    feed: JobFeed = field(init=False)
    watching: asyncio.Task[None] | None = None
    _run_metrics: RunMetrics = field(default_factory=RunMetrics)
    _life: str = field(default_factory=lambda: secrets.token_hex(4))
    _ending: asyncio.Event = field(default_factory=asyncio.Event)
    _calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS))
    _pods: dict[Key, tuple[float, asyncio.Task[Sequence[Manifest]]]] = field(default_factory=dict)
    _stack_reads: dict[str, asyncio.Task[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster, namespace = self.place.cluster, self.place.namespace
        self.feed = JobFeed(lambda: cluster.list_jobs(namespace), ProjectPoller(cluster, namespace).poll, self.poll_s)

    def start(self) -> None:
        """Start to watch on the running loop; the cluster is queried only while there are viewers."""
        self.watching = asyncio.create_task(self.feed.run())

    def end_streams(self) -> None:
        """End all streams."""
        self._ending.set()

    def stop(self) -> None:
        """End all streams, and stop querying."""
        self.end_streams()
        for task in (self.watching, *(asking for _, asking in self._pods.values()), *self._stack_reads.values()):
            if task is not None:
                task.cancel()

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The stream of events."""
        if self.feed.viewers >= MAX_VIEWERS:
            return error_response(503, f"{MAX_VIEWERS} pages are open already. FIX: close one")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        with self.feed.viewing():
            await stream.prepare(request)
            place = {"context": self.place.context.name, "namespace": self.place.namespace}
            hello = {**place, "token": self.token, **self.hello}
            await stream.write(f"retry: {RETRY_MS}\n".encode() + event("hello", hello))
            seen = ViewerState(self._version(request.headers.get("Last-Event-ID", "")))
            while not (self._ending.is_set() or self.is_over()):
                await stream.write(b"".join(self._pending_events(seen)) or event("alive", {}))
                await self._wait()
        return stream

    def _pending_events(self, seen: ViewerState) -> Iterator[bytes]:
        """Yield what is new for this browser, and note it as sent."""
        feed = self.feed
        if feed.trouble != seen.trouble:
            seen.trouble = feed.trouble
            yield event("trouble", {"message": feed.trouble}) if feed.trouble else event("well", {})
        if feed.polled and seen.version != feed.rows.version:
            update = feed.rows.since(seen.version)
            seen.version = update.version
            data = {"whole": update.whole, "rows": update.rows, "gone": update.gone, "now": time.time()}
            yield event("jobs", data, f"{self._life}.{seen.version}")
        if feed.projects is not None and feed.projects is not seen.projects:
            seen.projects = feed.projects
            yield event("projects", feed.projects)

    async def _wait(self) -> None:
        """Wait for a change, for the end, or until the next `alive` is due."""
        waits = [asyncio.ensure_future(wait) for wait in (self.feed.wait_for_change(HEARTBEAT_S), self._ending.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _version(self, event_id: str) -> int | None:
        """The version that a browser has seen; None for none, or one of an earlier run."""
        life, _, number = event_id.partition(".")
        is_number = number.isascii() and number.isdigit() and len(number) < 16
        return int(number) if life == self._life and is_number else None

    async def details(self, request: web.Request) -> web.Response:
        """Everything about one job."""
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

    async def compare(self, request: web.Request) -> web.Response:
        """How another job differs."""
        namespace, _, name = request.query.get("with", "").partition("/")
        other = self.feed.job((namespace, name))
        if other is None:
            raise NotFoundError(f"the job {name} no longer exists")
        jobs = self._job(request), other

        def answer() -> dict[str, Any]:
            return _comparison_data(compare(jobs, self._run_metrics, time.time()))

        async with self._calls:
            return web.json_response(await run_in_thread(answer))

    async def metrics(self, request: web.Request) -> web.Response:
        """Curves."""
        job, view = self._job(request), View.parse(request.query, request.query.getall("m", []))
        async with self._calls:
            return web.json_response(await run_in_thread(lambda: self._run_metrics.answer(job, view)))

    async def logs(self, request: web.Request) -> web.Response:
        """A page of lines."""
        job, page = self._job(request), Page.parse(request.query)
        async with self._calls:
            return web.json_response(await run_in_thread(lambda: page.read(self.place.cluster, job)))

    async def stacks(self, request: web.Request) -> web.Response:
        """The stacks of the ranks; concurrent requests share one reading of a job.

        A viewer that disconnects does not cancel it, since it could not be stopped.
        """
        job, access = self._job(request), self.place.access
        if access is None:
            raise NotFoundError("this dashboard cannot read stacks")
        looking = self._stack_reads.get(job.uid)
        if looking is None:
            looking = self._stack_reads[job.uid] = asyncio.create_task(self._read_stacks(access, job))
            looking.add_done_callback(lambda task: self._stacks_are_read(job.uid, task))
        return web.json_response(await asyncio.shield(looking))

    async def _read_stacks(self, access: Callable[[], WorkerAccess], job: ElasticJob) -> dict[str, Any]:
        async with self._calls:
            return await run_in_thread(lambda: _stacks_of(access(), self.place.cluster, job))

    def _stacks_are_read(self, uid: str, task: asyncio.Task[dict[str, Any]]) -> None:
        del self._stack_reads[uid]
        if not task.cancelled() and task.exception() is not None:  # the viewer may have left
            log.debug("stacks of %s: %s", uid, task.exception())

    async def table(self, request: web.Request) -> web.StreamResponse:
        """Every value of the metrics, as CSV."""
        job = self._job(request)
        async with self._calls:
            lines = await run_in_thread(lambda: self._run_metrics.table(job))
        name = f"attachment; filename*=UTF-8''{quote(job.name)}.csv"
        headers = {"Content-Type": "text/csv; charset=utf-8", "Content-Disposition": name}
        return web.Response(text="".join(lines), headers=headers)

    async def _pods_of(self, key: Key) -> Sequence[Manifest]:
        """A job's pods, listed once for all viewers of it; empty if the cluster refuses.

        A viewer that moves on to another job does not cancel the request, so that clicking around never has more
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

    async def change(self, request: web.Request) -> web.Response:
        """Change a job."""
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as e:
            raise UsageError("the request is not JSON") from e
        wish = ChangeRequest.parse(request.match_info["verb"], body)
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        if self.place.namespace not in (None, namespace):
            raise NotFoundError(f"this page shows only the namespace {self.place.namespace}")
        async with self._calls:
            await run_in_thread(
                lambda: apply_change(Target(self.place.context, namespace, self.place.cluster), name, wish)
            )
        self.feed.poll_now()
        return web.json_response({})


def _comparison_data(found: JobComparison) -> dict[str, Any]:
    code = found.code or CodeChanges()
    lines = [line[:MAX_LINE] for line in code.lines[:MAX_DIFF_LINES]]
    more, troubles = len(code.lines) - len(lines), [f"{name}: {trouble}" for name, trouble in found.troubles]
    return {"rows": found.rows, "code": code.words, "lines": lines, "more": more, "troubles": troubles}


def page_routes(base: str, api_of: Callable[[web.Request], Awaitable[UserApi]]) -> list[web.RouteDef]:
    """The page's requests below `base`, handled by the API of the requesting user."""

    def with_api(handle: Callable[[UserApi, web.Request], Awaitable[web.StreamResponse]]) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            api = await api_of(request)
            answer = await handle(api, request)
            if api.is_over() and not answer.prepared:
                raise web.HTTPUnauthorized(reason="this login has ended")
            return answer

        return handler

    job = base + "jobs/{namespace}/{name}"
    return [
        web.get(base + "events", with_api(UserApi.events), allow_head=False),
        web.get(job, with_api(UserApi.details)),
        web.get(job + "/compare", with_api(UserApi.compare)),
        web.get(job + "/logs", with_api(UserApi.logs)),
        web.get(job + "/metrics", with_api(UserApi.metrics)),
        web.get(job + "/metrics.csv", with_api(UserApi.table)),
        web.post(job + "/stacks", with_api(UserApi.stacks)),
        web.post(job + "/{verb}", with_api(UserApi.change)),
    ]


async def respond(handler: Handler, request: web.Request) -> web.StreamResponse:
    """The answer of a handler; an error becomes JSON."""
    try:
        return await handler(request)
    except web.HTTPException as e:
        return error_response(e.status, e.reason)
    except ElasticctlError as e:
        return error_response(next((status for kind, status in _STATUSES.items() if isinstance(e, kind)), 502), str(e))


def error_response(status: int, message: str) -> web.Response:
    """An error answer of one line."""
    return web.json_response({"error": message}, status=status)


def event(name: str, data: Mapping[str, Any], event_id: str = "") -> bytes:
    """One server-sent event; JSON has no newlines of its own."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def _stacks_of(access: WorkerAccess, cluster: Cluster, job: ElasticJob) -> dict[str, Any]:
    """The stacks of all ranks as lines, with the reasons for those that could not be read. Blocks.

    Raises UsageError or ConflictError if no rank can be examined, and ClusterError.
    """
    workers = [pod for pod in cluster.pods_of([job])[job.uid] if runs(pod)]
    if not workers:
        raise ConflictError(f"no worker of {job.name} is running")
    seen = read_stacks(access, job, workers)
    lines = [line for one in seen for line in one.lines()]
    troubles = [f"{one.worker}: {one.trouble}" for one in seen if one.trouble]
    return {"lines": lines[:MAX_STACK_LINES], "more": max(0, len(lines) - MAX_STACK_LINES), "troubles": troubles}
