"""Raw requests to a Kubernetes API server: JSON in, JSON out, and the errors of this project.

`credentials` reads the server's address and the credentials. The `kubernetes` package is used only for logins from
before credential plugins. Its typed models are not used: it decodes a few hundred pods per second, `responses`
several thousand. No other module may import it, or urllib3: import-linter checks that.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib import parse

import urllib3

import elasticctl
from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ClusterError, CredentialsError, NotFoundError, TooLargeError, UnreachableError
from elasticctl.api.text import quote, shorten
from elasticctl.kubeapi.credentials import (
    SERVICE_ACCOUNT,
    Access,
    from_kubeconfig,
    from_login,
    from_service_account,
    plugin_error,
)
from elasticctl.kubeapi.responses import parse_json, refusal
from elasticctl.settings.kubeconfig import kubeconfig_paths

CONNECT_TIMEOUT_S = 4.0
"""For connecting, TLS handshake included. If a name has two addresses, both are tried, within 10 s in all."""
ANSWER_TIMEOUT_S = 9.0
"""The longest wait for an answer, unless the caller allows more."""
MAX_STREAMS = 48
"""Logs read at a time: each takes a connection, and a thread while it is followed."""
MAX_LINE_BYTES = 64 << 20
"""Longer lines of a stream are split. A watch's events are far smaller: etcd takes 1.5 MiB."""

PAGE_OBJECTS = 500

JSON = "application/json"
MERGE_PATCH, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
CLIENT = "elasticctl"

_BLOCK_BYTES = 1 << 16
_OBJECT = re.compile(r"^\S+\(.*?\): |^<[^>]*>: ")
# A peer that vanished is noticed within 35 s: 20 s idle, then three probes, 5 s apart.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPALIVE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Stream:
    """The lines of an answer without an end: a watch, or a followed log.

    Iterate in one thread; `close` may be called from any, and ends the iteration.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, server: str, max_line_bytes: int) -> None:
        self._response, self._server, self._max = response, server, max_line_bytes
        self._lock = threading.Lock()
        self._closed = self._reading = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield lines with their newline, overlong ones in pieces; UnreachableError when the stream breaks.

        The last line has no newline if it was cut off.
        """
        rest = b""
        for block in self._blocks():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield line + b"\n"
            while len(rest) > self._max:
                yield rest[: self._max]
                rest = rest[self._max :]
        if rest:
            yield rest

    def close(self) -> None:
        """End the stream: the thread that waits for the next line wakes up and closes the connection."""
        with self._lock:
            self._closed = True
            if not self._reading:
                self._response.close()
                return
        with suppress(OSError, ValueError, RuntimeError):  # it has already ended
            self._response.shutdown()

    def _blocks(self) -> Iterator[bytes]:
        with self._lock:
            if self._closed:
                return
            self._reading = True
        try:
            yield from self._response.stream(_BLOCK_BYTES)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as e:
            if not self._closed:
                raise UnreachableError(f"{self._server} ended its response early: {_reason(e)}") from e
        finally:
            with self._lock:
                self._reading = False
            self._response.close()


@dataclass(frozen=True, slots=True)
class Transport:
    """Connections to a server, and the function that returns the Authorization header ("": none)."""

    server: str
    pool: urllib3.PoolManager
    authorization: Callable[[], str]
    access: Access | None = None
    """What it was opened with; None for a login from before credential plugins."""


class Connection:
    """An API server and one set of credentials; thread-safe.

    `find` reads the address and the credentials; it is called again when the server no longer accepts them.
    """

    def __init__(self, find: Callable[[], Transport], client: str = CLIENT) -> None:
        self._find, self._client = find, client
        self._lock = threading.Lock()
        self._way = find()

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self._way.server

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | list[Any] | None = None,
        params: Mapping[str, str] | None = None,
        *,
        content_type: str = JSON,
        timeout_s: float = ANSWER_TIMEOUT_S,
        most_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Make one request and return the answer's JSON; `timeout_s` is how long the server may be silent.

        Raises UnreachableError (the request may have been carried out, unless the connection failed), the error that
        `responses.refusal` returns if the server refuses, and TooLargeError if the answer has more than `most_bytes`,
        which is all that is read of it.
        """
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if body is not None else {}
        response = self._send(method, _url(path, params), content, headers, timeout_s)
        try:
            text = response.data if most_bytes is None else response.read(most_bytes + 1)
        except (urllib3.exceptions.HTTPError, OSError) as e:
            raise UnreachableError(f"the answer from {self.server} was lost: {_reason(e)}") from e
        if most_bytes is not None and len(text) > most_bytes:
            response.close()
            raise TooLargeError(f"the answer to {method} {path} has more than {most_bytes} bytes")
        if response.status >= 400:
            raise refusal(response.status, text, response.headers, f"{method} {path}")
        try:
            answer = parse_json(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ClusterError(f"{self.server} is not a Kubernetes API server: it answers {method} {path} without JSON")
        return answer

    def stream(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> Stream:
        """Start a watch or read a log; `timeout_s` is the longest silence between two lines (None: any).

        Raises what `request` raises if the server refuses.
        """
        response = self._send("GET", _url(path, params), None, {}, timeout_s)
        if response.status >= 400:
            raise refusal(response.status, response.data, response.headers, f"GET {path}")
        return Stream(response, self.server, max_line_bytes)

    def access(self, *, refused: bool = False) -> Access | None:
        """Address and credentials for protocols other than HTTP; None for a login from before credential plugins.

        `refused`: the server has not accepted the credentials, which are read again.
        """
        if refused:
            with self._lock:
                self._way = self._find()
        return self._way.access

    def headers(self) -> dict[str, str]:
        """The headers that each request has; a token that is about to expire is renewed. Raises CredentialsError."""
        return {"User-Agent": f"{self._client}/{elasticctl.__version__}", **self._authorization()}

    def close(self) -> None:
        """Close idle connections."""
        self._way.pool.clear()

    def _send(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float | None
    ) -> urllib3.BaseHTTPResponse:
        """Send a request; if the server does not accept the credentials, read them again and retry once."""
        first = self._way
        response = self._send_once(method, url, body, headers, timeout_s)
        if response.status != 401:
            return response
        response.close()
        with self._lock:
            if self._way is first:  # no other thread has read them again meanwhile
                self._way = self._find()
        return self._send_once(method, url, body, headers, timeout_s)

    def _send_once(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float | None
    ) -> urllib3.BaseHTTPResponse:
        who = {"Accept": JSON + ", */*", **self.headers()}
        try:
            return self._way.pool.urlopen(
                method,
                self.server + url,
                body=body,
                headers={**who, **headers},
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=timeout_s),
                retries=False,
                redirect=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as e:
            raise UnreachableError(f"no answer from the cluster at {self.server}: {_reason(e)}") from e

    def _authorization(self) -> dict[str, str]:
        """The Authorization header; a token that is about to expire is renewed."""
        with self._lock:
            try:
                value = self._way.authorization()
            except OSError as e:
                raise CredentialsError(f"the token of the credentials cannot be read: {shorten(str(e))}") from e
        if not (value.isascii() and value.isprintable()):
            raise CredentialsError(
                "the token of the credentials contains characters that no HTTP header can hold. FIX: log in again"
            )
        return {"Authorization": value} if value else {}


def connect(kube_context: str = "", connections: int = 16, client: str = CLIENT) -> Connection:
    """Open a kubeconfig context ("": the current one; without a kubeconfig, the cluster that this runs in).

    `client` is what the server knows this program by: in its audit log, and as the field manager of what it writes.

    Sends nothing to the server, but may run the context's credential plugin. Raises NotFoundError if there is no such
    context, CredentialsError if its plugin fails.
    """
    inside = not kube_context and in_cluster() and not os.environ.get("KUBECONFIG")

    def find() -> Transport:
        access = from_service_account() if inside else from_kubeconfig(kubeconfig_paths(), kube_context)
        return (
            _open_legacy_transport(kube_context, connections) if access is None else open_transport(access, connections)
        )

    return Connection(find, client)


def connect_as(token: str, on_refused: Callable[[], None]) -> Connection:
    """Connect to the cluster of this pod with a user's bearer token, and so with that user's rights only.

    Sends nothing yet. When the server does not accept the token, `on_refused` is called in the requesting thread, and
    CredentialsError is raised, as it is outside a pod.
    """
    access = from_login(token)
    opened = False

    def find() -> Transport:
        nonlocal opened
        if opened:
            on_refused()
            raise CredentialsError(
                "the cluster does not accept this token, or no longer accepts it. FIX: log in with another one"
            )
        opened = True
        return open_transport(access)

    return Connection(find)


def open_transport(access: Access, connections: int = 16) -> Transport:
    """A connection pool for this access; opens no connection. Raises CredentialsError for an invalid proxy."""
    options: dict[str, Any] = {"maxsize": connections, "socket_options": _socket_options()}
    if access.tls is not None:
        options["ssl_context"] = access.tls
        if access.tls_name:
            options |= {"server_hostname": access.tls_name, "assert_hostname": access.tls_name}
        if not access.verified:
            options["cert_reqs"] = "CERT_NONE"
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # the kubeconfig says so
    pool = _proxy_pool(access.proxy, options) if access.proxy else urllib3.PoolManager(**options)
    return Transport(access.server, pool, access.authorization, access)


def _proxy_pool(proxy: str, options: Mapping[str, Any]) -> urllib3.ProxyManager:
    """A connection pool through a proxy; no error repeats its URL, which may contain a password."""
    where = "FIX: correct proxy-url in the kubeconfig, or *_PROXY"
    try:
        url = urllib3.util.parse_url(proxy if "://" in proxy else f"http://{proxy}")
    except urllib3.exceptions.LocationParseError:  # whose message has it
        raise CredentialsError(f"the proxy of the cluster is not a URL; {where}") from None
    if url.scheme not in ("http", "https"):
        kind = quote(url.scheme or "")
        raise CredentialsError(f"the proxy of the cluster uses {kind}, not http:// or https://; {where}")
    headers = urllib3.make_headers(proxy_basic_auth=parse.unquote(url.auth)) if url.auth else None
    return urllib3.ProxyManager(url._replace(auth=None).url, proxy_headers=headers, **options)


def in_cluster() -> bool:
    """True in a pod that has a service account."""
    return in_pod() and (SERVICE_ACCOUNT / "token").exists()


def in_pod() -> bool:
    """True in a pod that knows its cluster, though it may have no token."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "ca.crt").exists()


def resource_path(api: str, namespace: str | None, plural: str, name: str = "", part: str = "") -> str:
    """The path of a collection, an object or a subresource; `api` is `v1` or `GROUP/VERSION`.

    Raises NotFoundError for a name that no object can have: the path could lead elsewhere.
    """
    words = ["namespaces", namespace, plural] if namespace is not None else [plural]
    words += [word for word in (name, part) if word]
    for word in words:
        if word in ("", ".", "..") or "/" in word or "%" in word:
            raise NotFoundError(f"{quote(word)} cannot be the name of an object in a cluster")
    root = f"/apis/{api}" if "/" in api else f"/api/{api}"
    return "/".join((root, *(parse.quote(word, safe="") for word in words)))


def _open_legacy_transport(kube_context: str, connections: int) -> Transport:
    """A login from before credential plugins, which only the `kubernetes` package knows. Raises CredentialsError.

    That package only logs a failed login; the user sees the server's refusal.
    """
    try:
        import kubernetes.client
        import kubernetes.config
    except ModuleNotFoundError as e:
        raise CredentialsError(
            "the kubeconfig logs in with an auth-provider, as before credential plugins, which needs the package"
            f" {e.name}, which is not installed. FIX: pip install 'elasticctl[kube]'"
        ) from e

    configuration = kubernetes.client.Configuration()
    try:
        load: Any = kubernetes.config.load_kube_config  # in part typed, depending on its version
        load(os.pathsep.join(map(str, kubeconfig_paths())), kube_context or None, configuration)
    except Exception as e:
        raise plugin_error(f"{type(e).__name__}: {e}") from e
    configuration.connection_pool_maxsize = connections
    configuration.socket_options = _socket_options()
    pool: urllib3.PoolManager = kubernetes.client.ApiClient(configuration).rest_client.pool_manager

    def authorization() -> str:
        return str(configuration.auth_settings().get("BearerToken", {}).get("value") or "")

    return Transport(str(configuration.host), pool, authorization)


def _socket_options() -> list[tuple[int, int, int]]:
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    known = [(getattr(socket, name, None), value) for name, value in _KEEP_ALIVE]
    return options + [(socket.IPPROTO_TCP, option, value) for option, value in known if option is not None]


def _url(path: str, params: Mapping[str, str] | None) -> str:
    return f"{path}?{parse.urlencode(params)}" if params else path


def _reason(error: BaseException) -> str:
    """The essence of a connection error, on one line."""
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # which is one of the next kind
    if isinstance(error, urllib3.exceptions.ConnectTimeoutError) and not refused:
        return f"no connection within {CONNECT_TIMEOUT_S:.0f} s"
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return "no answer in time"
    # The library puts the name of its own object in front of what went wrong.
    return shorten(_OBJECT.sub("", str(error)) or type(error).__name__)


class Requests(Protocol):
    """What `list_pages` needs of a connection."""

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | list[Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Make one request and return the answer's JSON."""


def list_pages(api: Requests, path: str, params: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a collection page by page, in as many requests as it takes; raises what `Connection.request` raises."""
    token = ""
    while True:
        more = {"continue": token} if token else {}
        page = api.request("GET", path, None, {**(params or {}), "limit": str(PAGE_OBJECTS), **more})
        yield page
        token = page.get("metadata", {}).get("continue") or ""
        if not token:
            return


def list_objects(connection: Connection, path: str, params: Mapping[str, str] | None = None) -> list[Manifest]:
    """Return all objects of a collection; raises what `Connection.request` raises."""
    return [item for page in list_pages(connection, path, params) for item in page.get("items") or []]
