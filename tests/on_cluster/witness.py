"""A way to the API server that writes down what went through it: one door for each replica of the controller.

`kubectl proxy` knows the server and the credentials; before it stands a small proxy of our own with a door, a port, for
each replica.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Write:
    """A request other than GET that the API server has answered; `at` is monotonic seconds."""

    at: float
    replica: str
    method: str
    path: str
    status: int

    @property
    def acted(self) -> bool:
        """True when it changed anything but the Lease, which is there for all to try for."""
        return self.status < 300 and "/leases" not in self.path


@dataclass(slots=True)
class Witness:
    """What has been seen so far, and more doors; lives in a thread of its own."""

    upstream: str
    folder: Path
    writes: list[Write] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _session: aiohttp.ClientSession | None = None
    _runners: list[web.AppRunner] = field(default_factory=list)

    def door(self, replica: str) -> str:
        """Open a door for a replica; returns the kubeconfig that leads through it."""
        port = asyncio.run_coroutine_threadsafe(self._open(replica), self._loop).result(10)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "witness",
            "clusters": [{"name": "witness", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "witness", "user": {}}],
            "contexts": [{"name": "witness", "context": {"cluster": "witness", "user": "witness"}}],
        }
        path = self.folder / f"{replica}.kubeconfig"
        path.write_text(json.dumps(config))
        return str(path)

    def acts_of(self, replica: str) -> list[Write]:
        """By which this replica has changed something, in order."""
        return [write for write in list(self.writes) if write.acted and write.replica == replica]

    def run(self) -> None:
        """Serve until `stop`."""
        self._loop.run_forever()
        self._loop.run_until_complete(self._close())
        self._loop.close()

    def stop(self) -> None:
        """Have `run` return."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open(self, replica: str) -> int:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

        async def pass_on(request: web.Request) -> web.StreamResponse:
            return await self._pass_on(replica, request)

        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", pass_on)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runners.append(runner)
        return int(runner.addresses[0][1])

    async def _pass_on(self, replica: str, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        body = await request.read()
        headers = {name: request.headers[name] for name in ("Content-Type", "Accept") if name in request.headers}
        url = f"{self.upstream}{request.path_qs}"
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            if request.method != "GET":
                self.writes.append(Write(time.monotonic(), replica, request.method, request.path, answer.status))
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            with suppress(aiohttp.ClientError, ConnectionError):  # a watch that either side gives up
                async for block in answer.content.iter_any():
                    await response.write(block)
                await response.write_eof()
            return response

    async def _close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()
        if self._session is not None:
            await self._session.close()


@contextmanager
def witnessing(folder: Path) -> Iterator[Witness]:
    """A witness of the cluster that $KUBECONFIG points at."""
    argv = ["kubectl", "proxy", "--port=0", "--address=127.0.0.1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            found = re.search(r"127\.0\.0\.1:\d+", proxy.stdout.readline())
            assert found is not None
            witness = Witness(f"http://{found.group()}", folder)
            thread = threading.Thread(target=witness.run)
            thread.start()
            try:
                yield witness
            finally:
                witness.stop()
                thread.join()
        finally:
            proxy.terminate()
