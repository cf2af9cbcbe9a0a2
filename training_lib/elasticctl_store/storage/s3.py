"""Amazon S3 and compatible services (MinIO, R2, Ceph): `s3://bucket/prefix`.

boto3 finds the credentials, the endpoint and the addressing style, and signs requests. It does not transfer the bytes:
its client hashes and copies them, which takes five times the processor time of sending (see the module `http`).
Payloads are unsigned; a CRC-32 in a header lets the service refuse what was damaged in transit.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

import boto3
from botocore import exceptions, loaders
from botocore import session as sessions
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config

from elasticctl_store import parallel
from elasticctl_store.checksums import combine_all
from elasticctl_store.errors import StorageError
from elasticctl_store.parallel import each
from elasticctl_store.storage import base, s3_responses
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

log = logging.getLogger("elasticctl_train")
T = TypeVar("T")

OPTIONS = ("endpoint", "region")
PART_BYTES = 16 << 20
MOST_SENDERS = 8
"""The maximum number of parts in parallel. There are as many as the rank has processors besides the one it trains
on."""
_MOST_PARTS = 9_000  # S3 allows 10,000
_MOST_COPIED_BYTES = 5 << 30
_BUSY = {"IDPCommunicationError", "RequestLimitExceeded", "TooManyRequestsException"}
"""Error codes with status 400 by which the services that issue credentials ask to be called later."""
_UNREACHABLE = (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.MetadataRetrievalError)
_MACHINE = "iam-role"
"""botocore's name for the role of a machine."""
_RESTARTS = 3

# Reading these takes 0.2 s; done on import, so that a spare does it before a restore.
_descriptions = loaders.create_loader(os.environ.get("AWS_DATA_PATH"))
_descriptions.load_data_with_path("endpoints")
for _kind in ("service-2", "endpoint-rule-set-1"):
    _descriptions.load_service_model("s3", _kind)


def connect(url: str, patience: Patience, waits: Waits) -> CloudStorage:
    """Return the storage that an s3:// URL names; no request is sent yet. Raises StorageError for an invalid URL."""
    place = base.parse(url, OPTIONS)
    return CloudStorage(S3(place, Waiter(place.url, patience, waits)))


def endpoint_of_environment() -> str:
    """Return the endpoint of a URL that names none: from environment variables, the profile, or Amazon's own. Sends
    nothing.

    Raises StorageError if the settings cannot be used.
    """
    try:
        return str(_client(None, None).meta.endpoint_url)
    except (exceptions.BotoCoreError, ValueError) as e:
        raise StorageError(f"the AWS settings cannot be used: {e}") from e


def _client(region: str | None, endpoint: str | None) -> Any:
    """Return a boto3 client that is only used to find out where the bucket is.

    It gets dummy credentials: the real ones are found on the first request.
    """
    session = sessions.get_session()
    session.register_component("data_loader", _descriptions)
    return boto3.session.Session(botocore_session=session).client(
        "s3",
        region_name=region or os.environ.get("AWS_REGION"),  # boto3 itself ignores it
        endpoint_url=endpoint,
        config=Config(signature_version="s3v4"),
        aws_access_key_id="none",
        aws_secret_access_key="none",  # noqa: S106
    )


class S3:
    """A `Service`: requests to one bucket."""

    def __init__(self, place: Location, waiter: Waiter) -> None:
        self._place, patience = place, waiter.patience
        try:
            self._signer = Signer(place)
        except (exceptions.BotoCoreError, ValueError) as e:
            raise StorageError(f"{place.url}: the AWS settings cannot be used: {e}") from e
        ca_file = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE")
        connections = ConnectionPool(
            self._signer.origin, connect_s=patience.connect_s, silence_s=patience.silence_s, ca_file=ca_file
        )
        self._caller = RetryingClient(connections, self._signer, waiter)

    @property
    def url(self) -> str:
        return self._place.url

    def put(self, key: str, body: Body, *, if_absent: bool) -> UploadOutcome:
        if body.size_bytes > PART_BYTES:
            return self._put_in_parts(key, body, if_absent)
        headers = {"if-none-match": "*"} if if_absent else {}
        headers |= self._checksum_headers(body)
        doubt = _doubt_write({} if if_absent else headers)
        reply = self._call("PUT", key, {}, s3_responses.WRITE, doubt=doubt, headers=headers, body=body.views)
        return self._outcome(reply, key, if_absent, s3_responses.check_write)

    def get(self, key: str) -> bytes:
        headers = {"x-amz-checksum-mode": "ENABLED"}
        reply = self._call(
            "GET", key, {}, s3_responses.READ, doubt=_doubt_object, headers=headers, most_bytes=most_bytes(key)
        )
        self._raise_unless(reply, s3_responses.READ, key, 200)
        refuse_too_large(reply.answer, self.url, key)
        return reply.answer.body  # even if doubtful: readers verify it with checksums of their own

    def read(self, key: str, start: int, into: memoryview) -> int:
        headers = {"range": f"bytes={start}-{start + len(into) - 1}"}
        doubt = partial(doubt_range, start=start, into=into)
        reply = self._call("GET", key, {}, s3_responses.READ, doubt=doubt, headers=headers, into=into)
        self._raise_unless(reply, s3_responses.READ, key, 200, 206, 416)
        return total_bytes(reply.answer, start, into)

    def page(self, prefix: str, after: str) -> tuple[list[str], bool]:
        query = {"list-type": "2", "max-keys": str(PAGE_KEYS), "prefix": self._place.prefix + prefix}
        if after:
            query["start-after"] = self._place.prefix + after
        found = self._ask(query, s3_responses.LIST)
        names = s3_responses.names(found)
        last = found.findtext("IsTruncated") != "true"
        return [name.removeprefix(self._place.prefix) for name in names], last

    def copy(self, origin: Service, key: str, size_bytes: int) -> str | None:
        if (
            not isinstance(origin, S3)
            or origin._place.options != self._place.options
            or size_bytes > _MOST_COPIED_BYTES
        ):
            return None
        headers = {"x-amz-copy-source": f"/{origin._place.bucket}/{origin._place.path_of(key)}"}
        if self._signer.checksums:
            headers["x-amz-checksum-algorithm"] = "CRC32"
        reply = self._call("PUT", key, {}, s3_responses.WRITE, headers=headers)
        if reply.answer.status != 200 or s3_responses.code(reply.answer):
            return None  # it may belong to another account; reading and writing may still work
        reported = s3_responses.parse(reply.answer.body).findtext("ChecksumCRC32", "")
        return (
            "" if "-" in reported else base64.b64decode(reported).hex()
        )  # with a dash: a checksum of the parts' checksums

    def remove(self, key: str) -> None:
        reply = self._call("DELETE", key, {}, s3_responses.DELETE)
        if s3_responses.code(reply.answer) != "NoSuchKey":
            self._raise_unless(reply, s3_responses.DELETE, key, 200, 204)

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """Abort multipart uploads below our prefix: listings of objects do not show them, and they cost money."""
        query = {"uploads": "", "prefix": self._place.prefix}
        while True:
            found = self._ask(query, s3_responses.UPLOADS)
            uploads = [(item.findtext("Key", ""), item.findtext("UploadId", "")) for item in found.iter("Upload")]
            for name, upload in uploads:
                key = name.removeprefix(self._place.prefix)
                if is_ours(key):
                    self._abort(key, upload)
            if found.findtext("IsTruncated") != "true" or not uploads:
                return
            query |= {"key-marker": uploads[-1][0], "upload-id-marker": uploads[-1][1]}

    def _put_in_parts(self, key: str, body: Body, if_absent: bool) -> UploadOutcome:
        """Upload the parts in parallel; start again if the service no longer knows the upload."""
        unsure = False
        for _ in range(_RESTARTS):
            upload = self._start_upload(key)
            try:
                parts = self._send_parts(key, upload, body)
                reply = self._complete(key, upload, parts, if_absent)
                unsure |= reply.unsure
                if s3_responses.code(reply.answer) == "NoSuchUpload":
                    continue  # completed by a request whose response was lost, or expired
                outcome = self._outcome(Reply(reply.answer, unsure), key, if_absent, s3_responses.check_completion)
            except BaseException:
                self._abort_quietly(key, upload)
                raise
            if outcome is not UploadOutcome.STORED:
                self._abort_quietly(key, upload)
            return outcome
        raise StorageError(
            f"cannot {s3_responses.WRITE.verb} {key} in {self.url}: the service has lost its multipart upload"
        )

    def _start_upload(self, key: str) -> str:
        headers = {"x-amz-checksum-algorithm": "CRC32"} if self._signer.checksums else {}
        doubt = _doubt(s3_responses.upload_id)
        reply = self._call("POST", key, {"uploads": ""}, s3_responses.WRITE, doubt=doubt, headers=headers)
        self._raise_unless(reply, s3_responses.WRITE, key, 200)
        return self._read_reply(reply, key, s3_responses.upload_id)

    def _send_parts(self, key: str, upload: str, body: Body) -> list[tuple[str, str]]:
        """Send the parts; return each part's ETag and checksum, in order."""
        part_bytes = max(PART_BYTES, -(-body.size_bytes // _MOST_PARTS))
        count = -(-body.size_bytes // part_bytes)
        pieces = [body.cut(index * part_bytes, (index + 1) * part_bytes) for index in range(count)]
        done = [("", "")] * count

        def send(index: int) -> None:
            part = pieces[index]
            headers = self._checksum_headers(part)
            query = {"partNumber": str(index + 1), "uploadId": upload}
            doubt = _doubt_write(headers)
            reply = self._call("PUT", key, query, s3_responses.WRITE, doubt=doubt, headers=headers, body=part.views)
            self._raise_unless(reply, s3_responses.WRITE, key, 200)
            self._read_reply(reply, key, s3_responses.check_write)
            done[index] = reply.answer.headers.get("etag", ""), headers.get("x-amz-checksum-crc32", "")

        each(send, range(count), max(1, min(parallel.per_rank() - 1, MOST_SENDERS)))
        if all(part.crc is not None for part in pieces):
            body.crc = combine_all((part.crc32(), part.size_bytes) for part in pieces)
        return done

    def _complete(self, key: str, upload: str, parts: list[tuple[str, str]], if_absent: bool) -> Reply:
        root = ElementTree.Element("CompleteMultipartUpload", xmlns=s3_responses.NAMESPACE)
        for number, (etag, checksum) in enumerate(parts, start=1):
            part = ElementTree.SubElement(root, "Part")
            ElementTree.SubElement(part, "PartNumber").text = str(number)
            ElementTree.SubElement(part, "ETag").text = etag
            if checksum:
                ElementTree.SubElement(part, "ChecksumCRC32").text = checksum
        body = Body.of([ElementTree.tostring(root)])
        headers = {"content-type": "application/xml"} | ({"if-none-match": "*"} if if_absent else {})
        doubt = _doubt(s3_responses.check_completion)
        query = {"uploadId": upload}
        return self._call("POST", key, query, s3_responses.WRITE, doubt=doubt, headers=headers, body=body.views)

    def _abort(self, key: str, upload: str, patience: Patience | None = None) -> None:
        reply = self._call("DELETE", key, {"uploadId": upload}, s3_responses.ABORT, patience)
        if s3_responses.code(reply.answer) != "NoSuchUpload":
            self._raise_unless(reply, s3_responses.ABORT, key, 200, 204)

    def _abort_quietly(self, key: str, upload: str) -> None:
        """Clean up after a failure. `discard_unfinished` finds what cannot be aborted now."""
        try:
            self._abort(key, upload, Patience(tries=1))
        except StorageError as e:
            log.info("%s", e)

    def _outcome(self, reply: Reply, key: str, if_absent: bool, check: Callable[[HttpResponse], None]) -> UploadOutcome:
        if if_absent and reply.answer.status == 412:
            return UploadOutcome.UNSURE if reply.unsure else UploadOutcome.TAKEN
        self._raise_unless(reply, s3_responses.WRITE, key, 200)
        self._read_reply(reply, key, check)
        return UploadOutcome.STORED

    def _read_reply(self, reply: Reply, key: str, read: Callable[[HttpResponse], T]) -> T:
        """Return what `read` finds in the response to a write; its StorageError gets the key and the URL."""
        try:
            return read(reply.answer)
        except StorageError as e:
            raise StorageError(f"cannot write {key} to {self.url}: {e}") from e

    def _checksum_headers(self, body: Body) -> dict[str, str]:
        if not self._signer.checksums:
            return {}
        return {"x-amz-checksum-crc32": _crc32(body), "x-amz-sdk-checksum-algorithm": "CRC32"}

    def _ask(self, query: Mapping[str, str], action: Action) -> ElementTree.Element:
        """Return a listing; retried if the response cannot be parsed or is not a listing."""

        def names(answer: HttpResponse) -> list[str]:
            found = s3_responses.parse_listing(answer.body)
            s3_responses.check_question(found, query)
            return s3_responses.names(found)

        doubt = doubt_listing(names, query["prefix"])
        reply = self._call("GET", None, query, action, doubt=doubt)
        self._raise_unless(reply, action, "", 200)
        return s3_responses.parse_listing(reply.answer.body)

    def _call(
        self,
        method: str,
        key: str | None,
        query: Mapping[str, str],
        action: Action,
        patience: Patience | None = None,
        doubt: Doubt = lambda answer: "",
        **request: Any,
    ) -> Reply:
        """Send a request about an object, or about the bucket if `key` is None."""
        name = "" if key is None else self._place.path_of(key)
        target = self._signer.path + name
        if query:
            target += "?" + urlencode(query, quote_via=quote, safe="~")
        doing = f"{action.verb} {key or 'the keys'} {action.preposition} {self.url}"
        return self._caller.call(HttpRequest(method, target, **request), doing, patience, doubt)

    def _raise_unless(self, reply: Reply, action: Action, key: str, *good: int) -> None:
        failed = reply.answer.status == 200 and s3_responses.code(reply.answer)
        if reply.answer.status not in good or failed:
            raise s3_responses.as_error(reply.answer, action, key, self._place)


class Signer:
    """The `Dialect` of S3: where the bucket is, and a signature for every request."""

    def __init__(self, place: Location) -> None:
        self._lock = threading.Lock()
        self._place = place
        client = _client(place.options.get("region"), place.options.get("endpoint"))
        endpoint = urlsplit(client.meta.endpoint_url)
        example = urlsplit(client.generate_presigned_url("head_bucket", Params={"Bucket": place.bucket}))
        in_host = example.netloc.startswith(f"{place.bucket}.")  # but not its host, which is outside any region
        self.origin = f"{endpoint.scheme}://{place.bucket + '.' if in_host else ''}{endpoint.netloc}"
        self.path = example.path.rstrip("/") + "/"
        self.checksums = client.meta.config.request_checksum_calculation != "when_required"
        base.check_endpoint(self.origin, place.url)
        region = client.meta.region_name
        self._region = "us-east-1" if region in (None, "aws-global") else region
        self._unsigned_payload = Config(s3={"payload_signing_enabled": False})
        self._credentials: Any = None
        self._had_credentials = False

    def sign(self, request: HttpRequest) -> Mapping[str, str]:
        with self._lock:
            credentials = self._current_credentials()
        signed = AWSRequest(request.method, self.origin + request.target, headers=dict(request.headers))
        signed.context["client_config"] = self._unsigned_payload
        S3SigV4Auth(credentials, "s3", self._region).add_auth(signed)
        return dict(signed.headers)

    def renew(self) -> None:
        with self._lock:
            self._credentials = None  # read again from their source: a file may have been rewritten

    def judge(self, answer: HttpResponse) -> Verdict:
        return s3_responses.judge(answer)

    def reason(self, answer: HttpResponse) -> str:
        return s3_responses.reason(answer)

    def _current_credentials(self) -> Any:
        """Return the credentials, refreshed if they expire soon.

        Raises StorageError, or WireError if their source is overloaded or unreachable for now.
        """
        try:
            if self._credentials is None:
                self._credentials = boto3.session.Session().get_credentials()
            if self._credentials is not None:
                found = self._credentials.get_frozen_credentials()
                self._had_credentials = True
                return found
        except (exceptions.BotoCoreError, exceptions.ClientError, RuntimeError, ValueError) as e:
            said = " ".join(str(e).split())[:300]
            if _is_passing(e):
                raise WireError(f"no AWS credentials for now: {said}", sent=False) from e
            fix = "check the role, its token or the profile, and this machine's clock"
            raise StorageError(f"{self._place.url}: no new AWS credentials: {said}. FIX: {fix}") from e
        if self._had_credentials:  # an unreachable metadata service looks like a machine without a role
            raise WireError("no AWS credentials for now, though there were some before", sent=False)
        raise StorageError(
            f"{self._place.url}: no AWS credentials found. FIX: give the machine a role, or set $AWS_ACCESS_KEY_ID and "
            "$AWS_SECRET_ACCESS_KEY, or $AWS_PROFILE"
        )


def _is_passing(error: BaseException | None) -> bool:
    """Return whether the source of credentials is overloaded or unreachable, as opposed to refusing."""
    if isinstance(error, exceptions.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        said = error.response.get("Error", {}).get("Code", "")
        return is_temporary(status) or "Throttl" in said or said in _BUSY
    if isinstance(error, exceptions.SSLError):
        return False
    if isinstance(error, exceptions.CredentialRetrievalError):
        if error.kwargs.get("provider") == _MACHINE:
            return True  # it has issued credentials before: its metadata service is unreachable
        error = error.__context__  # the response of a container's agent
    return isinstance(error, _UNREACHABLE)


def _doubt_write(headers: Mapping[str, str]) -> Doubt:
    """Return a check of responses to a write: they must be S3's, and a checksum must be that of the sent `headers`."""
    sent = headers.get("x-amz-checksum-crc32", "")
    is_strange = _doubt(s3_responses.check_write)

    def doubt(answer: HttpResponse) -> str:
        if strange := is_strange(answer):
            return strange
        reported = answer.headers.get("x-amz-checksum-crc32", "")
        return "the stored object does not match what was sent" if sent and reported and reported != sent else ""

    return doubt


def _doubt(read: Callable[[HttpResponse], object]) -> Doubt:
    """Return a check of successful responses by `read`, which raises StorageError; skips refusals with status 200."""

    def doubt(answer: HttpResponse) -> str:
        if s3_responses.code(answer):
            return ""
        try:
            read(answer)
        except StorageError as e:
            return str(e)
        return ""

    return doubt


def _doubt_object(answer: HttpResponse) -> str:
    """Return what is implausible: an object that does not match its checksum, or is empty and has none; else ""."""
    reported = answer.headers.get("x-amz-checksum-crc32", "")
    if answer.is_too_large:
        return ""
    if not reported or "-" in reported:  # with a dash: a checksum of the parts' checksums
        return "" if answer.body else "the response is empty"
    return "" if reported == _crc32(Body.of([answer.body])) else "the response does not match its checksum"


def _crc32(body: Body) -> str:
    return base64.b64encode(body.crc32().to_bytes(4, "big")).decode()
