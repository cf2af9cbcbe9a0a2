"""Reads what a job's workers have printed up to now: their logs, from the kubelets, merged by time.

When a kubelet does not answer, the job's storage supplies the rest.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import ClusterError, CredentialsError, ElasticctlError, ForbiddenError
from elasticctl.api.podtemplate import worker_container
from elasticctl.api.spec import WORKER_CONTAINER
from elasticctl.cluster.base import LogLine, LogQuery, Manifest
from elasticctl.cluster.stored_logs import ReadLines, StoredLogs
from elasticctl.kubeapi.connection import MAX_STREAMS, Connection, Stream, resource_path

OVERLAP_S = 1
_MICROS = 1_000_000


class LogCursor:
    """A position in one container's log; times are microseconds since the epoch."""

    def __init__(self) -> None:
        self._newest = -1
        self._read: Counter[int] = Counter()  # second -> lines read of it; only the newest seconds
        self._to_pass = 0

    def resume(self) -> float | None:
        """Return the time from which to request lines, in whole seconds since the epoch; None: from the beginning."""
        if self._newest < 0:
            return None
        self._to_pass = self._read.total()
        return float(self._newest // _MICROS - OVERLAP_S)

    def is_new(self, at: int) -> bool:
        """Count the next line of the stream; False when it was read before."""
        if self._to_pass and at <= self._newest:
            self._to_pass -= 1
            return False
        self._to_pass = 0  # past all lines that were read; if there were fewer than expected, the file has been rotated
        self._newest = max(self._newest, at)
        oldest = self._newest // _MICROS - OVERLAP_S
        if at // _MICROS >= oldest:
            self._read[at // _MICROS] += 1
        for second in [second for second in self._read if second < oldest]:
            del self._read[second]
        return True


def split_stamp(line: bytes) -> tuple[int, str] | None:
    """`<RFC 3339 time> <text>` as microseconds since the epoch and text; None for a message of the kubelet itself."""
    stamp, _, text = line.removesuffix(b"\n").decode("utf-8", "replace").partition(" ")
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch.days * 86_400 + since_epoch.seconds) * _MICROS + since_epoch.microseconds, text


MAX_LINE_BYTES = 1 << 18
"""Only the beginning of a longer line is shown."""
READ_TIMEOUT_S = 30.0
SILENCE_S = 300.0
"""After this time without a line a followed log is requested again: a proxy may have dropped the connection."""
MIN_PAUSE_S = 0.25
"""The first pause between two requests for a followed log."""


class PodLog:
    """One pod's log, and how far it has been read.

    `ended`: nothing will be added to it. `gone_at`: since when its pod has been gone, by the monotonic clock.
    `settled`: its stored copy is complete. `done`: it has been read to its end.
    """

    def __init__(self, connection: Connection, pod: Manifest, query: LogQuery) -> None:
        self.worker, self.uid = str(pod["metadata"]["name"]), str(pod["metadata"].get("uid", ""))
        self.read = ReadLines(whole=query.tail is None and query.since is None)
        self.ended, self.settled, self.done = has_ended(pod), False, False
        self.gone_at: float | None = None
        self.pause_s, self.failures = MIN_PAUSE_S, 0
        self._connection, self._query = connection, query
        self._path = resource_path("v1", pod["metadata"]["namespace"], "pods", self.worker, "log")
        self._container = str(worker_container(pod).get("name") or WORKER_CONTAINER)
        self._cursor = LogCursor()

    @property
    def gone(self) -> bool:
        """True when the pod is gone; its name may belong to its successor."""
        return self.gone_at is not None

    def open(self, *, follow: bool) -> Stream:
        """Request what has not been read yet."""
        params = {"timestamps": "true", "container": self._container}
        since = self._cursor.resume()
        if since is not None:
            params["sinceTime"] = to_rfc3339(since)
        elif self._query.since is not None:
            params["sinceTime"] = to_rfc3339(float(int(self._query.since)))
        if since is None and self._query.tail is not None:
            params["tailLines"] = str(self._query.tail)
        if follow:
            params["follow"] = "true"
        timeout_s = SILENCE_S if follow else READ_TIMEOUT_S
        return self._connection.stream(self._path, params, timeout_s=timeout_s, max_line_bytes=MAX_LINE_BYTES)

    def lines(self, stream: Stream, *, whole: bool) -> Iterator[LogLine]:
        """Yield the new lines of a stream; `whole`: nothing will be added, so a last line may lack its newline."""
        for raw in stream:
            found = split_stamp(raw)
            if found is None or not (whole or raw.endswith(b"\n") or len(raw) >= MAX_LINE_BYTES):
                continue
            at, text = found
            if not self._cursor.is_new(at):
                continue
            self.read.note_line(at / 1e6, text)
            since = self._query.since
            if since is None or at >= since * 1e6:
                yield LogLine(self.worker, at / 1e6, text)

    def stored_rest(self, stored: StoredLogs) -> Iterator[LogLine]:
        """Yield the lines in the storage that have not been read."""
        return stored.rest(self.worker, self.uid, self.read, self._query)


def read_logs(
    connection: Connection, pods: Iterable[Manifest], query: LogQuery, stored: StoredLogs
) -> Iterator[LogLine]:
    """Yield what the pods have printed up to now, merged by time, `MAX_STREAMS` pods at once.

    Raises ClusterError at the end when some logs could not be read and are not in the storage either.
    """
    logs = [PodLog(connection, pod, query) for pod in pods if is_wanted(pod, query) and has_started(pod)]
    failed: list[str] = []
    for start in range(0, len(logs), MAX_STREAMS):
        yield from _merged(logs[start : start + MAX_STREAMS], stored, failed)
    if failed:
        raise ClusterError(f"not all logs can be read: {'; '.join(failed[:3])}")


def _merged(logs: list[PodLog], stored: StoredLogs, failed: list[str]) -> Iterator[LogLine]:
    def open_log(log: PodLog) -> Stream | ElasticctlError:
        try:
            return log.open(follow=False)
        except (ForbiddenError, CredentialsError):
            raise
        except ElasticctlError as e:
            return e

    def lines(log: PodLog, stream: Stream | ElasticctlError) -> Iterator[LogLine]:
        try:
            if isinstance(stream, ElasticctlError):
                raise stream
            yield from log.lines(stream, whole=True)
        except ElasticctlError as e:
            rest = list(log.stored_rest(stored))
            if not rest:
                failed.append(f"{log.worker}: {e}")
            yield from rest

    with ThreadPoolExecutor(8) as pool, ExitStack() as streams:
        found = list(zip(logs, pool.map(open_log, logs), strict=True))
        for _, stream in found:
            if not isinstance(stream, ElasticctlError):
                streams.enter_context(closing(stream))
        yield from heapq.merge(*(lines(log, stream) for log, stream in found), key=lambda line: line.at)


def is_wanted(pod: Manifest, query: LogQuery) -> bool:
    """True for a pod of a worker that the query asks for."""
    return not query.workers or pod["metadata"]["name"] in query.workers


def has_started(pod: Manifest) -> bool:
    """True when there may be a log."""
    return _phase(pod) not in ("", "Pending")


def has_ended(pod: Manifest) -> bool:
    """True when nothing will be added to the log."""
    return _phase(pod) in ("Succeeded", "Failed")


def _phase(pod: Manifest) -> str:
    return str(pod.get("status", {}).get("phase", ""))
