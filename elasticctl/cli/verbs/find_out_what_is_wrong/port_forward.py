"""`port-forward`: ports of a worker on this machine's loopback."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from elasticctl.api.errors import ClusterError, ElasticctlError, NotFoundError, UsageError
from elasticctl.api.text import quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import WHICH_WORKER
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cluster import worker_access_of
from elasticctl.operations.workers import WhichWorker, find_worker
from elasticctl.settings.contexts import LOCAL
from elasticctl.terminal import say

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest
    from elasticctl.cluster.worker_access import WorkerAccess

app = new_app()

HOST = "127.0.0.1"
"""Only this machine can connect: what listens in a worker, such as TensorBoard, asks for no password."""
_PORTS = re.compile(r"(?:([0-9]{0,5}):)?([0-9]{1,5})")
_HIGHEST = 65_535


class PortPair(NamedTuple):
    """A local port (0: a free one), and the worker's."""

    here: int
    there: int


def port_pair(text: str) -> PortPair:
    """6006, 8080:6006, or :6006 for any free local port."""
    found = _PORTS.fullmatch(text)
    here = found and int(found[2] if found[1] is None else found[1] or 0)
    if found is None or here is None or here > _HIGHEST or not 0 < int(found[2]) <= _HIGHEST:
        raise typer.BadParameter(f"{quote(text)} is not a port, as in 6006, 8080:6006 or :6006.")
    return PortPair(here, int(found[2]))


@verb(app, "port-forward")
def port_forward(
    *,
    job: options.Job,
    ports: Annotated[tuple[PortPair, ...], typer.Argument(metavar="[LOCAL:]PORT...", parser=port_pair)],
    which: Annotated[WhichWorker, WHICH_WORKER],
    where: Where,
) -> None:
    """Forward local ports to a worker, until Ctrl-C.

    6006 forwards the local port of that number, 8080:80 another one, :6006 any free one. When the worker is replaced,
    new connections go to its successor.

    \b
      elasticctl port-forward train 6006
      elasticctl port-forward train 8080:80 :6006 --worker 1
    """
    target = reach(where)
    pod = find_worker(target, job, which)
    name = str(pod["metadata"]["name"])
    forwarding = Forwarding(
        worker_access_of(target.context), pod, lambda: find_worker(target, job, WhichWorker(worker=name))
    )
    asyncio.run(forwarding.run(ports, is_here=target.context.provider == LOCAL))


class Forwarding:
    """Ports of one worker or its replacement, which `find` returns."""

    def __init__(self, access: WorkerAccess, worker: Manifest, find: Callable[[], Manifest]) -> None:
        self._access, self._worker, self._find = access, worker, find
        self._name = str(worker["metadata"]["name"])

    async def run(self, ports: tuple[PortPair, ...], *, is_here: bool) -> None:
        """Forward until cancelled. Raises ConflictError once the job has ended. `is_here`: the worker is local."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        servers = []
        try:
            for pair in ports:
                if is_here and pair.here == pair.there:
                    typer.echo(f"{HOST}:{pair.here} is the port of {self._name} itself: it runs on this machine")
                    continue
                server = await self._listen(pair)
                servers.append(server)
                typer.echo(f"{HOST}:{server.sockets[0].getsockname()[1]} -> {self._name}:{pair.there}")
            await self._ended
        finally:
            for server in servers:
                server.close()

    async def _listen(self, pair: PortPair) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._forward(pair.there, reader, writer)
            except ElasticctlError as e:
                say(str(e))
            finally:
                writer.close()

        try:
            return await asyncio.start_server(serve, HOST, pair.here)
        except OSError as e:
            free = f"`:{pair.there}` takes a free one"
            raise UsageError(f"cannot listen on port {pair.here}: {e.strerror or e}. FIX: {free}") from e

    async def _forward(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; a worker that is gone may have been replaced."""
        worker = self._worker
        try:
            await self._access.forward(worker, port, reader, writer)
            return
        except NotFoundError:
            pass
        try:
            self._worker = await asyncio.to_thread(self._find)
        except ClusterError as e:
            if not self._ended.done():
                self._ended.set_exception(e)
            return
        await self._access.forward(self._worker, port, reader, writer)
