"""The fake API server with what is inside of its pods: commands and ports, through WebSockets as Kubernetes has them.

Commands run on this machine, in `folder` and with `environ`; ports are those of this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from aiohttp import WSMsgType, web

from tests.support.fakeapi import FakeApi, Request

NEWER, OLDER = "v5.channel.k8s.io", "v4.channel.k8s.io"


class Kubelet:
    """Serves `api` too, until `close`; `protocols` are those that it knows, `sizes` the terminals' that it was told of.

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
