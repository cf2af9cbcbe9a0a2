"""The rendezvous backend `elasticctl` for torch.distributed.elastic.

`torchrun --rdzv-backend=elasticctl` finds `create_handler` through the entry point group `torchrun.handlers`; our own
launcher uses the same handler. The service decides who is in the group; the c10d store of a generation is a fresh
TCPStore in the agent of group rank 0, so no key of an old generation can be met, and no training process hosts it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

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

from elasticctl_launcher.service_client import POLL_TIMEOUT_S, RETRY_MAX_S, ServiceAway, ServiceClient, ServiceRefused

JOIN_TIMEOUT_S = 600.0
UNKNOWN_JOB_S = 30.0
"""How long a refusal is taken for a service that has just started and does not know its jobs yet."""
STORE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """This agent as the service knows it: the pod's uid and name, the address its store is reached at, its ranks."""

    uid: str
    name: str
    host: str
    slots: int


class ServiceRendezvous(RendezvousHandler):
    """A RendezvousHandler whose decisions are the service's; see the module's docstring.

    `on_stale(generation)` and `on_drain(generation)` are called from a thread when that generation is over, or shall
    come to an end in order. Without `on_drain` (stock torchrun) a generation that drains is over at once.
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
        """Join the next generation; blocks until it is formed.

        Raises RendezvousTimeoutError, RendezvousConnectionError or RendezvousClosedError (the job is over, or this
        worker is no longer part of it).
        """
        self._watched = -1  # the watcher of the old generation is out of date
        server, port = _listen(self.identity.host)
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
                store = TCPStore(first["host"], first["port"], is_master=False, timeout=_delta(STORE_TIMEOUT_S))
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
        """Nothing to do for the others: the service knows by itself when a job is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """1 while a newer generation is opening, else 0."""
        return int(self.stale.is_set())

    def get_run_id(self) -> str:
        """`namespace.job`: torch makes folders of that name."""
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
                    time.sleep(RETRY_MAX_S)  # the service is away or starting: training goes on without it
                    continue
                state = answer.get("state")
                body.pop("members", None)
                if state == "unknown":
                    body["members"] = self.members  # only then: it is some 100 bytes a member, from every agent
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
    """Make the handler for `torchrun --rdzv-backend=elasticctl --rdzv-endpoint=HOST:PORT --rdzv-id=NAMESPACE/JOB`.

    Who this worker is comes from the environment that the controller gives every pod (`ELASTICCTL_*`).
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
    """Make the handler of the worker that `environ` describes; raises KeyError for a missing variable."""
    client = ServiceClient(
        endpoint=endpoint or environ["ELASTICCTL_RDZV_ENDPOINT"],
        namespace=environ.get("ELASTICCTL_NAMESPACE", "default"),
        job=environ["ELASTICCTL_JOB"],
        token_file=environ["ELASTICCTL_RDZV_TOKEN_FILE"],
    )
    name = environ.get("ELASTICCTL_WORKER", socket.gethostname())
    host = environ.get("ELASTICCTL_POD_IP", "127.0.0.1")
    return ServiceRendezvous(client, WorkerIdentity(environ["ELASTICCTL_POD_UID"], name, host, slots), join_timeout_s)


def _listen(host: str) -> tuple[TCPStore, int]:
    """A TCPStore server of our own on a free port of `host` alone, not of every interface."""
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
        timeout=_delta(STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    return store, port


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def backend() -> Callable[[Any], Any]:
    """Return the function that makes the handler from torch's RendezvousParameters."""

    def create(parameters: Any) -> Any:
        pass

        return create_handler(parameters)

    return create
