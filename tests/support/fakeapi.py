"""A small API server for tests: real HTTP on loopback, objects in memory, and faults on order.

It does what the client relies on: versions, dry runs, merge patches, preconditions, pages, watches, logs as a kubelet
gives them out, refusals as `Status` objects. What Kubernetes itself checks (schemas, rights) is asked of a real one in
tests/cluster.
"""

from __future__ import annotations

import itertools
import json
import re
import ssl
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from elasticctl.api.codec import from_rfc3339, to_rfc3339
from elasticctl.kubeapi.connection import APPLY_PATCH

Object = dict[str, Any]
_TERMS = re.compile(r",(?![^(]*\))")


@dataclass
class Request:
    """One request, as it came in."""

    method: str
    path: str
    params: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class Log:
    """A container's output: stamped lines. `cut_after` lines a stream is broken off, once for each number given."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False
    cut_after: list[int] = field(default_factory=list)


class FakeApi:
    """Serves until `close`; `refuse` may answer a request instead: (status, Status object, headers), or None.

    `tls`: over TLS, with what that shows and asks for.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.objects: dict[str, Object] = {}
        self.logs: defaultdict[str, Log] = defaultdict(Log)
        self.requests: list[Request] = []
        self.refuse: Callable[[Request], tuple[int, Any, dict[str, str]] | None] = lambda request: None
        self.streams = 0
        self.streams_lists = False
        self.user = "maria@example.org"
        self._changes: list[tuple[int, str, Object]] = []
        self._versions = itertools.count(1)
        self.changed = threading.Condition()
        self._server = _Server(self, tls)
        self._scheme = "http" if tls is None else "https"
        self._closed = False
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    # What a test does without the client.

    def put(self, path: str, item: Object) -> Object:
        """Store an object as it is, with a new version, and notify the watches."""
        with self.changed:
            kind = "MODIFIED" if path in self.objects else "ADDED"
            item.setdefault("metadata", {})["resourceVersion"] = str(next(self._versions))
            known = self.objects.get(path, item)["metadata"].get("uid")
            item["metadata"].setdefault("uid", known or f"uid-{item['metadata']['resourceVersion']}")
            self.objects[path] = item
            self._tell(kind, path, item)
            return item

    def remove(self, path: str) -> None:
        with self.changed:
            item = self.objects.pop(path)
            item["metadata"]["resourceVersion"] = str(next(self._versions))
            self._tell("DELETED", path, item)

    def say(self, pod: str, *lines: str, at: str = "", end: bool = False) -> None:
        """Add lines to a pod's log, stamped `at` or now."""
        with self.changed:
            stamp = at or to_rfc3339(time.time())
            self.logs[pod].lines += [(stamp, line) for line in lines]
            self.logs[pod].ended |= end
            self.changed.notify_all()

    def _tell(self, kind: str, path: str, item: Object) -> None:
        self._changes.append((int(item["metadata"]["resourceVersion"]), kind, {**item, "__path": path}))
        self.changed.notify_all()

    # What the client asks for.

    def answer(self, request: Request) -> tuple[int, Any]:
        method, path = request.method, request.path
        with self.changed:
            if method == "GET":
                return self._get(path, request.params)
            if method == "POST":
                return self._create(path, request)
            if request.headers.get("Content-Type") == APPLY_PATCH:
                return self._apply(path, request)
            if path not in self.objects:
                return _not_found(path)
            item = self.objects[path]
            if method == "DELETE":
                wanted = (request.body or {}).get("preconditions", {}).get("uid", item["metadata"]["uid"])
                if wanted != item["metadata"]["uid"]:
                    return _status(409, "Conflict", "the UID in the precondition does not match")
                self.remove(path)
                return 200, item
            return self._patch(path, item, request)

    def _get(self, path: str, params: dict[str, str]) -> tuple[int, Any]:
        if path in self.objects:
            return 200, self.objects[path]
        if self._is_object(path):
            return _not_found(path)
        items = [item for key, item in self.objects.items() if is_in(key, path)]
        items = [item for item in items if selects(params, item)]
        start, limit = int(params.get("continue") or 0), int(params.get("limit") or len(items) or 1)
        more = {"continue": str(start + limit)} if start + limit < len(items) else {}
        version = self._changes[-1][0] if self._changes else 1
        return 200, {"items": items[start : start + limit], "metadata": {"resourceVersion": str(version), **more}}

    def _create(self, path: str, request: Request) -> tuple[int, Any]:
        item = json.loads(json.dumps(request.body))
        if path.endswith("/selfsubjectreviews"):
            return 201, {"status": {"userInfo": {"username": self.user}}}
        metadata = item["metadata"]
        metadata.setdefault("name", f"{metadata.get('generateName', '')}{len(self.objects)}")
        key = f"{path}/{metadata['name']}"
        if key in self.objects:
            return _status(409, "AlreadyExists", f'"{item["metadata"]["name"]}" already exists')
        item["metadata"] |= {"generation": 1, "creationTimestamp": to_rfc3339(float(int(time.time())))}
        if request.params.get("dryRun"):
            return 201, item
        return 201, self.put(key, item)

    def _patch(self, path: str, item: Object, request: Request) -> tuple[int, Any]:
        wanted = request.body.get("metadata", {}).get("resourceVersion", item["metadata"]["resourceVersion"])
        if wanted != item["metadata"]["resourceVersion"]:
            return _status(409, "Conflict", f'"{item["metadata"]["name"]}": the object has been modified')
        if request.body.get("metadata", {}).get("uid", item["metadata"]["uid"]) != item["metadata"]["uid"]:
            return _status(409, "Conflict", "the UID in the precondition does not match")
        return 200, self.put(path, _merged(item, request.body))

    def _apply(self, path: str, request: Request) -> tuple[int, Any]:
        old = self.objects.get(path)
        merged = _merged(old or {}, request.body)
        if old == merged:
            return 200, old
        generation = (old or {"metadata": {}})["metadata"].get("generation", 0) + 1
        merged["metadata"] |= {"generation": generation}
        if merged["kind"] == "CustomResourceDefinition":
            # As with a real one, it has no conditions at first, and not even an empty list of them.
            merged["status"] = (old or {}).get("status") or {"conditions": None}
            threading.Timer(0.05, self._establish, (path,)).start()
        return 201 if old is None else 200, self.put(path, merged)

    def _establish(self, path: str) -> None:
        with self.changed:
            if path in self.objects:
                conditions = [{"type": "Established", "status": "True"}]
                self.put(path, {**self.objects[path], "status": {"conditions": conditions}})

    @staticmethod
    def _is_object(path: str) -> bool:
        words = path.strip("/").split("/")
        after = (
            words[words.index("namespaces") + 2 :] if "namespaces" in words else words[2 if words[0] == "api" else 3 :]
        )
        return len(after) != 1

    def watch(self, request: Request) -> Iterator[Any]:
        since = int(request.params.get("resourceVersion") or 0)
        until = time.monotonic() + float(request.params.get("timeoutSeconds", 60))
        sent = 0
        while time.monotonic() < until and not self._closed:
            with self.changed:
                news = self._changes[sent:]
                sent = len(self._changes)
                if not news:
                    self.changed.wait(0.1)
            for version, kind, item in news:
                if version > since and is_in(item["__path"], request.path):
                    yield {"type": kind, "object": {k: v for k, v in item.items() if k != "__path"}}

    def log(self, pod: str, params: dict[str, str]) -> Iterator[bytes]:
        """Lines as a kubelet sends them; ends early, as a broken connection does, where the log says so."""
        log, since = self.logs[pod], from_rfc3339(params.get("sinceTime"))
        sent, read = 0, 0
        if "tailLines" in params:
            read = max(0, len(log.lines) - int(params["tailLines"]))
        while not self._closed:
            with self.changed:
                lines, ended = log.lines[read:], log.ended or "follow" not in params
                read = len(log.lines)
                if not lines and not ended:
                    self.changed.wait(0.1)
            for stamp, text in lines:
                if since is not None and (from_rfc3339(stamp) or 0.0) < since:
                    continue
                if log.cut_after and sent == log.cut_after[0]:
                    log.cut_after.pop(0)
                    raise ConnectionAbortedError
                yield f"{stamp} {text}\n".encode()
                sent += 1
            if ended and not lines:
                return
            if ended and "follow" not in params:
                return


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, api: FakeApi, tls: ssl.SSLContext | None) -> None:
        self.api = api
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:  # hands are shaken in the thread of each connection
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The client reports a handshake that fails, and a client may go away in the middle.
        if not isinstance(sys.exc_info()[1], ssl.SSLError | ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _serve(self) -> None:
        api = self.server.api
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        request = Request(self.command, url.path, dict(parse_qsl(url.query)), dict(self.headers), body)
        if "sendInitialEvents" in request.params and not api.streams_lists:
            self._send(422, {"message": "sendInitialEvents is forbidden"}, {})
            return
        api.requests.append(request)
        refused = api.refuse(request)
        if refused is not None:
            self._send(*refused)
        elif request.params.get("watch"):
            self._stream(json.dumps(event).encode() + b"\n" for event in api.watch(request))
        elif url.path.endswith("/log"):
            self._log(url.path.removesuffix("/log"), request)
        else:
            self._send(*api.answer(request), {})

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _log(self, pod: str, request: Request) -> None:
        api = self.server.api
        if pod not in api.objects:
            self._send(*_not_found(pod), {})
            return
        with api.changed:
            api.streams += 1
        try:
            self._stream(api.log(pod.rpartition("/")[2], request.params))
        finally:
            with api.changed:
                api.streams -= 1

    def _send(self, status: int, content: Any, headers: dict[str, str]) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, blocks: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        try:
            for block in blocks:
                self.wfile.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        return


def selects(params: Mapping[str, str], item: Object) -> bool:
    """True for an object that the label and field selectors of a request are met by: `a=b`, `a!=b` and `a in (b,c)`."""
    labels = item["metadata"].get("labels", {})
    terms = [
        *((term, labels.get) for term in _TERMS.split(params.get("labelSelector", "")) if term),
        *((term, lambda path: _field(item, path)) for term in params.get("fieldSelector", "").split(",") if term),
    ]
    return all(_meets(term, read) for term, read in terms)


def _meets(term: str, read: Callable[[str], str | None]) -> bool:
    if term.endswith(")"):
        name, _, values = term[:-1].partition(" in (")
        return read(name) in values.split(",")
    name, _, value = term.partition("=")
    return read(name[:-1]) != value if name.endswith("!") else read(name) == value


def _field(item: Object, path: str) -> str:
    """A field by its path; "" where there is none."""
    found: Any = item
    for name in path.split("."):
        found = found.get(name, "") if isinstance(found, dict) else ""
    return str(found)


def is_in(path: str, collection: str) -> bool:
    """True for an object of a collection, which may be that of all namespaces."""
    plural = collection.rpartition("/")[2]
    if "/namespaces/" in collection:
        return path.startswith(f"{collection}/") and "/" not in path.removeprefix(f"{collection}/")
    return path.startswith(collection.removesuffix(plural)) and path.split("/")[-2] == plural


def _merged(item: Any, patch: Any) -> Any:
    if not isinstance(item, dict) or not isinstance(patch, dict):
        return patch
    merged = {**item, **{key: _merged(item.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def _status(code: int, reason: str, message: str) -> tuple[int, Object]:
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message, "details": {"name": "x"}}


def _not_found(path: str) -> tuple[int, Object]:
    return _status(404, "NotFound", f'"{path.rpartition("/")[2]}" not found')
