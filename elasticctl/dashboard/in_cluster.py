"""The shared dashboard in the cluster: users log in, and can see and do exactly what the cluster allows them.

    GET  /                    the page, and its files next to it; what it requests is in `user_api`
    GET  /in/{namespace}/     the same for one namespace
    GET  BASE/session         who is logged in: {"user": …}; 401 with {"error": …, "asks": …} if no one is
    POST BASE/login           {"token": …}: a token of the cluster; it begins a session, and answers with a cookie
    POST BASE/logout          ends it
    GET  /healthz             for the kubelet

All requests to the API server for a user are made with that user's token, so the API server decides who may see or do
what. The token appears in no answer, URL, cookie or log. Behind a proxy that logs users in, the proxy sends it with
each request, and we set no cookie.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from elasticctl.api.errors import ClusterError, CredentialsError, UsageError
from elasticctl.dashboard.access import TOKEN_HEADER, is_cross_site, is_own_origin
from elasticctl.dashboard.page_files import file_routes, harden
from elasticctl.dashboard.sessions import LogIn, Login, Sessions
from elasticctl.dashboard.user_api import Handler, UserApi, error_response, page_routes, respond

COOKIE = "__Host-elasticctl"
"""The prefix has browsers keep it to this very host, and send it over TLS alone (or to their own machine)."""
MAX_BODY_BYTES = 64 << 10
SIGN_OUT = "/oauth2/sign_out"
READ_ONLY = "this dashboard is read-only. FIX: use the command line, or have it installed with --dashboard-changes"

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_OF_NAMESPACE = "/in/{scope:[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?}/"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """`allow_changes`: users may change jobs, within their rights. `behind_proxy`: a proxy sends their tokens."""

    allow_changes: bool = False
    behind_proxy: bool = False


@dataclass(slots=True)
class ClusterDashboard:
    """The handlers of one pod."""

    log_in: LogIn
    rules: AccessRules = field(default_factory=AccessRules)
    poll_s: float = 2.0
    sessions: Sessions = field(init=False)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.log_in)

    def app(self) -> web.Application:
        """The aiohttp application; TLS ends in front of it."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/healthz", self._health)
        for base in (_OF_NAMESPACE, "/"):
            app.add_routes(
                [
                    web.get(base + "session", self._session),
                    web.post(base + "login", self._login),
                    web.post(base + "logout", self._logout),
                    *page_routes(base, self._api_of),
                    *file_routes(base),
                ]
            )
        app.on_response_prepare.append(harden)
        app.on_shutdown.append(self._end)
        return app

    async def _end(self, _: web.Application) -> None:
        self.sessions.end_all()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check every request before a handler answers it."""
        if is_cross_site(request.headers):
            return error_response(403, "the request comes from another site")
        if request.method not in ("GET", "HEAD") and not is_own_origin(request.headers):
            return error_response(403, "the request does not come from the page")
        return await respond(handler, request)

    async def _api_of(self, request: web.Request) -> UserApi:
        """The API of the requesting user. Raises HTTPUnauthorized without a session, or HTTPForbidden."""
        try:
            session = await self._session_of(request)
        except CredentialsError as e:
            raise web.HTTPUnauthorized(reason=str(e)) from e
        if session is None:
            raise web.HTTPUnauthorized(reason="log in first")
        if request.method not in ("GET", "HEAD"):
            if not self.rules.allow_changes:
                raise web.HTTPForbidden(reason=READ_ONLY)
            given = request.headers.get(TOKEN_HEADER, "").encode("utf-8", "surrogatepass")
            if not hmac.compare_digest(given, session.token.encode()):
                raise web.HTTPForbidden(reason="the request does not come from the page")
        hello = {"user": session.user.name, "changes": self.rules.allow_changes, "storages": False}
        return session.api(request.match_info.get("scope"), hello, self.poll_s)

    async def _session_of(self, request: web.Request) -> Login | None:
        """The session of the requesting user, or None. Behind a proxy, raises ClusterError for a bad token."""
        if not self.rules.behind_proxy:
            return self.sessions.find(request.cookies.get(COOKIE, ""))
        token = _proxied(request)
        if not token:
            return None
        return self.sessions.find(token) or await self.sessions.admit(token, token)

    async def _session(self, request: web.Request) -> web.Response:
        why = ""
        try:
            session = await self._session_of(request)
        except ClusterError as e:
            session, why = None, str(e)
        if session is not None:
            return web.json_response({"user": session.user.name})
        if self.rules.behind_proxy and not why:
            why = "the proxy in front sends no token. FIX: have it pass the ID token as Authorization: Bearer"
        asks = "proxy" if self.rules.behind_proxy else "token"
        return web.json_response({"error": why, "asks": asks}, status=401)

    async def _login(self, request: web.Request) -> web.Response:
        if self.rules.behind_proxy:
            raise web.HTTPNotFound
        token = _token_in(await request.read())
        self.sessions.end(request.cookies.get(COOKIE, ""))
        shown = secrets.token_urlsafe(32)
        try:
            session = await self.sessions.admit(shown, token)
        except CredentialsError as e:
            return error_response(401, str(e))
        answer = web.json_response({"user": session.user.name})
        answer.set_cookie(COOKIE, shown, path="/", secure=True, httponly=True, samesite="Strict")
        return answer

    async def _logout(self, request: web.Request) -> web.Response:
        proxied = self.rules.behind_proxy
        self.sessions.end(_proxied(request) if proxied else request.cookies.get(COOKIE, ""))
        answer = web.json_response({"next": SIGN_OUT if proxied else ""})
        answer.del_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="Strict")
        return answer


def _proxied(request: web.Request) -> str:
    """The token that a proxy sends; "" for none."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if kind.lower() == "bearer" and _TOKEN.fullmatch(token) else ""


def _token_in(body: bytes) -> str:
    """The token of a login. Raises UsageError, without the token."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    token = found.get("token") if isinstance(found, dict) else None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token.strip()):
        raise UsageError("this is not a token. FIX: paste what `kubectl create token NAME` prints")
    return token.strip()
