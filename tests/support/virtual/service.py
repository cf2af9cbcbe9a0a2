"""The controller's process in virtual time: the real rendezvous service and the real controller, which may crash.

What is not real: requests come without HTTP (`network`), the loop's thread and its work queue are timers, and calls to
the cluster are made one after the other. Long polls may be held without limit instead of being renewed every 20 s; the
signs of life of renewals and heartbeats are then computed on demand (`_LazySigns`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from yarl import URL

from elasticctl.api.errors import ConflictError, ElasticctlError
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.group.signs_of_life import Sign
from elasticctl_controller.loop import controller as loop_module
from elasticctl_controller.loop.apply_actions import Workload
from elasticctl_controller.loop.controller import Controller
from elasticctl_controller.rendezvous import groups as groups_module
from elasticctl_controller.rendezvous import service as service_module
from elasticctl_controller.rendezvous.fair_scheduling import Turns
from elasticctl_controller.rendezvous.requests import Bodies, Caller
from elasticctl_controller.rendezvous.service import RendezvousService
from elasticctl_protocol.requests import WIRE
from tests.support.virtual.clock import EPOCH, VirtualLoop, VirtualTime, WallClock

TOKEN = "token"
FOR_EVER_S = 1e9
REFRESH_S = 3600.0
"""How often the simulated watch's resync reconciles a job at least."""

T = TypeVar("T")


class Inline:
    """Stands in for the thread pool of the controller's loop: every call is made immediately."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args))
        except ElasticctlError as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Nothing runs."""


@contextmanager
def without_threads(loop: VirtualLoop, poll_s: float) -> Iterator[None]:
    """The service's and the loop's modules on virtual time; long polls are held for `poll_s`."""
    with (
        mock.patch.object(service_module, "time", VirtualTime(loop)),
        mock.patch.object(groups_module, "time", VirtualTime(loop)),
        mock.patch.object(groups_module, "POLL_S", poll_s),
        mock.patch.object(Bodies, "read", _read_body),
        mock.patch.object(loop_module, "ThreadPoolExecutor", Inline),
    ):
        yield


class Timers:
    """Stands in for the controller's work queue: `work(key)` is called when a key is due."""

    def __init__(self, loop: VirtualLoop, work: Callable[[str], None]) -> None:
        self._loop, self._work = loop, work
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}

    def add(self, key: str) -> None:
        self.add_after(key, 0.0)

    def add_after(self, key: str, delay_s: float) -> None:
        known, when = self._due.get(key), self._loop.time() + delay_s
        if known is not None and known.when() <= when:
            return
        if known is not None:
            known.cancel()
        self._due[key] = self._loop.at(when, self._run, key)

    def retry(self, key: str) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self.add_after(key, min(0.05 * 2.0**failures, 60.0))

    def reset_failures(self, key: str) -> None:
        self._failures.pop(key, None)

    def close(self) -> None:
        for timer in self._due.values():
            timer.cancel()
        self._due.clear()

    def _run(self, key: str) -> None:
        del self._due[key]
        self._work(key)


class _Connection:
    """The connection of a request, which holds until `ControlPlane.lose_host`."""

    def exception(self) -> None:
        return None


class _Request:
    """What the service reads of an aiohttp request."""

    transport = None
    content = _Connection()
    method = "POST"

    def __init__(self, key: str, verb: str, body: Mapping[str, Any], token: str) -> None:
        self.path = f"/v1/jobs/{key}/{verb}"
        self.rel_url = URL(self.path)
        self.headers = {"Authorization": f"Bearer {token}"}
        self.body = body


async def _read_body(_: Bodies, request: _Request, caller: Caller, cls: type[T]) -> T:
    """Stands in for `Bodies.read`: there are no bytes."""
    return WIRE.decode(cls, request.body)


class _LazySigns(dict[str, Sign]):
    """The signs of life of a group, with those that renewed polls and heartbeats have given since."""

    def __init__(self, signs: Mapping[str, Sign], heard_at: Callable[[str], float | None]) -> None:
        super().__init__(signs)
        self._heard_at = heard_at

    def __getitem__(self, uid: str) -> Sign:
        sign, at = super().get(uid), self._heard_at(uid)
        if at is None or (sign is not None and at <= sign.at):
            return super().__getitem__(uid)
        return Sign(at, sign.doing, sign.since) if sign else Sign(at)

    def __contains__(self, uid: object) -> bool:
        return super().__contains__(uid) or self._heard_at(str(uid)) is not None

    def get(self, uid: str, default: Any = None) -> Any:
        return self[uid] if uid in self else default  # noqa: SIM401 - that would be this method


class ControlPlane:
    """The process that holds the service and the controller. `clock` is its machine's.

    `heard_at(uid)` is when a worker's launcher last gave a sign of life, in seconds since the scenario began. A request
    is answered with (status, answer), or with None when the process dies before.
    """

    def __init__(
        self, loop: VirtualLoop, workload: Workload, clock: WallClock, heard_at: Callable[[str, float], float | None]
    ) -> None:
        self._loop, self._workload, self.clock, self._heard_at = loop, workload, clock, heard_at
        self.on_start: list[Callable[[], None]] = []
        self.service: RendezvousService | None = None
        self.controller: Controller | None = None
        self.starts = 0
        self.requests = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._queue: Timers | None = None

    @property
    def is_up(self) -> bool:
        return self.service is not None

    def start(self, keys: list[str]) -> None:
        """Start the process, which knows only what is stored."""
        self.starts += 1
        offset_s, self._began = self.clock.offset_s, self._loop.time()
        steady = lambda: EPOCH + offset_s + self._loop.time()  # noqa: E731
        self._steady_offset_s = EPOCH + offset_s
        queue = self._queue = Timers(self._loop, self._sync)
        changed = lambda key: queue.add_after(key, loop_module.PROGRESS_SETTLE_S)  # noqa: E731
        service = self.service = RendezvousService(
            lambda uid, number: TOKEN + uid, changed, steady, find_job=self._workload.get_job
        )
        service.groups.turns = Turns(lambda: 0.0)  # by how much is to be done, not by how long it really takes
        app = service.app()
        self._handle = next(iter(app.router.routes())).handler
        app.freeze()
        self._tasks = {self._loop.create_task(app.startup()): None}
        self.controller = Controller(self._workload, service, self.clock, queue)  # type: ignore[arg-type]
        for key in keys:
            queue.add(key)
        for call in self.on_start:
            call()

    def crash(self) -> None:
        """End the process: only what it has stored is left, and open requests are never answered."""
        for task in list(self._tasks):
            task.cancel()
        if self._queue is not None:
            self._queue.close()
        self.service = self.controller = None

    def enqueue(self, key: str) -> None:
        """Something that the process watches has changed."""
        if self._queue is not None and self.is_up:
            self._queue.add(key)

    def request(self, key: str, verb: str, body: Mapping[str, Any], job_uid: str) -> asyncio.Task[tuple[int, str]]:
        """Begin to answer a request."""
        self.requests += 1
        task = self._loop.create_task(self._answer(_Request(key, verb, body, TOKEN + job_uid)))
        self._tasks[task] = None
        task.add_done_callback(lambda task: self._tasks.pop(task, None))
        return task

    def lose_host(self, key: str, uid: str, *, hung_up: bool = False) -> None:
        """The kernel finds that the host of a worker does not answer, or has closed its connection."""
        if self.service is not None:
            self.service.lose_contact(key, uid, hung_up=hung_up)

    def group(self, key: str) -> Group | None:
        """The group of a job, as the service has it."""
        return None if self.service is None else self.service.groups.by_key.get(key)

    async def _answer(self, request: _Request) -> tuple[int, str]:
        response = await self._handle(request)  # type: ignore[arg-type]
        return response.status, response.text  # type: ignore[attr-defined]

    def _sync(self, key: str) -> None:
        if self.controller is None or self._queue is None:
            return
        try:
            self.controller.sync(key)
        except (ConflictError, ElasticctlError):
            self._queue.retry(key)
        else:
            self._queue.reset_failures(key)
            self._queue.add_after(key, REFRESH_S)
        group = self.group(key)
        if group is not None and not isinstance(group.signs.newest, _LazySigns):
            group.signs.newest = _LazySigns(group.signs.newest, self._heard)

    def _heard(self, uid: str) -> float | None:
        at = self._heard_at(uid, self._began)
        return None if at is None else at + self._steady_offset_s
