"""`KubeWorkerAccess`: commands in the containers of workers, through the API server, with the caller's own rights.

The channels are those of `kubectl exec` and `kubectl port-forward`:
https://github.com/kubernetes/kubernetes/blob/master/staging/src/k8s.io/apimachinery/pkg/util/remotecommand/constants.go
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ClusterError, ConflictError, ElasticctlError, NotFoundError, UnreachableError
from elasticctl.api.objects import as_list, as_mapping
from elasticctl.api.observed.workers import Pod
from elasticctl.api.podtemplate import worker_container
from elasticctl.api.text import shorten
from elasticctl.cluster.base import say_on_stderr
from elasticctl.cluster.worker_access import BLOCK_BYTES, Streams, write_all
from elasticctl.kubeapi.connection import Connection, resource_path
from elasticctl.kubeapi.tunnels import Tunnel, open_tunnel

STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
CLOSES_INPUT, PLAIN = "v5.channel.k8s.io", "v4.channel.k8s.io"
"""Only the newer protocol (Kubernetes 1.30) can say that the input has ended."""
DATA, PORT_ERROR = 0, 1
PORT_BYTES = 2
"""Each channel of a forwarded port begins with its number."""
LINGER_S = 5.0
"""The worker cannot be notified that this side sends no more: a connection ends when it is then silent for so long."""
ENTER = 'cd -P /proc/1/cwd 2>/dev/null; exec "$@"'
"""The launcher, the container's first process, is in the script's folder; in other containers nothing changes."""


class KubeWorkerAccess:
    """`elasticctl.cluster.worker_access.WorkerAccess` over an API server; `say` prints the occasional message."""

    def __init__(
        self, connection: Connection, say: Callable[[str], None] = say_on_stderr, *, linger_s: float = LINGER_S
    ) -> None:
        self._connection, self._say, self._linger_s = connection, say, linger_s

    def run(self, worker: Manifest, argv: Sequence[str], streams: Streams) -> int:
        """Run a command in the worker's container; see `WorkerAccess.run`."""
        self._check(worker)
        sys.stdout.flush()
        words = ["sh", "-c", ENTER, "sh", *argv]
        params = [("container", str(worker_container(worker).get("name", ""))), *(("command", word) for word in words)]
        params += [("stdin", str(streams.stdin is not None).lower()), ("stdout", "true")]
        params += [("stderr", str(not streams.terminal).lower()), ("tty", str(streams.terminal).lower())]
        return asyncio.run(self._run(worker, params, streams))

    async def _run(self, worker: Manifest, params: Sequence[tuple[str, str]], streams: Streams) -> int:
        async with open_tunnel(self._connection, _path(worker, "exec"), params, (CLOSES_INPUT, PLAIN)) as tunnel:
            with _raw(streams.stdin if streams.terminal else None):
                async with _sending(tunnel, streams, self._say):
                    async for channel, data in tunnel.messages():
                        if channel == ERROR:
                            return _exit_code(data, worker)
                        if channel in (STDOUT, STDERR):
                            write_all(streams.stdout if channel == STDOUT else streams.stderr, data)
        await asyncio.to_thread(self._check, worker)
        raise UnreachableError(f"the connection to {worker['metadata']['name']} is lost; the command may still run")

    async def forward(
        self, worker: Manifest, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect to a port of the worker's pod; see `WorkerAccess.forward`."""
        path, params = _path(worker, "portforward"), [("ports", str(port))]
        async with open_tunnel(self._connection, path, params, (PLAIN,)) as tunnel:
            sending = asyncio.create_task(_send_data(tunnel, reader))
            receiving = asyncio.create_task(_receive_data(tunnel, writer, worker, port))
            try:
                await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
                heard = -1
                while not receiving.done() and tunnel.heard != heard:
                    heard = tunnel.heard
                    await asyncio.wait((receiving,), timeout=self._linger_s)
                if receiving.done():
                    receiving.result()
            finally:
                sending.cancel()
                receiving.cancel()

    def _check(self, worker: Manifest) -> None:
        """Raise NotFoundError unless this very pod is there and runs."""
        metadata = worker["metadata"]
        name, job = metadata["name"], metadata["name"].rpartition("-worker-")[0]
        try:
            found = self._connection.request("GET", resource_path("v1", metadata["namespace"], "pods", name))
        except NotFoundError:
            found = {}
        pod = Pod.from_manifest(found)
        if pod.uid != metadata["uid"] or pod.ended or pod.exit_code is not None:
            raise NotFoundError(f"{name} has ended. Next: elasticctl status {job}")


def _path(worker: Manifest, part: str) -> str:
    metadata = worker["metadata"]
    return resource_path("v1", metadata["namespace"], "pods", metadata["name"], part)


def _exit_code(message: bytes, worker: Manifest) -> int:
    """The exit code of a command, from the status that ends it. Raises ClusterError for one that could not run."""
    try:
        status: Mapping[str, Any] = as_mapping(json.loads(message))
    except ValueError:
        status = {"message": message.decode("utf-8", "replace")}
    if status.get("status") == "Success":
        return 0
    for cause in map(as_mapping, as_list(as_mapping(status.get("details")).get("causes"))):
        code = str(cause.get("message"))
        if cause.get("reason") == "ExitCode" and code.isascii() and code.isdigit():
            return int(code) & 0xFF
    said = shorten(str(status.get("message") or "no reason given"))
    raise ClusterError(f"the command cannot run in {worker['metadata']['name']}: {said}")


@asynccontextmanager
async def _sending(tunnel: Tunnel, streams: Streams, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Send what is typed, and the size of the terminal, until the block ends."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def resize() -> None:
        with suppress(OSError):
            width, height = os.get_terminal_size(streams.stdout)
            size = json.dumps({"Width": width, "Height": height}).encode()
            tasks.add(loop.create_task(_quietly(tunnel, RESIZE, size)))

    wake, woken = os.pipe() if streams.stdin is not None else (-1, -1)
    if streams.terminal:
        resize()
        with suppress(RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(signal.SIGWINCH, resize)
    if streams.stdin is not None:
        tasks.add(loop.create_task(_send_input(tunnel, streams.stdin, wake, say)))
    try:
        yield
    finally:
        if streams.stdin is not None:
            os.close(woken)  # ends the thread that reads
        if streams.terminal:
            with suppress(RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGWINCH)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_input(tunnel: Tunnel, stdin: int, wake: int, say: Callable[[str], None]) -> None:
    """Send what comes on a descriptor of any kind, and that it has ended, until `wake` is closed on its other side."""
    loop = asyncio.get_running_loop()
    blocks: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=4)

    def read() -> None:
        try:
            while True:
                ready, _, _ = select.select([stdin, wake], [], [])
                if wake in ready:
                    return
                data = os.read(stdin, BLOCK_BYTES)
                asyncio.run_coroutine_threadsafe(blocks.put(data or None), loop).result()
                if not data:
                    return
        except (OSError, RuntimeError, CancelledError):  # the terminal or the connection is gone
            return
        finally:
            os.close(wake)

    threading.Thread(target=read, name="input", daemon=True).start()
    with suppress(UnreachableError):  # the other side says how it ended
        while data := await blocks.get():
            await tunnel.send(STDIN, data)
        if tunnel.protocol == CLOSES_INPUT:
            await tunnel.send(CLOSE, bytes((STDIN,)))
        else:
            say("this cluster (Kubernetes before 1.30) cannot end the input of the command: Ctrl-C ends it")


async def _quietly(tunnel: Tunnel, channel: int, data: bytes) -> None:
    with suppress(UnreachableError):
        await tunnel.send(channel, data)


@contextmanager
def _raw(terminal: int | None) -> Iterator[None]:
    """Pass every key through, Ctrl-C included; the terminal is restored afterwards."""
    if terminal is None:
        yield
        return
    before = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


async def _send_data(tunnel: Tunnel, reader: asyncio.StreamReader) -> None:
    with suppress(OSError, ElasticctlError):
        while data := await reader.read(BLOCK_BYTES):
            await tunnel.send(DATA, data)


async def _receive_data(tunnel: Tunnel, writer: asyncio.StreamWriter, worker: Manifest, port: int) -> None:
    """Pass on what the pod sends. Raises ConflictError when the port cannot be reached."""
    preambles = {DATA: PORT_BYTES, PORT_ERROR: PORT_BYTES}
    async for channel, data in tunnel.messages():
        skipped = min(preambles.get(channel, 0), len(data))
        if skipped:
            preambles[channel] -= skipped
            data = data[skipped:]
        if channel == PORT_ERROR and data:
            said = shorten(data.decode("utf-8", "replace"))
            raise ConflictError(f"port {port} of {worker['metadata']['name']} cannot be reached: {said}")
        if channel == DATA and data:
            try:
                writer.write(data)
                await writer.drain()
            except OSError:  # the client has disconnected
                return
