"""The local cluster's background process: store, controller loop, rendezvous service and the workers' kubelet.

`python -m elasticctl_controller.local.supervisor [--detach]`, one per state folder. With `--detach` it goes into the
background, and the command returns 0 once its sockets answer, or 1 when it could not start. The main thread serves the
sockets; the controller and the kubelet have a thread each. It can be killed at any point, and the next one continues:
all state is in the store and in the process table, and workers do not need a supervisor to run.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import functools
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from aiohttp import web

import elasticctl
from elasticctl.api import notifications
from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import ClusterError, ElasticctlError
from elasticctl.api.quota import KIND as QUOTA
from elasticctl.cluster.local.capacity import SETTLE_S, discover_gpus
from elasticctl.cluster.local.paths import LocalPaths, local_paths
from elasticctl.cluster.local.private_paths import storage_error
from elasticctl.cluster.local.secrets import Secrets
from elasticctl_controller.core.group.worker_tokens import derive_token
from elasticctl_controller.core.sharing.claims import SharingRules
from elasticctl_controller.local.http_api import SupervisorApi
from elasticctl_controller.local.kubelet import LocalKubelet
from elasticctl_controller.local.processes import write_private
from elasticctl_controller.local.store import LocalStore, StoreChange
from elasticctl_controller.local.workload import LocalWorkload, WorkerTokens
from elasticctl_controller.loop.allocator import Allocator, SharingSettings
from elasticctl_controller.loop.controller import Controller, Listeners, Scheduling
from elasticctl_controller.loop.notifier import Destination, Notifier, Outbox, report_as_events, value_of
from elasticctl_controller.loop.project_limits import ProjectLimits
from elasticctl_controller.loop.webhooks import WebhookError, WebhookRules
from elasticctl_controller.rendezvous.listener import Guard, Listener
from elasticctl_controller.rendezvous.service import RendezvousService
from elasticctl_controller.rendezvous.sockets import explain_exhaustion, raise_file_limit

DRAIN_LIMIT_S = 600.0
SECRET_BYTES = 32
MAX_FILE_BYTES = 4096
"""The most that is read from a file with a webhook's URL."""
RULES = SharingRules(settle_s=SETTLE_S)

log = logging.getLogger(__name__)


class Supervisor:
    """The parts that run in the process, and the order in which they start and stop.

    `umask` is what workers create their files with: this process's own is for its own files.
    """

    def __init__(self, paths: LocalPaths, umask: int) -> None:
        self._paths = paths
        self._lock = _acquire_lock(paths)
        self._store = LocalStore(paths.database)
        secret = _load_token_key(paths)
        gpus = discover_gpus(os.environ)
        tokens = WorkerTokens(secret, lambda key: self._workload.get_job(key))
        self._workload = LocalWorkload(self._store, f"unix://{paths.rendezvous_socket}", len(gpus), tokens.deliver)
        token_for = functools.partial(derive_token, secret)
        self._rendezvous = RendezvousService(token_for, self._on_report, find_job=self._workload.get_job)
        self._limits = ProjectLimits(self._workload.quota_of)
        self._allocator = Allocator(self._workload, self._settings, self._on_allotment, restrict=self._limits.restrict)
        self._outbox = Outbox(
            local_webhook_urls(paths), report_as_events(self._workload), rules=WebhookRules(own_machine=True)
        )
        self._notifier = Notifier(self._workload.get_job, self._outbox)
        scheduling = Scheduling(restrict=self._limits.restrict, allotment=self._allocator.allotment)
        listeners = Listeners(on_status=self._notifier.announce, on_gone=self._notifier.drop_job)
        self._controller = Controller(self._workload, self._rendezvous, scheduling=scheduling, listeners=listeners)
        self._kubelet = LocalKubelet(
            self._store,
            paths,
            files_for=tokens.files_of,
            gpus=gpus,
            cpu_slots=self._workload.cpu_slots,
            umask=umask,
            on_exit=self._rendezvous.report_loss,
        )
        info = {
            "pid": os.getpid(),
            "version": elasticctl.__version__,
            "startedAt": to_rfc3339(time.time()),
            "gpus": list(gpus),
        }
        self._api = SupervisorApi(self._store, info, gpus, self._shut_down)
        self._ending = asyncio.Event()
        self._stop_workers = False

    async def run(self, ready: int | None) -> None:
        """Serve until a signal or a request ends it; write a byte to the descriptor `ready` once the sockets answer."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        runners = [
            await _serve(self._api.app(), self._paths.api_socket),
            await _serve(self._rendezvous.app(), self._paths.rendezvous_socket, self._rendezvous),
        ]
        self._kubelet.start()
        self._store.subscribe(self._on_store_change)
        self._allocator.start()
        self._outbox.start()
        self._notifier.start()
        self._controller.start()
        log.info("version %s serves %s", elasticctl.__version__, self._paths.state)
        if ready is not None:
            with suppress(BrokenPipeError):  # the client has not waited that long; the next one will connect
                os.write(ready, b"1")
            os.close(ready)
        await self._ending.wait()
        await asyncio.to_thread(self._stop_all)
        for runner in runners:
            await runner.cleanup()
        self._store.close()
        log.info("ended")

    def _stop_all(self) -> None:
        # The controller first: it would replace the workers that are being stopped.
        self._allocator.stop()
        self._controller.stop()
        if self._stop_workers and not self._kubelet.drain().wait(DRAIN_LIMIT_S):
            log.error("some workers did not end within %.0f s", DRAIN_LIMIT_S)
        self._kubelet.stop()
        self._notifier.stop()
        self._outbox.stop()

    def _shut_down(self, stop_workers: bool) -> None:
        self._stop_workers = stop_workers
        self._ending.set()

    def _settings(self) -> SharingSettings:
        return SharingSettings(self._workload.sharing().on, RULES)

    def _on_store_change(self, change: StoreChange) -> None:
        """Divide the capacity again, and reconcile all jobs if a quota has changed."""
        if change.kind == QUOTA:
            for job in self._store.list_jobs():
                self._controller.enqueue(f"{job['metadata']['namespace']}/{job['metadata']['name']}")
        self._allocator.wake()

    def _on_allotment(self, key: str) -> None:
        self._controller.enqueue(key)

    def _on_report(self, key: str) -> None:
        self._controller.enqueue_soon(key)


def local_webhook_urls(paths: LocalPaths, environ: Mapping[str, str] = os.environ) -> Callable[[Destination], str]:
    """Return a function that finds a webhook's URL: in a secret, a file or a variable of the local cluster's user."""

    def url_of(destination: Destination) -> str:
        reference = notifications.parse_reference(destination.reference)
        if reference.kind == "file":
            return _read_webhook_file(Path(reference.name))
        if reference.kind == "env":
            if reference.name not in environ:
                raise WebhookError(
                    f"{reference.name} is not in the environment that the local cluster was started in."
                    " FIX: run `elasticctl local down` and set it; the next command starts the cluster again"
                )
            return environ[reference.name]
        return value_of(Secrets(paths).read(destination.namespace, notifications.SECRET) or {}, destination, reference)

    return url_of


def _read_webhook_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode()
    except OSError as e:
        raise WebhookError(f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError:
        raise WebhookError(f"{path} is not text") from None


def main(argv: list[str] | None = None) -> int:
    """Run the supervisor; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="elasticctl_controller.local.supervisor")
    parser.add_argument("--detach", action="store_true", help="run in the background; return once it answers")
    options = parser.parse_args(argv)
    umask = os.umask(0o077)
    ready = None
    if options.detach:
        ready, started = _fork_into_background()
        if started is not None:
            return started
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    raise_file_limit()
    try:
        asyncio.run(_run(ready, umask))
    except ElasticctlError as e:
        log.error("%s", e)
        return 1
    return 0


async def _run(ready: int | None, umask: int) -> None:
    explain_exhaustion(asyncio.get_running_loop())
    paths = local_paths()
    paths.create()
    await Supervisor(paths, umask).run(ready)


def _fork_into_background() -> tuple[int | None, int | None]:
    """Fork; returns (descriptor to report readiness on, None) in the child, (None, exit code) in the parent."""
    receive, send = os.pipe()
    if os.fork() == 0:
        os.close(receive)
        os.setsid()
        os.chdir("/")
        return send, None
    os.close(send)
    return None, 0 if os.read(receive, 1) else 1


def _acquire_lock(paths: LocalPaths) -> int:
    """Acquire the lock that a supervisor holds while it runs; ClusterError when another one holds it."""
    try:
        descriptor = os.open(paths.supervisor_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise ClusterError(f"another supervisor already serves {paths.state}") from e
    except OSError as e:
        raise storage_error(f"lock {paths.supervisor_lock}", e) from e
    return descriptor


def _load_token_key(paths: LocalPaths) -> bytes:
    """Read the key of the workers' tokens; create it if there is none."""
    try:
        if not paths.secret.exists():
            fresh = paths.secret.with_suffix(".tmp")
            write_private(fresh, secrets.token_hex(SECRET_BYTES))
            fresh.replace(paths.secret)
        return bytes.fromhex(paths.secret.read_text(encoding="ascii"))
    except ValueError as e:
        raise ClusterError(f"{paths.secret} is damaged. FIX: delete it and restart the running workers") from e
    except OSError as e:
        raise storage_error(f"keep a secret at {paths.secret}", e) from e


async def _serve(app: web.Application, socket: Path, guard: Guard | None = None) -> Listener:
    """Serve on a Unix socket; an existing socket file was left by a supervisor that was killed."""
    with suppress(FileNotFoundError):
        socket.unlink()
    listener = Listener(app, guard)
    try:
        await listener.open_unix(str(socket))
    except OSError as e:
        raise storage_error(f"listen on {socket}", e) from e
    return listener


if __name__ == "__main__":
    sys.exit(main())
