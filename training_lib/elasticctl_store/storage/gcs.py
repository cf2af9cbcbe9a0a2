"""Google Cloud Storage: `gs://bucket/prefix`.

google-auth finds the credentials and refreshes them. Requests use the JSON API, and the module `http` transfers the
bytes, because Google's own client copies every object. An object is one insert: neither resumable uploads nor
composition would be faster from one machine, and only a single insert supports the precondition of a create. The
CRC-32C is sent before the data, so that the service refuses what was damaged in transit.
"""

from __future__ import annotations

import base64
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import google.auth
import google.auth.credentials
import google.auth.exceptions
import google.auth.transport.urllib3
import google_crc32c
import urllib3

from elasticctl_store.errors import StorageError
from elasticctl_store.storage import base, gcs_responses
from elasticctl_store.storage.base import PAGE_KEYS, Location, most_bytes
from elasticctl_store.storage.cloud import (
    Action,
    Body,
    CloudStorage,
    Service,
    UploadOutcome,
    doubt_listing,
    doubt_range,
    refuse_too_large,
    total_bytes,
)
from elasticctl_store.storage.http import (
    ConnectionPool,
    Doubt,
    HttpRequest,
    HttpResponse,
    Reply,
    RetryingClient,
    Verdict,
    WireError,
    is_temporary,
)
from elasticctl_store.storage.outages import Patience, Waiter, Waits

OPTIONS = ("endpoint",)
ORIGIN = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_CRC_CHUNK_BYTES = 1 << 18  # google_crc32c accepts only `bytes`: copy in pieces that stay in the cache


def connect(url: str, patience: Patience, waits: Waits) -> CloudStorage:
    """Return the storage that a gs:// URL names; no request is sent yet. Raises StorageError for an invalid URL."""
    place = base.parse(url, OPTIONS)
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    origin = place.options.get("endpoint") or (emulator if "://" in emulator or not emulator else f"http://{emulator}")
    if origin:
        base.check_endpoint(origin, place.url)
    # A token gives access to more than these objects: it is never sent over plain HTTP.
    anonymous = urlsplit(origin).scheme == "http"
    credentials = google.auth.credentials.AnonymousCredentials() if anonymous else None  # type: ignore[no-untyped-call]
    return CloudStorage(Gcs(place, origin.rstrip("/") or ORIGIN, Waiter(place.url, patience, waits), credentials))


class Gcs:
    """A `Service`: requests to one bucket. Without `credentials`, those of the environment are used."""

    def __init__(
        self,
        place: Location,
        origin: str,
        waiter: Waiter,
        credentials: google.auth.credentials.Credentials | None = None,
    ) -> None:
        self._place = place
        patience = waiter.patience
        connections = ConnectionPool(origin, connect_s=patience.connect_s, silence_s=patience.silence_s)
        self._caller = RetryingClient(connections, Tokens(place, credentials), waiter)
        self._bucket = quote(place.bucket, safe="")

    @property
    def url(self) -> str:
        return self._place.url

    def put(self, key: str, body: Body, *, if_absent: bool) -> UploadOutcome:
        name = self._place.prefix + key
        about = {"name": name}
        if google_crc32c.implementation == "c":  # the implementation in Python would take minutes
            about["crc32c"] = _crc32c(body)
        boundary = f"elasticctl-{secrets.token_hex(16)}"
        whole = Body.of([*gcs_responses.multipart_body(about, boundary, body.views)])
        query = {"uploadType": "multipart"} | ({"ifGenerationMatch": "0"} if if_absent else {})
        target = f"/upload/storage/v1/b/{self._bucket}/o"
        headers = {"content-type": f"multipart/related; boundary={boundary}"}
        sent = about.get("crc32c", "") if not if_absent else ""

        def doubt(answer: HttpResponse) -> str:
            try:
                reported = gcs_responses.stored_crc32c(answer, name)
            except StorageError as e:
                return str(e)
            return "the stored object does not match what was sent" if sent and reported and reported != sent else ""

        action = (gcs_responses.WRITE, key)
        reply = self._call("POST", target, query, action, doubt=doubt, headers=headers, body=whole.views)
        if if_absent and reply.answer.status == 412:
            return UploadOutcome.UNSURE if reply.unsure else UploadOutcome.TAKEN
        self._raise_unless(reply, gcs_responses.WRITE, key, 200)
        try:
            gcs_responses.stored_crc32c(reply.answer, name)
        except StorageError as e:
            raise StorageError(f"cannot write {key} to {self.url}: {e}") from e
        return UploadOutcome.STORED

    def get(self, key: str) -> bytes:
        action = (gcs_responses.READ, key)
        reply = self._call(
            "GET", self._media(key), {"alt": "media"}, action, doubt=_doubt_object, most_bytes=most_bytes(key)
        )
        self._raise_unless(reply, gcs_responses.READ, key, 200)
        refuse_too_large(reply.answer, self.url, key)
        return reply.answer.body  # even if doubtful: readers verify it with checksums of their own

    def read(self, key: str, start: int, into: memoryview) -> int:
        headers = {"range": f"bytes={start}-{start + len(into) - 1}"}
        action = (gcs_responses.READ, key)
        doubt = partial(doubt_range, start=start, into=into)
        query = {"alt": "media"}
        reply = self._call("GET", self._media(key), query, action, doubt=doubt, headers=headers, into=into)
        self._raise_unless(reply, gcs_responses.READ, key, 200, 206, 416)
        return total_bytes(reply.answer, start, into)

    def page(self, prefix: str, after: str) -> tuple[list[str], bool]:
        query = {
            "maxResults": str(PAGE_KEYS),
            "prefix": self._place.prefix + prefix,
            "fields": "kind,items(name),nextPageToken",
        }
        if after:
            query["startOffset"] = self._place.prefix + after  # inclusive: the caller drops `after`
        while True:
            found = self._ask(query)
            names = gcs_responses.names(found)
            token = found.get("nextPageToken")
            if names or not token:
                return [name.removeprefix(self._place.prefix) for name in names], not token
            query["pageToken"] = token  # a page may be empty without being the last

    def copy(self, origin: Service, key: str, size_bytes: int) -> str | None:
        if not isinstance(origin, Gcs) or origin._place.options != self._place.options:
            return None
        source = f"/storage/v1/b/{origin._bucket}/o/{quote(origin._place.prefix + key, safe='')}"
        target = f"{source}/rewriteTo/b/{self._bucket}/o/{quote(self._place.prefix + key, safe='')}"
        query: dict[str, str] = {}
        while True:
            reply = self._call("POST", target, query, (gcs_responses.WRITE, key))
            if reply.answer.status != 200:
                return None  # these credentials may lack the right to read there; reading and writing may still work
            said = gcs_responses.parse(reply.answer)
            if said.get("done"):
                return ""  # GCS reports a CRC-32C, not a CRC-32
            if not said.get("rewriteToken"):
                return None
            query = {"rewriteToken": str(said["rewriteToken"])}

    def remove(self, key: str) -> None:
        name = quote(self._place.prefix + key, safe="")
        reply = self._call("DELETE", f"/storage/v1/b/{self._bucket}/o/{name}", {}, (gcs_responses.DELETE, key))
        if not gcs_responses.is_missing(reply.answer):
            self._raise_unless(reply, gcs_responses.DELETE, key, 200, 204)

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """Do nothing: a single insert leaves nothing behind."""

    def _media(self, key: str) -> str:
        return f"/download/storage/v1/b/{self._bucket}/o/{quote(self._place.prefix + key, safe='')}"

    def _ask(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return a page of a listing; retried if the response cannot be parsed or is not a listing."""

        def names(answer: HttpResponse) -> list[str]:
            return gcs_responses.names(gcs_responses.parse_listing(answer))

        doubt = doubt_listing(names, query["prefix"])
        reply = self._call("GET", f"/storage/v1/b/{self._bucket}/o", query, (gcs_responses.LIST, ""), doubt=doubt)
        self._raise_unless(reply, gcs_responses.LIST, "", 200)
        return gcs_responses.parse_listing(reply.answer)

    def _call(
        self,
        method: str,
        target: str,
        query: Mapping[str, str],
        about: tuple[Action, str],
        doubt: Doubt = lambda answer: "",
        **request: Any,
    ) -> Reply:
        action, key = about
        doing = f"{action.verb} {key or 'the keys'} {action.preposition} {self.url}"
        target += "?" + urlencode(query, quote_via=quote) if query else ""
        return self._caller.call(HttpRequest(method, target, **request), doing, doubt=doubt)

    def _raise_unless(self, reply: Reply, action: Action, key: str, *good: int) -> None:
        if reply.answer.status not in good:
            raise gcs_responses.as_error(reply.answer, action, key, self._place)


class Tokens:
    """The `Dialect` of GCS: a bearer token on every request."""

    def __init__(self, place: Location, credentials: google.auth.credentials.Credentials | None) -> None:
        self._lock = threading.Lock()
        self._place, self._credentials = place, credentials
        self._transport: google.auth.transport.urllib3.Request | None = None

    def sign(self, request: HttpRequest) -> Mapping[str, str]:
        headers = dict(request.headers)
        self._with_credentials(lambda credentials, transport: credentials.before_request(transport, "", "", headers))
        return headers

    def renew(self) -> None:
        self._with_credentials(lambda credentials, transport: credentials.refresh(transport))

    def judge(self, answer: HttpResponse) -> Verdict:
        return gcs_responses.judge(answer)

    def reason(self, answer: HttpResponse) -> str:
        return gcs_responses.reason(answer)

    def _with_credentials(self, use: Any) -> None:
        """Call `use` with the credentials and a transport.

        Raises StorageError, or WireError if the source of tokens is unavailable for now.
        """
        with self._lock:
            try:
                if self._credentials is None:
                    self._credentials, _ = google.auth.default(scopes=[_SCOPE])
                if self._transport is None:
                    self._transport = google.auth.transport.urllib3.Request(urllib3.PoolManager())  # type: ignore[no-untyped-call]
                use(self._credentials, self._transport)
            except google.auth.exceptions.DefaultCredentialsError as e:
                fix = "give the machine a service account, or set $GOOGLE_APPLICATION_CREDENTIALS"
                raise StorageError(f"{self._place.url}: no Google credentials found. FIX: {fix}") from e
            except google.auth.exceptions.GoogleAuthError as e:
                said = " ".join(str(e.args[0] if e.args else e).split())[:200]
                if _is_passing(e):
                    raise WireError(f"no token for now: {said}", sent=False) from e
                fix = "renew them (gcloud auth application-default login), and check this machine's clock"
                raise StorageError(
                    f"{self._place.url}: the Google credentials give no token: {said}. FIX: {fix}"
                ) from e


def _is_passing(error: google.auth.exceptions.GoogleAuthError) -> bool:
    """Return whether the source of tokens is overloaded or unreachable, as opposed to refusing."""
    cause = error.__cause__ if isinstance(error, google.auth.exceptions.RefreshError) else None
    if isinstance(cause, google.auth.exceptions.TransportError):  # from the machine's metadata server
        status = getattr(cause.args[-1], "status", None) if cause.args else None
        return status is None or is_temporary(status)
    return bool(error.retryable)


def _doubt_object(answer: HttpResponse) -> str:
    """Return what is implausible: an object that does not match its checksum, or is empty and has none; else ""."""
    reported = gcs_responses.crc32c(answer)
    if answer.is_too_large:
        return ""
    if not reported:
        return "" if answer.body else "the response is empty"
    return "" if reported == _crc32c(Body.of([answer.body])) else "the response does not match its checksum"


def _crc32c(body: Body) -> str:
    crc = 0
    for view in body.views:
        for start in range(0, len(view), _CRC_CHUNK_BYTES):
            crc = google_crc32c.extend(crc, bytes(view[start : start + _CRC_CHUNK_BYTES]))
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
