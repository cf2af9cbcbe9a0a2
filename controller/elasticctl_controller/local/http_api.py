"""The supervisor's HTTP interface on its private socket: Kubernetes-like paths, JSON, one line per error.

    GET    /v1/info                                       the supervisor's process and version, this machine's GPUs
    POST   /v1/shutdown                                   {"workers": "stop" | "keep"}
    GET    /v1/jobs                                       jobs of all namespaces
    GET    /v1/namespaces/{namespace}/jobs                jobs of one namespace
    POST   /v1/namespaces/{namespace}/jobs[?dryRun=All]   create a job
    GET    …/jobs/{name}     PATCH (merge patch)     DELETE
    GET    …/jobs/{name}/pods     …/events     …/logs     (the list of log files, not their content)
    POST   /v1/namespaces/{namespace}/pods/{pod}/eviction     {"graceSeconds": 30}; 0: immediately
    GET    /v1/quotas     PUT, DELETE /v1/quotas/{project}
    GET    /v1/sharing    PUT                             {"on": true, "cpuSlots": 4}

An error is `{"error": kind, "message": one line, "path": field path or ""}`; the kinds are `ERRORS`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from elasticctl.api.codec import to_json
from elasticctl.api.errors import ClusterError, ConflictError, NotFoundError, SpecError, StorageFullError
from elasticctl.api.objects import check_label
from elasticctl.api.quota import KIND as QUOTA
from elasticctl.api.quota import Quota, check_quota, refuse_over_limit
from elasticctl.api.spec import ElasticJob
from elasticctl.api.validation import check_change
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.capacity import SHARING_KIND as SHARING
from elasticctl.cluster.local.capacity import LocalSharing, check_sharing
from elasticctl_controller.local.command import gpus_requested
from elasticctl_controller.local.objects import check_job, has_ended
from elasticctl_controller.local.store import LocalStore

MAX_BODY_BYTES = 4 << 20
MAX_GRACE_S = 86_400.0

ERRORS: Mapping[str, tuple[type[Exception], int]] = {
    "invalid": (SpecError, 400),
    "notFound": (NotFoundError, 404),
    "conflict": (ConflictError, 409),
    "full": (StorageFullError, 507),
    "failed": (ClusterError, 500),
}
"""Kind of error on the wire -> our error and its HTTP status; the first match counts."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SupervisorApi:
    """The handlers. `info` is served as it is; `shut_down(stop_workers)` returns before the supervisor has ended."""

    store: LocalStore
    info: Mapping[str, Any]
    gpus: tuple[str, ...]
    shut_down: Callable[[bool], None]

    def app(self) -> web.Application:
        """Return the aiohttp application. It does not authenticate its callers: serve it on a private socket."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_answer_errors])
        job = "/v1/namespaces/{namespace}/jobs/{name}"
        app.add_routes(
            [
                web.get("/v1/info", self._info),
                web.post("/v1/shutdown", self._shutdown),
                web.get("/v1/jobs", self._list_jobs),
                web.get("/v1/namespaces/{namespace}/jobs", self._list_jobs),
                web.post("/v1/namespaces/{namespace}/jobs", self._create_job),
                web.get(job, self._get_job),
                web.patch(job, self._patch_job),
                web.delete(job, self._delete_job),
                web.get(job + "/pods", self._pods),
                web.get(job + "/events", self._events),
                web.get(job + "/logs", self._logs),
                web.post("/v1/namespaces/{namespace}/pods/{pod}/eviction", self._evict),
                web.get("/v1/quotas", self._list_quotas),
                web.put("/v1/quotas/{project}", self._put_quota),
                web.delete("/v1/quotas/{project}", self._delete_quota),
                web.get("/v1/sharing", self._get_sharing),
                web.put("/v1/sharing", self._put_sharing),
            ]
        )
        return app

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(dict(self.info))

    async def _shutdown(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if body.get("workers") not in ("stop", "keep"):
            raise SpecError('must be "stop" or "keep"', path="workers")
        self.shut_down(body["workers"] == "stop")
        return web.json_response({}, status=202)

    async def _list_jobs(self, request: web.Request) -> web.Response:
        namespace = request.match_info.get("namespace")
        return _items(await asyncio.to_thread(self.store.list_jobs, namespace))

    async def _create_job(self, request: web.Request) -> web.Response:
        manifest = check_job(await _body(request))
        manifest["metadata"].setdefault("namespace", request.match_info["namespace"])
        if manifest["metadata"]["namespace"] != request.match_info["namespace"]:
            raise SpecError("is not the namespace of the request", path="metadata.namespace")
        self._check_fits(manifest)
        await asyncio.to_thread(self._check_allowed, manifest)
        dry_run = "dryRun" in request.query
        job = await asyncio.to_thread(self.store.create_job, manifest, dry_run=dry_run)
        return web.json_response(job, status=201)

    def _check_allowed(self, manifest: Manifest) -> None:
        quotas = map(Quota.from_manifest, self.store.list_objects(QUOTA))
        refuse_over_limit(manifest, next((q for q in quotas if q.project == manifest["metadata"]["namespace"]), None))

    async def _get_job(self, request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(self.store.get_job, *_job(request)))

    async def _patch_job(self, request: web.Request) -> web.Response:
        patch = await _body(request)

        def check(stored: Manifest, result: Manifest) -> None:
            check_change(stored, check_job(result))
            self._check_fits(result)

        return web.json_response(await asyncio.to_thread(self.store.patch_job, *_job(request), patch, check))

    async def _delete_job(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self.store.delete_job, *_job(request))
        return web.json_response({})

    async def _pods(self, request: web.Request) -> web.Response:
        job = await asyncio.to_thread(self.store.get_job, *_job(request))
        found = await asyncio.to_thread(self.store.incarnations, job["metadata"]["uid"])
        return _items([item.pod for item in found if item.pod is not None])

    async def _evict(self, request: web.Request) -> web.Response:
        grace_s = (await _body(request)).get("graceSeconds")
        if not isinstance(grace_s, int | float) or isinstance(grace_s, bool) or not 0 <= grace_s <= MAX_GRACE_S:
            raise SpecError(f"must be a number of seconds from 0 to {MAX_GRACE_S:.0f}", path="graceSeconds")
        namespace, name = request.match_info["namespace"], request.match_info["pod"]
        pod = await asyncio.to_thread(self.store.get_pod, namespace, name)
        if has_ended(pod):
            raise ConflictError(f"worker {name} has ended")
        evict = self.store.evict_pod if grace_s > 0 else self.store.delete_pod
        await asyncio.to_thread(evict, pod["metadata"]["uid"], grace_s=float(grace_s))
        return web.json_response({})

    async def _list_quotas(self, _: web.Request) -> web.Response:
        return _items(await asyncio.to_thread(self.store.list_objects, QUOTA))

    async def _put_quota(self, request: web.Request) -> web.Response:
        quota = check_quota(await _body(request))
        check_label(quota.project, "metadata.name", 63)
        if quota.project != request.match_info["project"]:
            raise SpecError("is not the project of the request", path="metadata.name")
        return web.json_response(await asyncio.to_thread(self.store.put_object, quota.to_manifest()))

    async def _delete_quota(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self.store.delete_object, QUOTA, request.match_info["project"])
        return web.json_response({})

    async def _get_sharing(self, _: web.Request) -> web.Response:
        found = await asyncio.to_thread(self.store.list_objects, SHARING)
        return web.json_response(to_json(LocalSharing.from_manifest(next(iter(found), None))))

    async def _put_sharing(self, request: web.Request) -> web.Response:
        wanted = check_sharing(await _body(request))
        await asyncio.to_thread(self.store.put_object, wanted.to_manifest())
        return web.json_response(to_json(wanted))

    async def _events(self, request: web.Request) -> web.Response:
        job = await asyncio.to_thread(self.store.get_job, *_job(request))
        return _items(await asyncio.to_thread(self.store.list_events, job["metadata"]["uid"]))

    async def _logs(self, request: web.Request) -> web.Response:
        manifest = await asyncio.to_thread(self.store.get_job, *_job(request))
        found = await asyncio.to_thread(self.store.incarnations, manifest["metadata"]["uid"])
        job = ElasticJob.from_manifest(manifest)
        files = [
            {"worker": item.worker, "uid": item.uid, "ended": item.pod is None or has_ended(item.pod)} for item in found
        ]
        return web.json_response({"jobUid": job.uid, "finished": job.status.phase.terminal, "files": files})

    def _check_fits(self, manifest: Manifest) -> None:
        """Refuse a job that needs more GPUs than this machine has, as it would wait forever. Raises SpecError."""
        job = ElasticJob.from_manifest(manifest)
        spec = job.template.get("spec")
        each = gpus_requested(spec) if isinstance(spec, dict) else 0
        needed = max(1, job.min) if job.sharing.automatic else job.desired
        if needed * each > len(self.gpus):
            raise SpecError(
                f"{needed} workers x {each} GPUs are requested, and this machine has {len(self.gpus)}. FIX: request"
                " fewer, or use the context of a cluster that has them",
                path="spec.replicaSpecs.Worker.replicas",
            )


def _job(request: web.Request) -> tuple[str, str]:
    return request.match_info["namespace"], request.match_info["name"]


def _items(items: list[Manifest]) -> web.Response:
    return web.json_response({"items": items})


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as e:
        raise SpecError("the request is not JSON") from e
    if not isinstance(body, dict):
        raise SpecError(f"must be a JSON object, not {type(body).__name__}")
    return body


@web.middleware
async def _answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception as e:  # the edge of a request: every error becomes an answer
        for kind, (error, status) in ERRORS.items():
            if isinstance(e, error):
                path = e.path if isinstance(e, SpecError) else ""
                return web.json_response({"error": kind, "message": _message_of(e), "path": path}, status=status)
        log.exception("%s %s failed", request.method, request.path)
        message = f"the supervisor failed ({type(e).__name__}). Next: see its log"
        return web.json_response({"error": "failed", "message": message, "path": ""}, status=500)


def _message_of(error: Exception) -> str:
    """The message without the field path in front, which is sent separately."""
    text = str(error)
    return text.removeprefix(f"{error.path}: ") if isinstance(error, SpecError) else text
