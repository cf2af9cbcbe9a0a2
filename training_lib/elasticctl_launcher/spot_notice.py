"""Spot notices: the cloud's metadata service announces that this machine will be reclaimed.

AWS gives two minutes of notice (`spot/instance-action`, with an IMDSv2 token), Google Cloud 30 seconds
(`instance/preempted`). The service is polled once a second, at a link-local address of this machine. http.client uses
no proxy and follows no redirects.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
"""

from __future__ import annotations

import http.client
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from urllib.parse import urlsplit

OFF, AUTO, AWS, AWS_REBALANCE, GCP = "off", "auto", "aws", "aws-rebalance", "gcp"
CHOICES = (OFF, AUTO, AWS, AWS_REBALANCE, GCP)
"""The sources; `aws-rebalance` also counts AWS's earlier warning of a higher risk as a notice."""

DEFAULT_URL = "http://169.254.169.254"
POLL_S = 1.0
RETRY_MAX_S = 5.0
GIVE_UP_AFTER = 6
"""After this many failed requests without any answer before, the service is assumed not to exist."""
ANSWER_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 4096
TOKEN_TTL_S = 21_600
GCP_NOTICE_S = 15.0
"""Google Cloud stops a machine 30 s after its notice, and GKE leaves a pod half of that."""

_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]{5,16}Z")

log = logging.getLogger(__name__)


class MetadataError(Exception):
    """The metadata service gave no usable answer."""


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """An HTTP status and the body's text."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class MetadataServer:
    """The metadata service at `url` (http://HOST[:PORT])."""

    url: str = DEFAULT_URL
    timeout_s: float = ANSWER_TIMEOUT_S

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> MetadataAnswer:
        """Send one request; raises MetadataError if there is no answer within `timeout_s`."""
        url = urlsplit(self.url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=self.timeout_s)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            return MetadataAnswer(response.status, response.read(MAX_ANSWER_BYTES).decode("utf-8", "replace").strip())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MetadataError(f"{self.url}{path}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def bad_answer(self, path: str, answer: MetadataAnswer) -> MetadataError:
        """Return the error to raise for an answer that cannot be interpreted."""
        return MetadataError(f"{self.url}{path}: HTTP {answer.status}, {answer.text[:60]!r}")


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """A notice, as one line for people (`words`).

    `at` is the time at which the machine ends, as Unix time in seconds; None: it may keep running.
    """

    words: str
    at: float | None = None

    def left_s(self) -> float | None:
        """Return the seconds until the machine's end; None if no end is known."""
        return None if self.at is None else max(0.0, self.at - time.time())


class NoticeSource(Protocol):
    """A cloud that may announce the end of this machine."""

    def poll(self) -> SpotNotice | None:
        """Return the notice, or None if there is none. Raises MetadataError."""


class AwsNotices:
    """AWS's instance metadata service, version 2."""

    def __init__(self, server: MetadataServer, *, rebalance: bool = False) -> None:
        self._server, self._rebalance = server, rebalance
        self._token = ""

    def poll(self) -> SpotNotice | None:
        """See `NoticeSource.poll`."""
        action = self._get_document("spot/instance-action", "action")
        if action is not None:
            at = _parse_time(action.get("time"))
            return SpotNotice(f"AWS spot interruption{_at(action.get('time'))}", time.time() if at is None else at)
        advice = self._get_document("events/recommendations/rebalance", "noticeTime") if self._rebalance else None
        return SpotNotice(f"AWS rebalance recommendation{_at(advice['noticeTime'])}") if advice is not None else None

    def _get_document(self, name: str, field: str) -> dict[str, Any] | None:
        """The JSON object called `name`, which has a string `field`; None if there is none (404)."""
        path = f"/latest/meta-data/{name}"
        answer = self._get(path)
        if answer.status == http.client.UNAUTHORIZED:  # the token has expired
            self._token = ""
            answer = self._get(path)
        if answer.status == http.client.NOT_FOUND:
            return None
        try:
            found = json.loads(answer.text)
        except ValueError:
            found = None
        if answer.status != http.client.OK or not isinstance(found, dict) or not isinstance(found.get(field), str):
            raise self._server.bad_answer(path, answer)
        return found

    def _get(self, path: str) -> MetadataAnswer:
        self._token = self._token or self._request_token()
        return self._server.request("GET", path, {"X-aws-ec2-metadata-token": self._token})

    def _request_token(self) -> str:
        path = "/latest/api/token"
        answer = self._server.request("PUT", path, {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)})
        if answer.status != http.client.OK or not re.fullmatch(r"[!-~]{1,1000}", answer.text):
            raise self._server.bad_answer(path, answer)
        return answer.text


class GcpNotices:
    """Google Cloud's metadata server."""

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._was_quiet = False

    def poll(self) -> SpotNotice | None:
        """See `NoticeSource.poll`. The time left is unknown if the preemption was announced before the first poll."""
        path = "/computeMetadata/v1/instance/preempted"
        answer = self._server.request("GET", path, {"Metadata-Flavor": "Google"})
        if answer.status != http.client.OK or answer.text not in ("TRUE", "FALSE"):
            raise self._server.bad_answer(path, answer)
        if answer.text == "FALSE":
            self._was_quiet = True
            return None
        return SpotNotice("GCP preemption", time.time() + (GCP_NOTICE_S if self._was_quiet else 0.0))


class EitherNotices:
    """Several sources, one of which exists here. The first one that answers is the only one used from then on."""

    def __init__(self, *sources: NoticeSource) -> None:
        self._sources = sources

    def poll(self) -> SpotNotice | None:
        """See `NoticeSource.poll`."""
        errors = []
        for source in self._sources:
            try:
                notice = source.poll()
            except MetadataError as error:
                errors.append(str(error))
                continue
            self._sources = (source,)
            return notice
        raise MetadataError("; ".join(errors))


def make_source(choice: str, url: str = DEFAULT_URL) -> NoticeSource:
    """Return the source called `choice`, one of `CHOICES` except `OFF`. Raises KeyError for any other."""
    server = MetadataServer(url)
    sources: Mapping[str, Callable[[], NoticeSource]] = {
        AUTO: lambda: EitherNotices(AwsNotices(server), GcpNotices(server)),
        AWS: lambda: AwsNotices(server),
        AWS_REBALANCE: lambda: AwsNotices(server, rebalance=True),
        GCP: lambda: GcpNotices(server),
    }
    return sources[choice]()


def check_url(url: str) -> str:
    """Return `url` without a trailing slash. Raises ValueError unless it has the form http://HOST[:PORT]."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.port == 0:
        raise ValueError(f"{url!r} is not of the form http://HOST[:PORT]")
    return url.rstrip("/")


class NoticeWatch:
    """Polls `source` every `poll_s` seconds, in a thread, and calls `on_notice(notice)`.

    It stops after a notice that has a time. Before that, it may report one notice without a time. It gives up with a
    warning if the service has never answered, but never on a service that has answered before.
    """

    def __init__(self, source: NoticeSource, on_notice: Callable[[SpotNotice], None], poll_s: float = POLL_S) -> None:
        self._source, self._on_notice, self._poll_s = source, on_notice, poll_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spot-notice", daemon=True)

    def start(self) -> None:
        """Start to poll."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling; returns immediately."""
        self._closed.set()

    def _run(self) -> None:
        failures, answered, reported = 0, False, False
        while not self._closed.is_set():
            try:
                notice = self._source.poll()
            except MetadataError as error:
                failures += 1
                if not answered and failures == GIVE_UP_AFTER:
                    log.warning("cannot watch for spot notices, continuing without them: %s", error)
                    return
                if answered and failures == 1:
                    log.warning("the cloud's metadata service gives no usable answer, still trying: %s", error)
            else:
                failures, answered = 0, True
                if notice is not None and not (reported and notice.at is None):
                    log.warning("spot notice: %s", notice.words)
                    self._on_notice(notice)
                    reported = True
                    if notice.at is not None:
                        return
            self._closed.wait(min(RETRY_MAX_S, self._poll_s * 2.0 ** min(failures, 10)))


def _at(text: object) -> str:
    return f" at {text}" if isinstance(text, str) and _TIME.fullmatch(text) else ""


def _parse_time(text: object) -> float | None:
    """A time in AWS's format, as Unix time in seconds; None for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) and _TIME.fullmatch(text) else None
    except ValueError:
        return None
