"""The rendezvous backend `elasticctl` for torch.distributed.elastic.

The launcher uses `ServiceRendezvous` directly, and stock `torchrun --rdzv-backend=elasticctl` through the entry point
group `torchrun.handlers`. The service decides who is in the group. The c10d store of a generation is a new TCPStore in
the agent of group rank 0, so it has no keys of an older generation, and no training process hosts it.

Nothing here gives up on a platform that is away. Only an answer of the service ends a wait, a limit that the user has
set, or SIGTERM.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elasticctl_launcher.service.client import (
    POLL_TIMEOUT_S,
    Backoff,
    Poll,
    ServiceAway,
    ServiceClient,
    ServiceRefused,
    client_from_environment,
)
from elasticctl_launcher.service.heartbeat import Doing, Heartbeat
from elasticctl_launcher.store_connection import connect_to_store

NOT_A_MEMBER, JOB_OVER = 409, 410
UNKNOWN_JOB_S = 30.0
"""How long a service that has just started may not know its jobs and their workers yet."""
STORE_TIMEOUT = timedelta(seconds=60)
"""Of single operations on a store that has answered before; the launcher makes none while ranks run."""
USE_LIBUV = torch.__version__ >= "2.8"
"""That of torch 2.6 refuses a socket that listens already; the store from before libuv takes one."""

log = logging.getLogger(__name__)


class GroupFinished(RendezvousGracefulExitError):
    """The ranks of all members have succeeded: there will be no further generation."""


class RanksWanted(RendezvousGracefulExitError):
    """The group, of so many `others`, does not wait for this worker: it is to start its ranks, and join then."""

    def __init__(self, others: int) -> None:
        super().__init__("the ranks of this worker have to be started first")
        self.others = others


class WorkerRemoved(RendezvousClosedError):
    """The job is over, or this worker is no longer part of it. That is nobody's failure."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """This agent as the service knows it: the pod's uid and name, the host of its store, and its number of ranks."""

    uid: str
    name: str
    host: str
    slots: int


class ServiceRendezvous(RendezvousHandler):
    """A RendezvousHandler that leaves all decisions to the service.

    `failed()` are the reports of failures after which this worker was told to start again: a service that was
    restarted before it could store them would not know. `prepared`: this worker's ranks have been started
    already, or need not; a caller that sets it to False handles RanksWanted. `stays()`: those of its last
    generation can go on in their processes, and need no start. `serves_commands`: it has none, but runs what
    another worker tells it, so no change of the group stops anything.

    `join_timeout_s` limits the wait for a group; 0: none. `heartbeat`, if any, says what the launcher does.

    `on_stale(generation)` and `on_drain(generation)` are called from a thread when that generation is over, or is to
    drain, `on_leave(generation)` instead of the latter where this worker is not to join again. Without `on_drain`
    (stock torchrun) a generation that is to drain is over at once.
    """

    def __init__(
        self,
        client: ServiceClient,
        identity: WorkerIdentity,
        join_timeout_s: float = 0.0,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.client, self.identity, self.heartbeat = client, identity, heartbeat
        self.poll: Poll = heartbeat.poll if heartbeat else lambda verb, body: client.call(verb, body, POLL_TIMEOUT_S)
        self.generation = 0
        self.prepared = True
        self.failed: Callable[[], Sequence[Mapping[str, Any]]] = tuple
        self.serves_commands = False
        self.stays: Callable[[], bool] = lambda: False
        self.stale = threading.Event()
        self.stale_reason = ""
        self.members: list[dict[str, Any]] = []
        self.on_stale: Callable[[int], None] | None = None
        self.on_drain: Callable[[int], None] | None = None
        self.on_leave: Callable[[int], None] | None = None
        self._join_timeout_s = join_timeout_s
        self._server: TCPStore | None = None
        self._watched = 0
        self._is_known = False
        self._closed = False

    def get_backend(self) -> str:
        """The backend's name."""
        return "elasticctl"

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect to the agent's store as clients."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next generation; blocks until one has formed and its store can be reached.

        Raises RendezvousTimeoutError (the user's limit), GroupFinished, WorkerRemoved, or RendezvousClosedError (the
        service refuses this worker for another reason).
        """
        while True:
            server, port = _open_store(self.identity.host)
            self.join_group(port)
            rank = next(i for i, member in enumerate(self.members) if member["uid"] == self.identity.uid)
            first = self.members[0]
            self._server = server if rank == 0 else None
            store: Store | None = server
            if rank:
                del server
                store = connect_to_store(first["host"], first["port"], first["name"], STORE_TIMEOUT, self.stale)
            if store is not None:
                break
            log.info("generation %d is over (%s) before its store was reached", self.generation, self.stale_reason)
        prefixed = PrefixStore(f"elasticctl/{self.generation}", store)
        bootstrap = RendezvousStoreInfo(first["host"], first["port"])
        return RendezvousInfo(prefixed, rank, len(self.members), bootstrap)

    def join_group(self, port: int) -> None:
        """Join the next generation with something that listens at `port`, and watch it; blocks until one has formed.

        Raises as `next_rendezvous` does.
        """
        self._watched = -1  # the watcher of the old generation is out of date
        self._say(Doing.WAITING)
        world = self._join(port)
        self.members, self.generation = world["members"], world["generation"]
        self._say(Doing.STARTING)
        self._watch()

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

    def _say(self, doing: Doing) -> None:
        if self.heartbeat is not None:
            self.heartbeat.say(doing, self.generation)

    def _join(self, port: int) -> Mapping[str, Any]:
        stays = self.stays()  # a service that was restarted may not know
        body = {**asdict(self.identity), "port": port, "generation": self.generation}
        body |= {"prepared": self.prepared or stays, "stays": stays}
        body |= {"serves_commands": True} if self.serves_commands else {}
        deadline = time.monotonic() + (self._join_timeout_s or math.inf)
        refused_since: float | None = None
        backoff = Backoff()
        while time.monotonic() < deadline:
            try:
                answer = self.poll("join", {**body, "failed": self.failed()})
            except ServiceAway:
                time.sleep(backoff.next_s())
                continue
            except ServiceRefused as error:
                refused_since = refused_since or time.monotonic()
                if self._is_final(error, time.monotonic() - refused_since):
                    raise WorkerRemoved(str(error)) from error
                time.sleep(backoff.next_s())
                continue
            self._is_known, refused_since = True, None
            backoff.reset()
            if answer.get("state") == "over":
                raise GroupFinished("the ranks of all workers have succeeded")
            if answer.get("state") == "formed":
                return answer
            if answer.get("state") == "prepare":
                raise RanksWanted(int(answer["ranks"]))
        raise RendezvousTimeoutError(f"the group did not form within {self._join_timeout_s:.0f} s (--join-timeout)")

    def _is_final(self, refusal: ServiceRefused, refused_s: float) -> bool:
        """True if this worker, refused for `refused_s`, is no longer part of the job.

        A worker that the service has never known may be too new for it: the cluster ends it if nobody wants it. Raises
        RendezvousClosedError for a refusal that has nothing to do with that.
        """
        if refusal.status not in (NOT_A_MEMBER, JOB_OVER):
            raise RendezvousClosedError(str(refusal)) from refusal
        return refused_s > UNKNOWN_JOB_S and (self._is_known or refusal.status == JOB_OVER)

    def _watch(self) -> None:
        """Watch this generation in the background; sets `stale` when it is over."""
        self.stale.clear()
        generation = self._watched = self.generation
        body = {"uid": self.identity.uid, "generation": generation, "draining": False}

        def watch() -> None:
            backoff = Backoff()
            while self._watched == generation:
                try:
                    answer = self.poll("watch", body)
                except (ServiceAway, ServiceRefused):
                    time.sleep(backoff.next_s())  # the service is away or starting: training continues without it
                    continue
                backoff.reset()
                state = answer.get("state")
                for told in ("members", "failed"):
                    body.pop(told, None)
                if state == "unknown":
                    body["members"] = self.members  # only then: some 100 bytes a member, from every agent
                    body.update(stays=self.stays(), serves_commands=self.serves_commands, failed=self.failed())
                if state in ("current", "unknown") or self._watched != generation:
                    continue
                self.stale_reason = str(answer.get("reason", ""))
                if state == "drain" and self.on_drain is not None:
                    body["draining"] = True
                    leaves = answer.get("leave") is True
                    ((self.on_leave if leaves else None) or self.on_drain)(generation)
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
    slots = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("ELASTICCTL_RANKS_PER_WORKER") or 1)
    client = client_from_environment(parameters.endpoint)
    return handler_from_environment(client, slots, float(parameters.get("join_timeout", 0.0)))


def handler_from_environment(
    client: ServiceClient, slots: int, join_timeout_s: float = 0.0, heartbeat: Heartbeat | None = None
) -> ServiceRendezvous:
    """Create the handler of the worker that the environment describes; raises KeyError for a missing variable."""
    uid, name = os.environ["ELASTICCTL_POD_UID"], os.environ.get("ELASTICCTL_WORKER", socket.gethostname())
    identity = WorkerIdentity(uid, name, os.environ.get("ELASTICCTL_POD_IP", "127.0.0.1"), slots)
    return ServiceRendezvous(client, identity, join_timeout_s, heartbeat)


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
        use_libuv=USE_LIBUV,
    )
    return store, port
