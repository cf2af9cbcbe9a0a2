"""The rendezvous backend `elasticctl` for torch.distributed.elastic, and its client of the rendezvous service.

The launcher uses `ServiceRendezvous` directly, and stock `torchrun --rdzv-backend=elasticctl` through the entry point
group `torchrun.handlers`. The service decides who is in the group. The c10d store of a generation is a new TCPStore in
the agent of group rank 0, so it has no keys of an older generation, and no training process hosts it.

ServiceError
├── ServiceAway      no answer, or the service is in trouble (5xx, 429): worth another try
└── ServiceRefused   the service said no (4xx); another try gets the same answer
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elasticctl_store.storage.http import has_ended

RETRY_MIN_S, RETRY_MAX_S = 0.05, 2.0
POLL_TIMEOUT_S = 40.0
"""Longer than the service's own limit of a long poll (20 s), so that only a service that hangs exceeds it."""
JOIN_TIMEOUT_S = 600.0
UNKNOWN_JOB_S = 30.0
"""How long a refusal may mean that the service has just started and does not know its jobs yet."""
STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """This agent as the service knows it: the pod's uid and name, the host of its store, and its number of ranks."""

    uid: str
    name: str
    host: str
    slots: int


class ServiceRendezvous(RendezvousHandler):
    """A RendezvousHandler that leaves all decisions to the service.

    `on_stale(generation)` and `on_drain(generation)` are called from a thread when that generation is over, or is to
    drain. Without `on_drain` (stock torchrun) a generation that is to drain is over at once.
    """

    def __init__(self, client: ServiceClient, identity: WorkerIdentity, join_timeout_s: float = JOIN_TIMEOUT_S) -> None:
        self.client, self.identity = client, identity
        self.generation = 0
        self.stale = threading.Event()
        self.stale_reason = ""
        self.members: list[dict[str, Any]] = []
        self.on_stale: Callable[[int], None] | None = None
        self.on_drain: Callable[[int], None] | None = None
        self._join_timeout_s = join_timeout_s
        self._server: TCPStore | None = None
        self._watched = 0
        self._closed = False

    def get_backend(self) -> str:
        """The backend's name."""
        return "elasticctl"

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect to the agent's store as clients."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next generation; blocks until it has formed.

        Raises RendezvousTimeoutError, RendezvousConnectionError or RendezvousClosedError (the job is over, or this
        worker is no longer part of it).
        """
        self._watched = -1  # the watcher of the old generation is out of date
        server, port = _open_store(self.identity.host)
        world = self._join(port)
        self.members = world["members"]
        self.generation = world["generation"]
        rank = next(i for i, member in enumerate(self.members) if member["uid"] == self.identity.uid)
        first = self.members[0]
        if rank == 0:
            self._server = server
            store = server
        else:
            self._server = None
            del server
            try:
                store = TCPStore(first["host"], first["port"], is_master=False, timeout=STORE_TIMEOUT)
            except RuntimeError as error:
                raise RendezvousConnectionError(f"store of {first['name']}: {error}") from error
        self._watch()
        prefixed = PrefixStore(f"elasticctl/{self.generation}", store)
        bootstrap = RendezvousStoreInfo(first["host"], first["port"])
        return RendezvousInfo(prefixed, rank, len(self.members), bootstrap)

    def is_closed(self) -> bool:
        """True once the job is over for this agent."""
        return self._closed

    def set_closed(self) -> None:
        """Only for this agent: the service knows by itself when a job is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """1 while a newer generation is opening, else 0."""
        return int(self.stale.is_set())

    def get_run_id(self) -> str:
        """`namespace.job`: torch creates folders of that name."""
        return f"{self.client.namespace}.{self.client.job}"

    def shutdown(self) -> bool:
        """Stop watching."""
        self._watched = -1
        self.client.close()
        return True

    def _join(self, port: int) -> Mapping[str, Any]:
        body = {**asdict(self.identity), "port": port, "generation": self.generation}
        deadline = time.monotonic() + self._join_timeout_s
        refused_until = time.monotonic() + UNKNOWN_JOB_S
        while time.monotonic() < deadline:
            try:
                answer = self.client.call_until("join", body, deadline, POLL_TIMEOUT_S)
            except ServiceAway as error:
                raise RendezvousConnectionError(str(error)) from error
            except ServiceRefused as error:
                if error.status not in (409, 410) or time.monotonic() > refused_until:
                    raise RendezvousClosedError(str(error)) from error
                time.sleep(0.2)
                continue
            if answer.get("state") == "formed":
                return answer
        raise RendezvousTimeoutError(f"the group did not form within {self._join_timeout_s:.0f} s")

    def _watch(self) -> None:
        """Watch this generation in the background; sets `stale` when it is over."""
        self.stale.clear()
        generation = self._watched = self.generation
        body = {"uid": self.identity.uid, "generation": generation, "draining": False}

        def watch() -> None:
            while self._watched == generation:
                try:
                    answer = self.client.call("watch", body, POLL_TIMEOUT_S)
                except (ServiceAway, ServiceRefused):
                    time.sleep(RETRY_MAX_S)  # the service is away or starting: training continues without it
                    continue
                state = answer.get("state")
                body.pop("members", None)
                if state == "unknown":
                    body["members"] = self.members  # only then: some 100 bytes a member, from every agent
                if state in ("current", "unknown") or self._watched != generation:
                    continue
                self.stale_reason = str(answer.get("reason", ""))
                if state == "drain" and self.on_drain is not None:
                    body["draining"] = True
                    self.on_drain(generation)
                    continue
                self.stale.set()
                if self.on_stale is not None:
                    self.on_stale(generation)
                return

        threading.Thread(target=watch, name=f"watch-{generation}", daemon=True).start()


def create_handler(parameters: RendezvousParameters) -> ServiceRendezvous:
    """Create the handler for `torchrun --rdzv-backend=elasticctl --rdzv-endpoint=HOST:PORT --rdzv-id=NAMESPACE/JOB`.

    The environment that the controller gives every pod (`ELASTICCTL_*`) says which worker this is.
    """
    missing = [name for name in ("ELASTICCTL_POD_UID", "ELASTICCTL_RDZV_TOKEN_FILE") if not os.environ.get(name)]
    if missing:
        raise RendezvousConnectionError(f"{', '.join(missing)} not set: is this a worker of an elasticctl job?")
    return handler_from_environment(
        endpoint=parameters.endpoint,
        slots=int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("ELASTICCTL_RANKS_PER_WORKER") or 1),
        join_timeout_s=float(parameters.get("join_timeout", JOIN_TIMEOUT_S)),
    )


def handler_from_environment(
    endpoint: str, slots: int, join_timeout_s: float = JOIN_TIMEOUT_S, environ: Mapping[str, str] = os.environ
) -> ServiceRendezvous:
    """Create the handler of the worker that `environ` describes; raises KeyError for a missing variable."""
    client = ServiceClient(
        endpoint=endpoint or environ["ELASTICCTL_RDZV_ENDPOINT"],
        namespace=environ.get("ELASTICCTL_NAMESPACE", "default"),
        job=environ["ELASTICCTL_JOB"],
        token_file=environ["ELASTICCTL_RDZV_TOKEN_FILE"],
    )
    name = environ.get("ELASTICCTL_WORKER", socket.gethostname())
    host = environ.get("ELASTICCTL_POD_IP", "127.0.0.1")
    return ServiceRendezvous(client, WorkerIdentity(environ["ELASTICCTL_POD_UID"], name, host, slots), join_timeout_s)


def _open_store(host: str) -> tuple[TCPStore, int]:
    """Start a TCPStore server on a free port of `host` alone, not of every interface; return it and the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    return store, port


class ServiceError(Exception):
    """A request to the rendezvous service failed."""


class ServiceAway(ServiceError):
    """No usable answer; the service may be restarting."""


class ServiceRefused(ServiceError):
    """The service refused the request; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """Calls the service at `endpoint` (`host:port`, `http://host:port` or `unix:///path`) for one job.

    The bearer token is read from `token_file` at each request, so that a rotated one is picked up; it is never logged.
    It keeps connections open, since opening them was half of the service's work when a group re-forms. May be used from
    several threads at once.
    """

    endpoint: str
    namespace: str
    job: str
    token_file: str
    _idle: deque[http.client.HTTPConnection] = field(default_factory=deque, repr=False, compare=False)

    def call(self, verb: str, body: Mapping[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
        """Send one request; raises ServiceAway or ServiceRefused."""
        try:
            token = Path(self.token_file).read_text("ascii").strip()
        except OSError as error:
            raise ServiceRefused(0, f"cannot read the token file {self.token_file}: {error.strerror}") from error
        except UnicodeDecodeError:
            token = ""
        if not token or not token.isprintable():
            raise ServiceRefused(0, f"the token file {self.token_file} holds no token")
        path = f"/v1/jobs/{quote(self.namespace, safe='')}/{quote(self.job, safe='')}/{verb}"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection = self._connect(timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServiceAway(f"rendezvous service at {self.endpoint}: {error or type(error).__name__}") from error
        self._idle.append(connection)
        return self._read_answer(response.status, raw)

    def close(self) -> None:
        """Close the connections that are idle; the next call makes a new one."""
        while (connection := self._take_idle()) is not None:
            connection.close()

    def call_until(
        self, verb: str, body: Mapping[str, Any], deadline: float, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Like `call`, tried again while the service is away, until `deadline` (of time.monotonic)."""
        pause_s = RETRY_MIN_S
        while True:
            try:
                return self.call(verb, body, timeout_s)
            except ServiceAway:
                if time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 (jitter, not a secret)
            pause_s = min(RETRY_MAX_S, pause_s * 2)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """An idle connection that is still open, else a new one."""
        while (connection := self._take_idle()) is not None:
            if connection.sock is not None and not has_ended(connection.sock):
                connection.timeout = timeout_s
                connection.sock.settimeout(timeout_s)
                return connection
            connection.close()
        url = urlsplit(self.endpoint if "://" in self.endpoint else f"http://{self.endpoint}")
        if url.scheme == "unix":
            return _UnixConnection(url.path, timeout_s)
        if url.scheme != "http" or not url.hostname:
            raise ServiceRefused(0, f"rendezvous endpoint {self.endpoint!r}: expected host:port, http:// or unix://")
        return http.client.HTTPConnection(url.hostname, url.port or 80, timeout=timeout_s)

    def _take_idle(self) -> http.client.HTTPConnection | None:
        with suppress(IndexError):  # another thread may take the last one after a check
            return self._idle.pop()
        return None

    def _read_answer(self, status: int, raw: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if status == 200 and isinstance(answer, dict):
            return answer
        message = answer.get("error") if isinstance(answer, dict) else None
        if status >= 500 or status in (200, 429):
            raise ServiceAway(f"rendezvous service at {self.endpoint}: HTTP {status}")
        raise ServiceRefused(status, str(message or "refused"))
