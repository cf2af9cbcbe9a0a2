"""Tunnels through a Kubernetes API server into a pod, as `exec` and `port-forward` need them: WebSockets.

What goes through one is split into channels: the first byte of each message is the number of its channel. Which channel
means what depends on the subprotocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from elasticctl.api.errors import ClusterError, CredentialsError, UnreachableError
from elasticctl.api.text import shorten
from elasticctl.kubeapi.connection import CONNECT_TIMEOUT_S, Connection
from elasticctl.kubeapi.responses import refusal

PING_EVERY_S = 20.0
"""Load balancers on the way drop connections on which nothing is said for a minute."""
MAX_MESSAGE_BYTES = 64 << 20


class Tunnel:
    """An open tunnel; `protocol` is the subprotocol that the server has chosen, `heard` counts its messages."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[bool], server: str) -> None:
        self._socket, self._server = socket, server
        self.protocol = socket.protocol or ""
        self.heard = 0

    async def send(self, channel: int, data: bytes) -> None:
        """Send data on a channel. Raises UnreachableError once the tunnel is closed."""
        try:
            await self._socket.send_bytes(bytes((channel,)) + data)
        except (aiohttp.ClientError, OSError) as e:
            raise UnreachableError(f"{self._server} has cut the connection: {shorten(str(e))}") from e

    async def messages(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (channel, data) until the tunnel is closed, by whichever side."""
        async for message in self._socket:
            self.heard += 1
            if message.type is aiohttp.WSMsgType.BINARY and message.data:
                yield message.data[0], message.data[1:]

    async def keep_alive(self) -> None:
        """Send a ping now and then, until cancelled."""
        with suppress(aiohttp.ClientError, OSError):
            while True:
                await asyncio.sleep(PING_EVERY_S)
                await self._socket.ping()


@asynccontextmanager
async def open_tunnel(
    connection: Connection, path: str, params: Sequence[tuple[str, str]], protocols: Sequence[str]
) -> AsyncIterator[Tunnel]:
    """Open a tunnel that speaks the first of `protocols` that the server knows.

    Raises UnreachableError, CredentialsError, and what `responses.refusal` returns if the server refuses.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, raise_for_status=_refuse) as session:
        try:
            socket = await _shake_hands(session, connection, path, params, protocols, refused=False)
        except CredentialsError:
            socket = await _shake_hands(session, connection, path, params, protocols, refused=True)
        tunnel = Tunnel(socket, connection.server)
        pings = asyncio.create_task(tunnel.keep_alive())
        try:
            yield tunnel
        finally:
            pings.cancel()
            with suppress(aiohttp.ClientError, OSError):
                await socket.close()


async def _shake_hands(
    session: aiohttp.ClientSession,
    connection: Connection,
    path: str,
    params: Sequence[tuple[str, str]],
    protocols: Sequence[str],
    *,
    refused: bool,
) -> aiohttp.ClientWebSocketResponse[bool]:
    # A credential plugin may take seconds, and may prompt.
    access = await asyncio.to_thread(connection.access, refused=refused)
    if access is None:
        raise CredentialsError(
            "the kubeconfig logs in with an auth-provider, as before credential plugins, which cannot be used for"
            " connections into pods. FIX: update the kubeconfig with your cloud's command line tool"
        )
    options: dict[str, Any] = {"headers": await asyncio.to_thread(connection.headers)}
    if access.tls is not None:
        options["ssl"] = access.tls
    if access.tls_name:
        options["server_hostname"] = access.tls_name
    if access.proxy:
        options["proxy"] = access.proxy if "://" in access.proxy else f"http://{access.proxy}"
    options |= {"params": list(params), "protocols": protocols, "max_msg_size": MAX_MESSAGE_BYTES}
    try:
        socket: aiohttp.ClientWebSocketResponse[bool] = await session.ws_connect(access.server + path, **options)
    except aiohttp.WSServerHandshakeError as e:
        raise ClusterError(f"the cluster at {access.server} opens no connection into pods ({e.message})") from e
    except (aiohttp.ClientError, OSError, ValueError) as e:
        why = shorten(str(e)) or type(e).__name__
        raise UnreachableError(f"no answer from the cluster at {access.server}: {why}") from e
    return socket


async def _refuse(response: aiohttp.ClientResponse) -> None:
    """Raise the server's refusal, with its own words; aiohttp would not read them."""
    if response.status >= 400:
        raise refusal(response.status, await response.read(), response.headers, f"GET {response.url.path}")
