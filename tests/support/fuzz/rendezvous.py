"""Bodies that workers send to the rendezvous service, with a valid token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeVar
from unittest import mock

from hypothesis import strategies as st
from yarl import URL

from elasticctl.api.codec import to_json
from elasticctl.api.status import JobStatus
from elasticctl_controller.rendezvous.requests import Bodies, Caller, parse_body
from elasticctl_controller.rendezvous.service import GroupView, RendezvousService
from tests.support.fuzz.inputs import as_json, changed, changed_bytes

T = TypeVar("T")
KEY, UID, ALIVE = "default/job", "job-uid", {"uid-a": "a", "uid-b": "b"}
_MEMBERS = [{"uid": uid, "name": name, "host": "10.0.0.1", "port": 29500, "slots": 2} for uid, name in ALIVE.items()]
_LIFE = {"uid": "uid-a", "generation": 1, "doing": "running", "since_s": 3.0}
PROGRESS = {
    "kind": "progress", "generation": 1, "step": 5, "total_steps": 9, "epoch": 0, "total_epochs": 1,
    "samples_per_s": 8.5, "metrics": {"loss": 0.5, "lost": {"value": "NaN", "since_step": 3}},
}  # fmt: skip
_COMMITTED = {"kind": "committed", "committed": 1, "url": "file:///a", "size_bytes": 1, "duration_s": 0.5}
BODIES: Mapping[str, Mapping[str, Any]] = {
    "join": {**_LIFE, **_MEMBERS[0], "prepared": False,
             "failed": {"generation": 1, "of_peers": False, "ended_s_ago": 1.5, "failure": {"error": "x"}}},
    "watch": {**_LIFE, "members": _MEMBERS, "draining": True,
              "failed": [{"generation": 0, "permanent": True, "ended_s_ago": 9.5, "failure": {"error": "x"}}]},
    "finish": _LIFE,
    "notice": {"uid": "uid-a", "reason": "spot", "stays": True, "in_s": 30.0},
    "leave": {"uid": "uid-a", "reason": "drained"},
    "fail": {**_LIFE, "failure": {"verdict": "application", "message": "x", "exit_code": 1, "last_lines": ["a"]},
             "ended_s_ago": 1.5, "of_peers": True, "permanent": True},
    "heartbeat": _LIFE,
    "report": {
        "messages": [
            PROGRESS,
            {**PROGRESS, **_COMMITTED},
            {**PROGRESS, "kind": "resumed", "source": "memory", "stays": True, "restarts_because": "x"},
            {**PROGRESS, "kind": "hang", "ranks": [{"rank": 0, "where": "train.py:3", "waits": True}]},
            {"kind": "waiting", "reason": "storage"},
        ]
    },
}  # fmt: skip
REQUESTS = st.one_of(
    *(
        st.tuples(st.just(verb), changed(body).map(as_json) | changed_bytes(as_json(body)))
        for verb, body in BODIES.items()
    )
)


class _InlineBodies(Bodies):
    """Parses bodies immediately, in this thread."""

    async def read(self, request: Any, caller: Caller, cls: type[T]) -> T:
        """The body as the service parses it."""
        return parse_body(cls, request.body)

    async def work(self, work: Any) -> Any:
        """Do it here."""
        return work()


def _request(verb: str, body: bytes) -> mock.NonCallableMock:
    path = f"/v1/jobs/{KEY}/{verb}"
    headers = {"Authorization": f"Bearer token-{UID}"}
    content = mock.NonCallableMock(**{"exception.return_value": None})
    return mock.NonCallableMock(
        path=path, rel_url=URL(path), headers=headers, method="POST", body=body, transport=None, content=content
    )


async def _ask(service: RendezvousService, verb: str, body: bytes) -> int | None:
    """The status of the answer; None for a request that waits, and is given up."""
    handle = next(iter(service.app().router.routes())).handler
    asked = asyncio.ensure_future(handle(_request(verb, body)))
    for _ in range(5):
        await asyncio.sleep(0)
    if asked.done():
        return asked.result().status  # type: ignore[no-any-return]
    asked.cancel()
    await asyncio.wait([asked])
    return None


async def _send(verb: str, body: bytes) -> tuple[int | None, GroupView]:
    service = RendezvousService(lambda uid, number: f"token-{uid}", lambda key: None)
    service.handlers.bodies = _InlineBodies()
    service.set_group(KEY, status=JobStatus(generation=1), job_uid=UID, alive=ALIVE, minimum=1)
    await _ask(service, "watch", as_json({"uid": "uid-b", "generation": 1, "members": _MEMBERS}))
    status, view = await _ask(service, verb, body), service.view(KEY, UID)
    assert await _ask(service, "heartbeat", as_json({**_LIFE, "uid": "uid-b"})) == 200
    return status, view


def send(verb: str, body: bytes) -> tuple[int | None, GroupView]:
    """The status of the answer to one request (None: it waits), and what the service knows then."""
    return _LOOP.run_until_complete(_send(verb, body))


def check_request(request: tuple[str, bytes]) -> None:
    """One request: answered in words, the status can still be stored, and the job's next worker is served."""
    status, view = send(*request)
    assert status in (None, 200, 400, 404, 409)
    known = [to_json(part) for part in (view.progress, view.checkpoint, view.activity, *view.generations) if part]
    json.dumps([known, view.growth], allow_nan=False, ensure_ascii=False).encode()  # what an API server can store


_LOOP = asyncio.new_event_loop()
