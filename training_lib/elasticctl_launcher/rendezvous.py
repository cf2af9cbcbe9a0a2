"""The rendezvous backend `elasticctl` for torch.distributed.elastic.

The launcher uses `ServiceRendezvous` directly; stock `torchrun --rdzv-backend=elasticctl` finds it through the entry
point group `torchrun.handlers`. The service decides who is in the group. Each generation has its own c10d store, a new
TCPStore in the agent of group rank 0. It therefore has no keys of an older generation, and it outlives the ranks.

The launcher waits without a limit while the service is away. A wait ends only with an answer of the service, a limit
that the user has set, or SIGTERM.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
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
    Poll,
    RetryPauses,
    ServiceAway,
    ServiceClient,
    ServiceRefused,
    client_from_environment,
)
from elasticctl_launcher.service.heartbeat import HeartbeatSender
from elasticctl_launcher.store_connection import connect_to_store
from elasticctl_launcher.system import start_thread
from elasticctl_protocol import variables
from elasticctl_protocol.requests import (
    WIRE,
    Doing,
    FailureReport,
    FormedAnswer,
    JoinAnswer,
    JoinRequest,
    JoinState,
    Member,
    Polled,
    PrepareAnswer,
    WatchAnswer,
    WatchRequest,
    WatchState,
)

NOT_A_MEMBER, JOB_OVER = 409, 410
UNKNOWN_JOB_S = 30.0
"""How long a service that has just started may not yet know its jobs and their workers."""
STORE_TIMEOUT = timedelta(seconds=60)
"""The timeout of a single operation on a store that has answered before. The launcher makes none while ranks run."""
USE_LIBUV = torch.__version__ >= "2.8"
"""torch's libuv store before 2.8 does not accept a socket that already listens; its older store does."""

log = logging.getLogger(__name__)


class GroupFinished(RendezvousGracefulExitError):
    """The ranks of all members have succeeded: there will be no further generation."""


class RanksWanted(RendezvousGracefulExitError):
    """The group does not wait for this worker, which must start its ranks before it joins.

    `others` is the number of ranks on the other workers, and `examples` what they call their model with, if known.
    """

    def __init__(self, others: int, examples: str = "") -> None:
        super().__init__("the ranks of this worker have to be started first")
        self.others, self.examples = others, examples


class WorkerRemoved(RendezvousClosedError):
    """The job is over, or this worker is no longer part of it. This does not count as a failure."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """This agent, as the service knows it: the pod's uid and name, the host of its store, and its number of ranks."""

    uid: str
    name: str
    host: str
    slots: int


class GroupChange(Enum):
    """What the service says of a generation."""

    OVER = "over"
    DRAIN = "drain"
    """It has to drain."""
    LEAVE = "leave"
    """It has to drain, and this worker is not to join again."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a worker says of itself when it joins.

    `prepared`: its ranks have been started already, or need not be; a worker that is not prepared has to handle
    RanksWanted. `stays`: the ranks of the last generation can continue in their processes. `serves_commands`: it has no
    ranks and runs commands of another worker, so a change of the group stops nothing here. `failed` are the failures
    after which it restarted.
    """

    prepared: bool = True
    stays: bool = False
    serves_commands: bool = False
    failed: tuple[FailureReport, ...] = ()


class ServiceRendezvous(RendezvousHandler):
    """A RendezvousHandler that leaves all decisions to the service.

    `join_timeout_s` limits the wait for a group in seconds; 0: no limit. `heartbeat`, if given, reports what the
    launcher does. `readiness()` is what the worker says of itself. `restarts_all`: in this generation, ranks that could
    stay in their processes start again, too.

    `on_change(generation, change)` is called from a thread. Without it (stock torchrun), a generation that has to drain
    is over immediately.
    """

    def __init__(
        self,
        client: ServiceClient,
        identity: WorkerIdentity,
        join_timeout_s: float = 0.0,
        heartbeat: HeartbeatSender | None = None,
        readiness: Callable[[], Readiness] = Readiness,
        on_change: Callable[[int, GroupChange], None] | None = None,
    ) -> None:
        self.client, self.identity, self.heartbeat = client, identity, heartbeat
        self.poll: Poll = heartbeat.poll if heartbeat else self._poll_alone
        self.generation = 0
        self.stale = threading.Event()
        self.stale_reason = ""
        self.members: tuple[Member, ...] = ()
        self.restarts_all = False
        self._readiness, self._on_change = readiness, on_change
        self._join_timeout_s = join_timeout_s
        self._server: TCPStore | None = None
        self._watched = 0
        self._is_known = False
        self._closed = False

    def _poll_alone(self, request: Polled) -> Mapping[str, Any]:
        return self.client.call(request.verb, WIRE.encode(request), POLL_TIMEOUT_S)

    def get_backend(self) -> str:
        """Return the backend's name."""
        return "elasticctl"

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks connect to the agent's store as clients."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next generation; block until it has formed and its store is connected.

        Raises RendezvousTimeoutError (the user's limit), GroupFinished, RanksWanted, WorkerRemoved,
        RendezvousClosedError (the service refuses this worker for another reason), or OSError (no port for the store).
        """
        while True:
            server, port = _open_store(self.identity.host)
            self.join_group(port)
            rank = next(i for i, member in enumerate(self.members) if member.uid == self.identity.uid)
            first = self.members[0]
            self._server = server if rank == 0 else None
            store: Store | None = server
            if rank:
                del server
                store = connect_to_store(first.host, first.port, first.name, STORE_TIMEOUT, self.stale)
            if store is not None:
                break
            log.info("generation %d is over (%s) before its store was reached", self.generation, self.stale_reason)
        prefixed = PrefixStore(f"elasticctl/{self.generation}", store)
        bootstrap = RendezvousStoreInfo(first.host, first.port)
        return RendezvousInfo(prefixed, rank, len(self.members), bootstrap)

    def join_group(self, port: int) -> None:
        """Join the next generation, with a server of this worker at `port`; block until it has formed, then watch it.

        Raises the same errors as `next_rendezvous`.
        """
        self._watched = -1  # stops the watcher of the old generation
        self._say(Doing.WAITING)
        formed = self._join(port)
        self.members, self.generation, self.restarts_all = formed.members, formed.generation, formed.anew
        self._say(Doing.STARTING)
        self._watch()

    def is_closed(self) -> bool:
        """True once the job is over for this agent."""
        return self._closed

    def set_closed(self) -> None:
        """Close the rendezvous for this agent only; the service itself knows when a job is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 1 once this generation is over, else 0."""
        return int(self.stale.is_set())

    def get_run_id(self) -> str:
        """Return `namespace.job`, which torch uses as the name of folders."""
        return f"{self.client.namespace}.{self.client.job}"

    def shutdown(self) -> bool:
        """Stop watching, and close idle connections to the service."""
        self._watched = -1
        self.client.close()
        return True

    def _say(self, doing: Doing) -> None:
        if self.heartbeat is not None:
            self.heartbeat.say(doing, self.generation)

    def _join(self, port: int) -> FormedAnswer:
        deadline = time.monotonic() + (self._join_timeout_s or math.inf)
        stays = self._readiness().stays  # a restarted service does not know this
        refused_since: float | None = None
        backoff = RetryPauses()
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                answer = self.poll(self._join_request(port, left_s, stays=stays))
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
            match WIRE.decode(JoinAnswer, answer).state:
                case JoinState.OVER:
                    raise GroupFinished("the ranks of all workers have succeeded")
                case JoinState.FORMED:
                    return WIRE.decode(FormedAnswer, answer)
                case JoinState.PREPARE:
                    wanted = WIRE.decode(PrepareAnswer, answer)
                    raise RanksWanted(wanted.ranks, wanted.examples)
        raise RendezvousTimeoutError(f"the group did not form within {self._join_timeout_s:.0f} s (--join-timeout)")

    def _join_request(self, port: int, left_s: float, *, stays: bool) -> JoinRequest:
        readiness, worker = self._readiness(), self.identity
        return JoinRequest(
            uid=worker.uid,
            name=worker.name,
            host=worker.host,
            slots=worker.slots,
            port=port,
            generation=self.generation,
            prepared=readiness.prepared or stays,
            stays=stays,
            serves_commands=readiness.serves_commands,
            within_s=left_s if self._join_timeout_s else None,
            failed=readiness.failed,
        )

    def _is_final(self, refusal: ServiceRefused, refused_s: float) -> bool:
        """True if this worker, which has been refused for `refused_s` seconds, is no longer part of the job.

        A worker that the service has never known may be too new for it; if it is not wanted, the cluster ends it.
        Raises RendezvousClosedError if the refusal has another reason.
        """
        if refusal.status not in (NOT_A_MEMBER, JOB_OVER):
            raise RendezvousClosedError(str(refusal)) from refusal
        return refused_s > UNKNOWN_JOB_S and (self._is_known or refusal.status == JOB_OVER)

    def _watch(self) -> None:
        """Watch this generation in the background; set `stale` when it is over."""
        self.stale.clear()
        generation = self._watched = self.generation
        plain = WatchRequest(uid=self.identity.uid, generation=generation)

        def watch() -> None:
            request, backoff = plain, RetryPauses()
            while self._watched == generation:
                try:
                    answer = WIRE.decode(WatchAnswer, self.poll(request))
                except (ServiceAway, ServiceRefused):
                    time.sleep(backoff.next_s())  # training continues while the service is away or starts
                    continue
                backoff.reset()
                request = replace(plain, draining=request.draining)
                if answer.state is WatchState.UNKNOWN:
                    request = self._with_group(request)
                if answer.state in (WatchState.CURRENT, WatchState.UNKNOWN) or self._watched != generation:
                    continue
                self.stale_reason = answer.reason
                if answer.state is WatchState.DRAIN and self._on_change is not None:
                    request = replace(request, draining=True)
                    self._on_change(generation, GroupChange.LEAVE if answer.leave else GroupChange.DRAIN)
                    continue
                self.stale.set()
                if self._on_change is not None:
                    self._on_change(generation, GroupChange.OVER)
                return

        start_thread(watch, name=f"watch-{generation}")

    def _with_group(self, request: WatchRequest) -> WatchRequest:
        """The request extended by what a restarted service does not know: about 100 bytes per member."""
        readiness = self._readiness()
        return replace(
            request,
            members=self.members,
            stays=readiness.stays,
            serves_commands=readiness.serves_commands,
            failed=readiness.failed,
        )


def create_handler(parameters: RendezvousParameters) -> ServiceRendezvous:
    """Create the handler for `torchrun --rdzv-backend=elasticctl --rdzv-endpoint=HOST:PORT --rdzv-id=NAMESPACE/JOB`.

    The `ELASTICCTL_*` variables, which the controller sets in every pod, identify the worker. Raises
    RendezvousConnectionError if one is missing.
    """
    missing = [name for name in (variables.POD_UID, variables.TOKEN_FILE) if not os.environ.get(name)]
    if missing:
        raise RendezvousConnectionError(f"{', '.join(missing)} not set: is this a worker of an elasticctl job?")
    slots = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get(variables.RANKS_PER_WORKER) or 1)
    client = client_from_environment(parameters.endpoint)
    return handler_from_environment(client, slots, float(parameters.get("join_timeout", 0.0)))


def handler_from_environment(
    client: ServiceClient,
    slots: int,
    join_timeout_s: float = 0.0,
    heartbeat: HeartbeatSender | None = None,
    readiness: Callable[[], Readiness] = Readiness,
    on_change: Callable[[int, GroupChange], None] | None = None,
) -> ServiceRendezvous:
    """Create the handler for the worker that the environment describes. Raises KeyError for a missing variable."""
    uid, name = os.environ[variables.POD_UID], os.environ.get(variables.WORKER, socket.gethostname())
    identity = WorkerIdentity(uid, name, os.environ.get(variables.POD_IP, "127.0.0.1"), slots)
    return ServiceRendezvous(client, identity, join_timeout_s, heartbeat, readiness, on_change)


Connect = Callable[[Callable[[], Readiness], Callable[[int, GroupChange], None]], ServiceRendezvous]
"""`connect(readiness, on_change)` creates the handler of this worker; see `ServiceRendezvous`."""


def _open_store(host: str) -> tuple[TCPStore, int]:
    """Start a TCPStore server on a free port of `host` only, not of all interfaces; return the store and its port."""
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
