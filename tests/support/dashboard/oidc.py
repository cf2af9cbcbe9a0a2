"""What stands in front of a dashboard of many: an OIDC server, and a proxy that logs people in by it.

The proxy does what oauth2-proxy's documentation says of `--pass-authorization-header`: it logs people in by the code
flow, keeps their tokens itself, and sends the ID token along as `Authorization: Bearer`, in place of any such header.
"""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiohttp import ClientSession, web
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from tests.support.dashboard.team import Guest
from tests.support.ports import free_port
from tests.support.waiting import wait_until

CLIENT = "elasticctl-dashboard"
COOKIE = "_oauth2_proxy"
_NOT_PASSED = {"host", "connection", "authorization", "transfer-encoding", "content-length"}


SERVE = """
import sys, oidc_provider_mock
port, *tls = sys.argv[1:]
oidc_provider_mock.app().run("127.0.0.1", int(port), use_reloader=False, ssl_context=tuple(tls) or None)
"""


@contextmanager
def provider(certificate: Path | None = None) -> Iterator[str]:
    """An OIDC server that lets anybody in under the name that they type; yields its issuer.

    `certificate` is a file with the one that it shows as localhost, and its key; None: without TLS.
    """
    port = free_port()
    issuer = f"{'http' if certificate is None else 'https'}://localhost:{port}"

    def answers() -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 5).close()
            return True
        return False

    tls = () if certificate is None else (str(certificate), str(certificate))
    argv = [sys.executable, "-W", "ignore", "-c", SERVE, str(port), *tls]
    environ = {**os.environ, "AUTHLIB_INSECURE_TRANSPORT": "1"}
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ) as process:
        try:
            wait_until(answers)
            yield issuer
        finally:
            process.kill()


@dataclass(slots=True)
class Verifier:
    """Whom an API server with `--oidc-issuer-url` knows: those whose ID tokens are signed by the issuer, for us."""

    issuer: str
    keys: Any
    people: dict[str, Guest]

    def find(self, token: str) -> Guest | None:
        """The person of a token; None for one that is not the issuer's, not for us, or has expired."""
        wanted = jwt.JWTClaimsRegistry(
            iss={"essential": True, "value": self.issuer},
            aud={"essential": True, "value": CLIENT},
            exp={"essential": True},
        )
        try:
            claims = jwt.decode(token, KeySet.import_key_set(self.keys), ["RS256"]).claims
            wanted.validate(claims)
        except (JoseError, ValueError):
            return None
        return self.people.get(claims["sub"])


@dataclass(slots=True)
class Proxy:
    """In front of `upstream`; `trusts` is what the issuer's certificate is checked against.

    `tokens` are the ID tokens by the sessions' cookies.
    """

    issuer: str
    upstream: str
    trusts: ssl.SSLContext | bool = True
    tokens: dict[str, str] = field(default_factory=dict)
    _states: set[str] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/oauth2/callback", self._callback),
                web.get("/oauth2/sign_out", self._sign_out),
                web.route("*", "/{path:.*}", self._pass),
            ]
        )
        return app

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        token = self.tokens.get(request.cookies.get(COOKIE, ""))
        if token is None:
            state = f"state-{next(self._numbers)}"
            self._states.add(state)
            asked = {"response_type": "code", "client_id": CLIENT, "scope": "openid email", "state": state}
            here = {"redirect_uri": f"http://{request.host}/oauth2/callback"}
            raise web.HTTPFound(f"{self.issuer}/oauth2/authorize?{urlencode({**asked, **here})}")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED}
        headers |= {"Host": request.host, "Authorization": f"Bearer {token}"}
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, f"{self.upstream}{request.rel_url}", data=await request.read(), headers=headers
            ) as answer,
        ):
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _NOT_PASSED}
            passed = web.StreamResponse(status=answer.status, headers=kept)
            await passed.prepare(request)
            async for block in answer.content.iter_any():
                await passed.write(block)
        return passed

    async def _callback(self, request: web.Request) -> web.Response:
        self._states.remove(request.query["state"])
        given = {"grant_type": "authorization_code", "code": request.query["code"], "client_id": CLIENT}
        given |= {"client_secret": "x", "redirect_uri": f"http://{request.host}/oauth2/callback"}
        async with (
            ClientSession() as session,
            session.post(f"{self.issuer}/oauth2/token", data=given, ssl=self.trusts) as answer,
        ):
            token = (await answer.json())["id_token"]
        cookie = f"session-{next(self._numbers)}"
        self.tokens[cookie] = token
        back = web.Response(status=302, headers={"Location": "/in/ml/"})
        back.set_cookie(COOKIE, cookie, httponly=True, samesite="Lax")
        return back

    async def _sign_out(self, request: web.Request) -> web.Response:
        self.tokens.pop(request.cookies.get(COOKIE, ""), None)
        return web.Response(status=302, headers={"Location": "/in/ml/"})
