"""The controller on Kubernetes: the process of its Deployment.

    python -m elasticctl_controller.kube.manager --rendezvous-url
    http://elasticctl-rendezvous.elasticctl-system.svc:7777

All replicas watch. One leads: only the leader runs the loop, writes, and opens the rendezvous port. A Service finds it
by a label on its pod. A leader that cannot renew its Lease does nothing until it can; a leader whose Lease another has
taken exits. It can be killed at any point, and the next leader continues: all state is in the API server, and workers
do not need a controller to run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pythonjsonlogger.json import JsonFormatter

import elasticctl
from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.api.errors import ClusterError, ElasticctlError
from elasticctl.api.spec import ElasticJob
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import Connection, connect, in_cluster
from elasticctl.kubeapi.features import Feature
from elasticctl.kubeapi.watch import Reflector, object_key
from elasticctl_controller.core.group.worker_tokens import derive_token
from elasticctl_controller.core.manifests import (
    build_budget,
    harden,
)
from elasticctl_controller.core.sharing.claims import SharingRules
from elasticctl_controller.kube.election import Election, LeaderLabel, LeaseCandidate
from elasticctl_controller.kube.event_recorder import kube_webhook_urls, no_webhook_urls
from elasticctl_controller.kube.flags import Flags, parse_flags
from elasticctl_controller.kube.gangs import Gangs, join_gang
from elasticctl_controller.kube.kueue import KueueObjects, KueueQueueing, NoQueueing
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.metrics import CONTENT_TYPE, ControllerMetrics
from elasticctl_controller.kube.owned_objects import (
    ObjectBuilders,
    OwnedObjects,
    build_companions,
    build_current_token,
    build_named_group,
)
from elasticctl_controller.kube.projects import KubeCapacity, KubeQuotas, Spending, jobs_of
from elasticctl_controller.kube.workload import KubeWorkload, Settings
from elasticctl_controller.loop.allocator import Allocator, SharingSettings
from elasticctl_controller.loop.controller import Controller, Listeners, Scheduling
from elasticctl_controller.loop.notifier import Notifier, Outbox, report_as_events
from elasticctl_controller.loop.project_limits import ProjectLimits
from elasticctl_controller.loop.webhooks import WebhookRules
from elasticctl_controller.loop.workqueue import WorkQueue
from elasticctl_controller.rendezvous.listener import Listener, response
from elasticctl_controller.rendezvous.service import RendezvousService
from elasticctl_controller.rendezvous.sockets import explain_exhaustion, raise_file_limit

EXIT_LEASE_LOST = 1
SYNC_POLL_S = 0.05
PORT_PATIENCE_S, PORT_RETRY_S = 20.0, 0.5
"""How long a new leader waits for its port: on the host's network, the last leader may not have exited yet."""
UNHEARD_S = 3.0
"""After this time without the Lease, a leader starts over with the groups like a new one: before workers whose calls it
refused in the meantime would count as silent."""
LOOPS, LOOPS_OF_ONE = 10, 8
"""How many jobs are reconciled at a time, and how many of them of one namespace. A pass mostly waits for the API
server; over thousands of workers, it does so for seconds."""
CONNECTIONS = 40
"""Enough for the requests of all passes, up to seven watches, the events and the lease."""


log = logging.getLogger(__name__)


class ManagedPart(Protocol):
    """A part of the process with threads of its own. One that was never started can be stopped."""

    def start(self) -> None:
        """Start the threads."""

    def stop(self) -> None:
        """End the threads."""

    @property
    def alive(self) -> bool:
        """True from `start` to `stop`, unless a thread has died, which is an error."""


class Manager:
    """The parts that run in the process. They start in the order of `_parts`, and stop in reverse.

    All replicas watch. The parts that act start once this replica leads.
    """

    def __init__(self, flags: Flags, connection: Connection, key: bytes) -> None:
        self._flags, self._connection = flags, connection
        self._host = socket.gethostname()
        self._metrics, self._queue = ControllerMetrics(), WorkQueue(most_at_once=LOOPS_OF_ONE)
        candidate = LeaseCandidate(flags.leader_election_namespace, installation.LEASE, f"{self._host}_{uuid.uuid4()}")
        self._election = Election(
            connection,
            candidate,
            self._on_elected,
            exit_immediately,
            on_answer=lambda: self._workload.note_api_answer(),
            on_regained=self._on_regained,
        )
        bucket = TokenBucket(flags.api_qps, flags.api_burst)
        api = LimitedApi(connection, bucket, self._election.holds, self._metrics.count_request)
        self._gangs = Gangs(api) if flags.has(Feature.GANGS) else None
        self._workload = self._build_workload(api, key)
        self._rendezvous = RendezvousService(
            functools.partial(derive_token, key),
            self._on_report,
            may_act=self._election.holds,
            find_job=self._workload.jobs.get,
            token_every_s=flags.rotate_tokens_s,
        )
        urls = kube_webhook_urls(api) if flags.has(Feature.NOTIFICATIONS) else no_webhook_urls
        self._outbox = Outbox(urls, report_as_events(self._workload), rules=WebhookRules.parse(flags.webhook_to))
        self._notifier = Notifier(self._workload.get_job, self._outbox)
        self._quotas = KubeQuotas(api)
        self._spending = Spending(api, self._quotas, self._workload, self._limits_changed)
        self._limits = ProjectLimits(self._quotas.of, self._spending.today)
        self._capacity = KubeCapacity(api, self._workload, self._quotas) if flags.sharing else None
        self._allocator = self._build_allocator(self._capacity) if self._capacity is not None else None
        self._quotas.subscribe(self._limits_changed)
        self._kueue = KueueObjects(api, lambda key: self._controller.enqueue(key), namespace=flags.watch_namespace)
        self._controller = Controller(
            self._workload,
            self._rendezvous,
            queue=self._queue,
            threads=LOOPS,
            scheduling=self._scheduling(),
            listeners=Listeners(self._metrics.observe_pass, self._notifier.announce, self._notifier.drop_job),
        )
        self._label = LeaderLabel(api, flags.leader_election_namespace, self._host) if in_cluster() else None
        self._metrics.register_gauges(self._workload.jobs.items, self._queue.__len__, self._election.holds)
        self._watching, self._acting = self._list_watching_parts(), self._list_acting_parts()
        self._ending, self._leads = asyncio.Event(), asyncio.Event()
        self._acts = False
        self._listeners: list[Listener] = []
        self._loop = asyncio.get_running_loop()
        explain_exhaustion(self._loop)

    def _build_workload(self, api: LimitedApi, key: bytes) -> KubeWorkload:
        flags = self._flags
        build_group = functools.partial(build_named_group, features=flags.features)
        companions = functools.partial(build_companions, key, build_group=build_group)
        current_token = functools.partial(build_current_token, key)
        owned = OwnedObjects(api, ObjectBuilders(companions, build_budget, build_group, current_token))
        settings = Settings(
            flags.rendezvous_url, self._host, flags.node_grace_s, flags.watch_namespace, flags.has(Feature.NODES)
        )
        counted = (self._metrics.observe_replacement, self._metrics.observe_status)
        return KubeWorkload(api, settings, owned, self._finisher, *counted)

    def _build_allocator(self, capacity: KubeCapacity) -> Allocator:
        settings = SharingSettings(True, SharingRules(), self._flags.capacity)
        allocator = Allocator(
            capacity,
            lambda: settings,
            lambda key: self._controller.enqueue(key),
            restrict=self._limits.restrict,
        )
        capacity.subscribe(allocator.wake)
        return allocator

    def _list_watching_parts(self) -> dict[str, ManagedPart]:
        """The election, so that the Lease is released last: the next leader must not find another replica that still
        acts. Then what watches the cluster."""
        parts: dict[str, ManagedPart | None] = {
            "election": self._election,
            "workload": self._workload,
            "quotas": self._quotas.reflector if self._flags.has(Feature.LIMITS) else None,
            "other pods": self._capacity.reflector if self._capacity is not None else None,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _list_acting_parts(self) -> dict[str, ManagedPart]:
        parts: dict[str, ManagedPart | None] = {
            "sharing": self._allocator,
            "spending": self._spending,
            "kueue": self._kueue,
            "notifications": self._outbox,
            "waiting jobs": self._notifier,
            "loop": self._controller,
        }
        return {name: part for name, part in parts.items() if part is not None}

    async def run(self) -> None:
        """Watch, and lead once elected, until SIGTERM or SIGINT. Raises ElasticctlError if that is impossible."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._ending.set)
        await self._serve({"/healthz": self._healthz, "/readyz": self._readyz}, self._flags.health_port)
        await self._serve({"/metrics": self._metrics_page}, self._flags.metrics_port)
        for part in self._watching.values():
            part.start()
        log.info("version %s watches %s", elasticctl.__version__, self._connection.server)
        leading = asyncio.create_task(self._lead())
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((leading, ending), return_when=asyncio.FIRST_COMPLETED)
            if leading.done():
                leading.result()  # it only ends with an error
        finally:
            leading.cancel()
            await asyncio.to_thread(self._stop_all)
            for listener in self._listeners:
                await listener.cleanup()
        log.info("ended")

    async def _lead(self) -> None:
        """Wait to be elected, then start to act."""
        await self._leads.wait()
        while not self._synced():
            await asyncio.sleep(SYNC_POLL_S)
        for part in self._acting.values():
            part.start()
        self._acts = True
        await self._open_rendezvous()
        if self._label is not None:
            await self._label.claim()
        await asyncio.Event().wait()

    def _stop_all(self) -> None:
        for part in reversed([*self._watching.values(), *self._acting.values()]):
            if part is self._election and self._label is not None and self._election.holds():
                self._label.remove()
            part.stop()
        self._connection.close()

    def _finisher(self, job: ElasticJob, pods: list[Manifest]) -> Callable[[Manifest], Manifest]:
        if self._gangs is not None and self._gangs.takes(job, pods):
            return lambda pod: join_gang(job, finish_pod(job, pod))
        return functools.partial(finish_pod, job)

    def _scheduling(self) -> Scheduling:
        kueue = KueueQueueing(self._kueue, self._workload.patch_job)
        queueing = kueue if self._flags.has(Feature.KUEUE) else NoQueueing()
        found = Scheduling(restrict=self._limits.restrict, queueing=queueing)
        return found if self._allocator is None else replace(found, allotment=self._allocator.allotment)

    def _limits_changed(self, project: str) -> None:
        """Reconcile a project's jobs again: its limits have changed, or its spending has crossed one."""
        for key in jobs_of(self._workload, project):
            self._controller.enqueue(key)
        if self._allocator is not None:
            self._allocator.wake()

    def _reflectors(self) -> list[Reflector]:
        return [*self._workload.reflectors, *(part for part in self._watching.values() if isinstance(part, Reflector))]

    def _synced(self) -> bool:
        return all(reflector.wait_synced(0) for reflector in self._reflectors())

    def _on_elected(self) -> None:
        self._loop.call_soon_threadsafe(self._leads.set)

    def _on_regained(self, seconds: float) -> None:
        """Continue where this replica stopped: no other has acted in the meantime, but none has listened to workers."""
        if seconds > UNHEARD_S:
            self._rendezvous.start_over()
        for job in self._workload.jobs.items():
            self._controller.enqueue(object_key(job))

    def _on_report(self, key: str) -> None:
        self._controller.enqueue_soon(key)

    async def _open_rendezvous(self) -> None:
        deadline = self._loop.time() + PORT_PATIENCE_S
        while True:
            try:
                listener = Listener(self._rendezvous.app(), self._rendezvous)
                await listener.open_tcp(self._flags.bind or None, self._flags.rendezvous_port)
            except OSError as e:
                problem = f"cannot listen on port {self._flags.rendezvous_port}: {e.strerror}"
                if self._loop.time() > deadline:
                    raise ClusterError(problem) from e
                log.warning("%s; trying again", problem)
                await asyncio.sleep(PORT_RETRY_S)
            else:
                self._listeners.append(listener)
                return

    async def _serve(self, pages: Mapping[str, Callable[[], bytes]], port: int) -> None:
        listener = Listener(pages=pages)
        try:
            await listener.open_tcp(self._flags.bind or None, port)
        except OSError as e:
            raise ClusterError(f"cannot listen on port {port}: {e.strerror}") from e
        self._listeners.append(listener)

    def _healthz(self) -> bytes:
        """Whether all threads are alive: a cluster that is unreachable for a while is no reason for a restart."""
        parts = self._watching | (self._acting if self._acts else {})
        dead = [name for name, part in parts.items() if not part.alive]
        text = f"dead: {', '.join(dead)}\n" if dead else "ok\n"
        return response(500 if dead else 200, "text/plain", text.encode())

    def _readyz(self) -> bytes:
        """Whether everything has been listed: only then can this replica lead without delay."""
        synced = self._synced()
        return response(200 if synced else 503, "text/plain", b"ok\n" if synced else b"still listing\n")

    def _metrics_page(self) -> bytes:
        return response(200, CONTENT_TYPE, self._metrics.render_at_rest())


def finish_pod(job: ElasticJob, pod: Manifest) -> Manifest:
    """The pod as it is created; the pod of a TorchElastic job stays as its template has it."""
    return pod if job.rdzv_endpoint else harden(pod)


def exit_immediately() -> None:
    """End the process without cleaning up: another replica may be leading by now."""
    logging.shutdown()
    os._exit(EXIT_LEASE_LOST)


def read_key(path: Path) -> bytes:
    """Read the key for the workers' tokens, in hexadecimal. Raises ClusterError if it cannot be used."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except OSError as e:
        raise ClusterError(f"cannot read the tokens' key {path}: {e.strerror}") from e
    except ValueError as e:
        raise ClusterError(
            f"the tokens' key in {path} is not hexadecimal. FIX: `elasticctl install` creates one"
        ) from e
    if len(key) < 16:
        raise ClusterError(f"the tokens' key in {path} has {len(key)} bytes. FIX: use at least 16")
    return key


class LogFormatter(JsonFormatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, and `error` with the traceback if there is one."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(name)s %(message)s",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "error"},
            json_ensure_ascii=False,
        )

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the record's time in RFC 3339, UTC."""
        return to_rfc3339(record.created)

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        """Write levels in lower case."""
        return {**log_data, "level": log_data["level"].lower()}


def configure_logging() -> None:
    """Log to stderr as JSON; log warnings and errors only from libraries that log every request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("aiohttp.access", "kubernetes", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def main(argv: list[str] | None = None) -> int:
    """Run the controller; returns the process's exit code."""
    flags = parse_flags(argv)
    configure_logging()
    try:
        raise_file_limit()
        asyncio.run(_run(flags))
    except ElasticctlError as e:
        log.error("%s", e)
        return e.exit_code
    return 0


async def _run(flags: Flags) -> None:
    key = read_key(flags.token_key_file)
    await Manager(flags, connect(flags.context, CONNECTIONS, installation.DEPLOYMENT), key).run()


if __name__ == "__main__":
    sys.exit(main())
