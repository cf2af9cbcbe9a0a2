"""Access to workers on Kubernetes, through a fake API server whose containers are this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web

from elasticctl.api.errors import ClusterError, CredentialsError, ForbiddenError, NotFoundError, UnreachableError
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.cluster.kube.worker_access import KubeWorkerAccess
from elasticctl.cluster.worker_access import Streams
from elasticctl.kubeapi.connection import connect
from tests.support.fakeapi import FakeApi, Request
from tests.support.jobs import FOREVER, shell_job
from tests.support.kube import NAMESPACE, WriteKubeconfig, add_pod
from tests.support.worker_access_contract import RunningWorker, WorkerAccessContract

NEWER, OLDER = "v5.channel.k8s.io", "v4.channel.k8s.io"


class Kubelet:
    """Serves `api` too, until `close`; `protocols` are those that it knows, `sizes` those of terminals.

    `cut`: commands are cut off, as by a node that dies, once they have printed something.
    """

    def __init__(self, api: FakeApi, folder: Path, environ: Mapping[str, str]) -> None:
        self.api, self.folder, self.environ = api, folder, dict(environ)
        self.protocols: tuple[str, ...] = (NEWER, OLDER)
        self.sizes: list[dict[str, int]] = []
        self.asked: list[dict[str, list[str]]] = []
        self.cut = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(20)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _serve(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = Request(
            request.method,
            request.path,
            dict(request.query),
            dict(request.headers),
            json.loads(body) if body else None,
        )
        self.api.requests.append(seen)
        refused = self.api.refuse(seen)
        if refused is not None:
            return web.json_response(refused[1], status=refused[0], headers=refused[2])
        pod, _, part = request.path.rpartition("/")
        if part in ("exec", "portforward"):
            if pod not in self.api.objects:
                gone = {"message": f'pods "{pod.rpartition("/")[2]}" not found', "details": {"kind": "pods"}}
                return web.json_response(gone, status=404)
            self.asked.append({name: request.query.getall(name) for name in request.query})
            return await (self._exec(request) if part == "exec" else self._forward(request))
        status, content = await asyncio.to_thread(self.api.answer, seen)
        return web.json_response(content, status=status)

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=self.protocols)
        await socket.prepare(request)
        wants_input = request.query["stdin"] == "true"
        process = await asyncio.create_subprocess_exec(
            *request.query.getall("command"),
            cwd=self.folder,
            env=self.environ,
            stdin=asyncio.subprocess.PIPE if wants_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if request.query["tty"] == "true" else asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        copying = [
            asyncio.create_task(self._copy(socket, channel, stream))
            for channel, stream in ((1, process.stdout), (2, process.stderr))
            if stream is not None
        ]
        hearing = asyncio.create_task(self._hear(socket, process))
        try:
            if self.cut:
                await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
                return socket
            await asyncio.gather(*copying)
            code = await process.wait()
            code = 128 - code if code < 0 else code
            causes = [{"reason": "ExitCode", "message": str(code)}]
            status = {"status": "Success"}
            if code:
                status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}  # type: ignore[dict-item]
            await socket.send_bytes(b"\x03" + json.dumps(status).encode())
        finally:
            hearing.cancel()
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            await socket.close()
        return socket

    async def _copy(self, socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 15):
            if not socket.closed:
                await socket.send_bytes(bytes((channel,)) + data)
            if self.cut:
                return

    async def _hear(self, socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
        async for message in socket:
            if message.type is not WSMsgType.BINARY:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == 0 and process.stdin is not None:
                process.stdin.write(data)
            elif channel == 255 and data == b"\0" and process.stdin is not None:
                process.stdin.close()
            elif channel == 4:
                self.sizes.append(json.loads(data))
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=self.protocols)
        await socket.prepare(request)
        port = int(request.query["ports"])
        for channel in (0, 1):
            await socket.send_bytes(bytes((channel,)) + port.to_bytes(2, "little"))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as e:
            await socket.send_bytes(b"\x01" + f"error forwarding port {port} to pod: {e.strerror}".encode())
            await socket.close()
            return socket

        async def to_client() -> None:
            while data := await reader.read(1 << 15):
                await socket.send_bytes(b"\0" + data)
            await socket.close()

        copying = asyncio.create_task(to_client())
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[0] == 0:
                writer.write(message.data[1:])
        copying.cancel()
        writer.close()
        return socket


@pytest.fixture
def kubelet(api: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path) -> Iterator[Kubelet]:
    found = Kubelet(api, tmp_path, {"PATH": os.environ["PATH"], "MARK": "here it is"})
    kubeconfig(found.url)
    yield found
    found.close()


@pytest.fixture
def running(kubelet: Kubelet, tmp_path: Path) -> Iterator[RunningWorker]:
    connection = connect()
    job = KubeCluster(connection).create_job(shell_job("shell", FOREVER))
    said: list[str] = []
    yield RunningWorker(KubeWorkerAccess(connection, said.append, linger_s=0.2), add_pod(kubelet.api, job, 0), tmp_path)
    connection.close()


class TestKubeWorkerAccess(WorkerAccessContract):
    pass


def test_the_container_that_trains_is_entered(running: RunningWorker, kubelet: Kubelet) -> None:
    assert running.run("true") == (0, b"", b"")
    (asked,) = kubelet.asked
    assert asked["container"] == ["elasticjob-worker"]
    assert asked["command"][:2] == ["sh", "-c"]
    assert asked["command"][3:] == ["sh", "true"]
    assert (asked["stdin"], asked["tty"]) == (["false"], ["false"])


def test_an_error_names_the_missing_right(running: RunningWorker, kubelet: Kubelet) -> None:
    def refuse(request: Request) -> tuple[int, object, dict[str, str]] | None:
        message = 'pods "shell-worker-0" is forbidden: User "eve" cannot create resource "pods/exec" in API group ""'
        return (403, {"message": message}, {}) if request.path.endswith("/exec") else None

    kubelet.api.refuse = refuse
    with pytest.raises(ForbiddenError, match=r'"eve" cannot create resource "pods/exec".* FIX: ask the cluster'):
        running.run("true")


def test_credentials_that_have_expired_are_read_again(
    running: RunningWorker, kubelet: Kubelet, kubeconfig: WriteKubeconfig
) -> None:
    def refuse(request: Request) -> tuple[int, object, dict[str, str]] | None:
        known = request.headers["Authorization"] == "Bearer t2" or not request.path.endswith("/exec")
        return None if known else (401, {"message": "Unauthorized"}, {})

    kubelet.api.refuse = refuse
    with pytest.raises(CredentialsError, match="FIX: log in again"):
        running.run("true")
    kubeconfig(kubelet.url, user={"token": "t2"})
    assert running.run("true")[0] == 0


def test_a_connection_that_is_cut_is_no_success(running: RunningWorker, kubelet: Kubelet) -> None:
    kubelet.cut = True
    with pytest.raises(UnreachableError, match="the connection to shell-worker-0 is lost; the command may still run"):
        running.run("sh", "-c", f"echo begun; {FOREVER}")
    kubelet.api.remove(f"{NAMESPACE}/pods/shell-worker-0")
    with pytest.raises(NotFoundError, match="shell-worker-0 has ended"):
        running.run("true")


def test_a_pod_whose_container_has_gone_is_refused_in_words(running: RunningWorker, kubelet: Kubelet) -> None:
    def refuse(request: Request) -> tuple[int, object, dict[str, str]] | None:
        message = {"message": "container not found (elasticjob-worker)"}
        return (500, message, {}) if request.path.endswith("/exec") else None

    kubelet.api.refuse = refuse
    with pytest.raises(ClusterError, match="container not found"):
        running.run("true")


def test_an_older_cluster_cannot_learn_that_input_has_ended(running: RunningWorker, kubelet: Kubelet) -> None:
    kubelet.protocols = (OLDER,)
    assert running.run("head", "-c", "3", given=b"abc") == (0, b"abc", b"")
    assert running.run("true") == (0, b"", b"")


def test_a_server_that_knows_no_such_connections(running: RunningWorker, kubelet: Kubelet) -> None:
    kubelet.api.refuse = lambda request: (200, {}, {}) if request.path.endswith("/exec") else None
    with pytest.raises(ClusterError, match="opens no connection into pods"):
        running.access.run(running.worker, ["true"], Streams())
