"""A fast S3 server in memory: the less it costs, the better one sees what uploads cost the client.

It uses raw sockets and a thread per connection; a body is read from the socket directly into memory that was touched
before. It supports what the contenders send: objects put, copied, read in ranges, deleted and listed, multipart
uploads, and If-None-Match. It ignores signatures and checksums, and an object must not be deleted while it is being
read. Old saves are deleted with /-/drop?prefix=, for the contenders that leave that to the script.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from benchmarks.checkpoints.s3_objects import CHUNK_BYTES, Blob, Objects, Pool, PoolFullError

_REASONS = {
    200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed",
    416: "Range Not Satisfiable", 501: "Not Implemented", 507: "Insufficient Storage",
}  # fmt: skip
_CODES = {404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange", 501: "NotImplemented", 507: "QuotaExceeded"}
_SOCKET_BUFFER_BYTES = 4 << 20
_NO_MORE = {"IsTruncated": "false"}


@dataclass(frozen=True, slots=True)
class S3Request:
    """A request without its body; header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def if_absent(self) -> bool:
        return self.headers.get("if-none-match") == "*"


@dataclass(frozen=True, slots=True)
class S3Response:
    """A response: `body`, or the bytes from `start` to `stop` of `blob`."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    blob: Blob | None = None
    start: int = 0
    stop: int = 0


class Reader:
    """Reads lines and bodies from a socket; bodies into the memory in which they stay."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""

    def head(self) -> bytes:
        """Return everything before the next empty line; empty if the client has gone."""
        return self._until(b"\r\n\r\n")

    def line(self) -> bytes:
        return self._until(b"\r\n")

    def fill(self, views: Iterator[memoryview]) -> None:
        """Fill all the views. Raises ConnectionError if the client goes before."""
        for view in views:
            taken = min(len(view), len(self._rest))
            view[:taken] = self._rest[:taken]
            self._rest = self._rest[taken:]
            while taken < len(view):
                # One call for a whole chunk: waking up for every packet would cost more than copying.
                count = self._connection.recv_into(view[taken:], 0, socket.MSG_WAITALL)
                if not count:
                    raise ConnectionError("the client has gone")
                taken += count

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._rest:
            data = self._connection.recv(65536)
            if not data:
                return b""
            self._rest += data
        found, _, self._rest = self._rest.partition(mark)
        return found


class S3Server:
    """The server, in threads of this process, while it is entered."""

    def __init__(self, size_bytes: int) -> None:
        """Touch `size_bytes` of memory, which is the limit of what can be stored."""
        self._objects = Objects(Pool(size_bytes))
        self._etags = itertools.count(1)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> S3Server:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def drop(self, prefix: str) -> None:
        """Delete the objects whose names, `bucket/key`, start with this."""
        self._objects.drop_prefix(prefix)

    def _serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        reader = Reader(connection)
        with connection, suppress(ConnectionError):
            while head := reader.head():
                request = _parse(head)
                if request.headers.get("expect", "").lower() == "100-continue":
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                try:
                    body = self._receive(reader, request)
                    response = self._answer(request, body)
                except PoolFullError as e:
                    # The body has not been read, so nothing more can be read from this connection.
                    _send(connection, request, S3Response(507, _error(507, str(e))))
                    return
                _send(connection, request, response)

    def _receive(self, reader: Reader, request: S3Request) -> Blob:
        """Read the body into the pool; if it is in signed chunks, their content."""
        if "aws-chunked" not in request.headers.get("content-encoding", ""):
            blob = self._objects.pool.allocate(int(request.headers.get("content-length", "0")))
            reader.fill(iter(blob.views))
            return blob
        blob = self._objects.pool.allocate(int(request.headers["x-amz-decoded-content-length"]))
        done = 0
        while size_bytes := int(reader.line().partition(b";")[0], 16):
            reader.fill(blob.pieces(done, done + size_bytes))
            reader.line()
            done += size_bytes
        while reader.line():  # trailers, such as checksums
            continue
        return blob

    def _answer(self, request: S3Request, body: Blob) -> S3Response:
        if request.path == "-/drop":
            self.drop(request.query["prefix"])
            return S3Response(200)
        kind = _kind(request)
        if kind == "put":
            return self._answer_put(self._objects.put(request.path, body, if_absent=request.if_absent))
        if kind == "put part":
            kept = self._objects.add_part(request.query["uploadId"], int(request.query["partNumber"]), body)
            return self._answer_put(kept or None)
        self._objects.pool.release(body)
        answers: Mapping[str, Callable[[S3Request], S3Response]] = {
            "get": self._read,
            "head": self._read,
            "begin upload": self._begin_upload,
            "complete upload": self._complete_upload,
            "abort upload": self._abort_upload,
            "delete": self._delete_object,
            "copy": self._copy_object,
            "list": self._list_objects,
            "list uploads": lambda request: S3Response(200, _xml("ListMultipartUploadsResult", _NO_MORE)),
            "head bucket": lambda request: S3Response(200, headers=(("x-amz-bucket-region", "us-east-1"),)),
        }
        unknown = S3Response(501, _error(501, f"{request.method} {request.path} {dict(request.query)}"))
        return answers[kind](request) if kind in answers else unknown

    def _answer_put(self, done: bool | None) -> S3Response:
        if done:
            return S3Response(200, headers=(("ETag", f'"{next(self._etags):032x}"'),))
        if done is None:
            return S3Response(404, _error(404, "", "NoSuchUpload"))
        return S3Response(412, _error(412, "it exists"))

    def _read(self, request: S3Request) -> S3Response:
        blob = self._objects.get(request.path)
        if blob is None:
            return S3Response(404, _error(404, request.path))
        always = (("ETag", f'"{id(blob):032x}"'), ("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT"))
        start, stop = _range(request.headers.get("range", ""), blob.size_bytes)
        if "range" not in request.headers:
            return S3Response(200, headers=always, blob=blob, stop=blob.size_bytes)
        if start >= stop:
            return S3Response(416, _error(416, ""), (("Content-Range", f"bytes */{blob.size_bytes}"),))
        headers = (*always, ("Content-Range", f"bytes {start}-{stop - 1}/{blob.size_bytes}"))
        return S3Response(206, headers=headers, blob=blob, start=start, stop=stop)

    def _begin_upload(self, request: S3Request) -> S3Response:
        bucket, _, key = request.path.partition("/")
        fields = {"Bucket": bucket, "Key": key, "UploadId": self._objects.begin_upload(request.path)}
        return S3Response(200, _xml("InitiateMultipartUploadResult", fields))

    def _complete_upload(self, request: S3Request) -> S3Response:
        response = self._answer_put(self._objects.complete(request.query["uploadId"], if_absent=request.if_absent))
        if response.status != 200:
            return response
        bucket, _, key = request.path.partition("/")
        fields = {"Bucket": bucket, "Key": key, "ETag": dict(response.headers)["ETag"]}
        return S3Response(200, _xml("CompleteMultipartUploadResult", fields))

    def _abort_upload(self, request: S3Request) -> S3Response:
        self._objects.abort(request.query["uploadId"])
        return S3Response(204)

    def _delete_object(self, request: S3Request) -> S3Response:
        self._objects.delete(request.path)
        return S3Response(204)

    def _copy_object(self, request: S3Request) -> S3Response:
        source = self._objects.get(unquote(request.headers["x-amz-copy-source"]).lstrip("/"))
        if source is None:
            return S3Response(404, _error(404, "the source"))
        copy = self._objects.pool.allocate(source.size_bytes)
        for target, view in zip(copy.views, source.pieces(0, source.size_bytes), strict=False):
            target[: len(view)] = view
        response = self._answer_put(self._objects.put(request.path, copy, if_absent=request.if_absent))
        fields = {"ETag": dict(response.headers)["ETag"], "LastModified": "2026-11-21T00:00:00Z"}
        return S3Response(200, _xml("CopyObjectResult", fields))

    def _list_objects(self, request: S3Request) -> S3Response:
        bucket, query = request.path.rstrip("/"), request.query
        after = query.get("continuation-token") or query.get("start-after", "")
        most = min(1000, int(query.get("max-keys", "1000")))
        prefix = query.get("prefix", "")
        found, more = self._objects.page(f"{bucket}/{prefix}", f"{bucket}/{after}" if after else "", most)
        keys = [(name.partition("/")[2], size_bytes) for name, size_bytes in found]
        shown = quote if query.get("encoding-type") == "url" else escape
        rows = "".join(
            f"<Contents><Key>{shown(key)}</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;0&quot;</ETag><Size>{size_bytes}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, size_bytes in keys
        )
        fields = {"Name": bucket, "Prefix": prefix, "KeyCount": str(len(keys)), "MaxKeys": str(most)}
        fields |= {"IsTruncated": str(more).lower()} | ({"NextContinuationToken": keys[-1][0]} if more else {})
        return S3Response(200, _xml("ListBucketResult", fields, rows))


def _parse(head: bytes) -> S3Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    url = urlsplit(target)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
    return S3Request(method, unquote(url.path).lstrip("/"), query, headers)


def _kind(request: S3Request) -> str:
    """Return the kind of request in words."""
    method, query = request.method, request.query
    if not request.path.partition("/")[2]:
        return {"HEAD": "head bucket", "GET": "list uploads" if "uploads" in query else "list"}.get(method, "other")
    if method == "PUT":
        return "put part" if "partNumber" in query else "copy" if "x-amz-copy-source" in request.headers else "put"
    if method == "POST":
        return "begin upload" if "uploads" in query else "complete upload" if "uploadId" in query else "other"
    if method == "DELETE":
        return "abort upload" if "uploadId" in query else "delete"
    return {"GET": "get", "HEAD": "head"}.get(method, "other")


def _range(wanted: str, size_bytes: int) -> tuple[int, int]:
    """Return `bytes=5-9` as (5, 10), limited to what exists."""
    first, _, last = wanted.partition("=")[2].partition("-")
    if not first:
        return max(0, size_bytes - int(last or 0)), size_bytes
    return int(first), min(size_bytes, int(last) + 1 if last else size_bytes)


def _send(connection: socket.socket, request: S3Request, response: S3Response) -> None:
    length = response.stop - response.start if response.blob else len(response.body)
    head = [f"HTTP/1.1 {response.status} {_REASONS[response.status]}", "Server: benchmark", "x-amz-request-id: 1"]
    head += [f"{name}: {value}" for name, value in response.headers]
    head += [f"Content-Length: {length}"] if response.status != 204 else []
    data = "\r\n".join([*head, "", ""]).encode()
    if request.method == "HEAD":
        connection.sendall(data)
    elif response.blob is None or length <= CHUNK_BYTES // 16:
        pieces = response.blob.pieces(response.start, response.stop) if response.blob else (response.body,)
        connection.sendall(data + b"".join(pieces))
    else:
        connection.sendall(data)
        for piece in response.blob.pieces(response.start, response.stop):
            connection.sendall(piece)


def _xml(root: str, fields: Mapping[str, str], rows: str = "") -> bytes:
    inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
    namespace = "http://s3.amazonaws.com/doc/2006-03-01/"
    return f'<?xml version="1.0" encoding="UTF-8"?><{root} xmlns="{namespace}">{inner}{rows}</{root}>'.encode()


def _error(status: int, message: str, code: str = "") -> bytes:
    return f"<Error><Code>{code or _CODES[status]}</Code><Message>{escape(message)}</Message></Error>".encode()
