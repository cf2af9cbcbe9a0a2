"""Follow the logs of a job's workers, in bounded memory and with a bounded number of threads.

A watch reports the job's pods, so that a worker is read from its first line on and a replacement is followed too. Each
log is one request that stays open. When there are more than `MAX_STREAMS` of them, they take turns, and each turn reads
what has been added since the last one. A broken stream is resumed where it broke. When a pod is gone, its last lines
are read from the job's storage.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing

from elasticctl.api.errors import (
    BusyError,
    ClusterError,
    CredentialsError,
    ElasticctlError,
    ForbiddenError,
    NotFoundError,
    UnreachableError,
)
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import LogLine, LogQuery, Manifest, is_owned
from elasticctl.cluster.kube.read_logs import MIN_PAUSE_S, PodLog, has_ended, has_started, is_wanted
from elasticctl.cluster.stored_logs import StoredLogs
from elasticctl.kubeapi.connection import MAX_STREAMS, Connection, Stream
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource

CHECK_EVERY_S = 1.0
"""How often to check whether the job has ended."""
MAX_PAUSE_S = 8.0
LAST_TRIES = 4
"""How often the log of a worker that has ended is requested when its node does not answer."""
SETTLE_S = 3.0
"""How long to wait for the last lines of a worker in the storage; longer than its launcher waits to send them."""
BACKLOG_LINES = 1000
"""Lines read and not yet taken; readers pause when there are as many."""
_NAP_S = 0.2


class _Turns:
    """The logs in the order of their next turns."""

    def __init__(self) -> None:
        self._queue: queue.PriorityQueue[tuple[float, int, PodLog]] = queue.PriorityQueue()
        self._numbers = itertools.count()

    def put(self, log: PodLog, wait_s: float = 0.0) -> None:
        """Give a log its next turn in `wait_s` seconds."""
        self._queue.put((time.monotonic() + wait_s, next(self._numbers), log))

    def get(self, stopped: threading.Event) -> PodLog | None:
        """Return the log whose turn it is, or None after a moment without one."""
        try:
            due_at, number, log = self._queue.get(timeout=_NAP_S)
        except queue.Empty:
            return None
        wait_s = due_at - time.monotonic()
        if wait_s > 0:
            stopped.wait(min(wait_s, _NAP_S))
        if wait_s > _NAP_S or stopped.is_set():
            self._queue.put((due_at, number, log))
            return None
        return log


class LogFollower:
    """Follows the workers of a job, future ones too, until the job has ended and all lines have been read.

    `job_path` and `pods` are where the API server has the job and its pods; `stored` has the logs of earlier pods.
    """

    def __init__(
        self,
        connection: Connection,
        job: ElasticJob,
        job_path: str,
        pods: Resource,
        query: LogQuery,
        stored: StoredLogs,
    ) -> None:
        self._connection, self._job, self._job_path, self._pods, self._query = connection, job, job_path, pods, query
        self._stored = stored
        self._reflector = Reflector(connection, pods, ObjectStore())
        self._lock = threading.Lock()
        self._logs: dict[str, PodLog] = {}  # by pod uid, including those that have been read to their end
        self._newest: dict[str, PodLog] = {}  # by worker
        self._gone: dict[
            str, list[PodLog]
        ] = {}  # by worker, those whose last lines are still to be read from the storage
        self._unread = 0
        self._streams: dict[Stream, PodLog] = {}
        self._turns = _Turns()
        self._lines: queue.Queue[LogLine | ElasticctlError] = queue.Queue(BACKLOG_LINES)
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def lines(self, pods: Iterable[Manifest] = ()) -> Iterator[LogLine]:
        """Yield lines as they come; ends with the job. Call it once.

        `pods` are those that existed before; one that is gone by now is read from the storage.
        """
        for pod in pods:
            self._pod_changed(None, pod)
        self._reflector.store.subscribe(self._pod_changed)
        self._reflector.start()
        try:
            yield from self._until_job_ends()
        finally:
            self._stop()

    def _until_job_ends(self) -> Iterator[LogLine]:
        check_at, over = 0.0, False
        while True:
            finished = over and not self._unread
            try:
                line = self._lines.get(timeout=0 if finished else _NAP_S)
            except queue.Empty:
                if finished:
                    return
            else:
                if isinstance(line, ElasticctlError):
                    raise line
                yield line
            if time.monotonic() >= check_at:
                self._close_dead_streams()
                over = over or self._is_over()
                check_at = time.monotonic() + CHECK_EVERY_S

    def _is_over(self) -> bool:
        """True when the job has ended or is gone; from then on all of its pods are known."""
        try:
            job = ElasticJob.from_manifest(self._connection.request("GET", self._job_path))
            if job.uid == self._job.uid and not job.status.phase.terminal:
                return False
            pods = self._connection.request("GET", self._pods.path, None, self._pods.params())
        except NotFoundError:
            return True
        except (UnreachableError, BusyError):
            return False  # unknown; asked again
        for pod in pods.get("items") or []:
            self._pod_changed(None, pod)
        return True

    def _pod_changed(self, old: Manifest | None, new: Manifest | None) -> None:
        """Handle a change of a pod: start to read its log once it runs."""
        if old is not None and new is not None and old["metadata"]["uid"] != new["metadata"]["uid"]:
            self._pod_changed(old, None)  # deleted and created again under the same name between two lists
        pod = new or old
        if pod is None or not is_owned(pod, self._job.uid) or not is_wanted(pod, self._query):
            return
        uid = str(pod["metadata"]["uid"])
        with self._lock:
            log = self._logs.get(uid)
            if log is None and new is not None and has_started(pod):
                log = self._logs[uid] = PodLog(self._connection, pod, self._query)
                if log.worker in self._newest:  # the name now belongs to this pod
                    self._note_gone(self._newest[log.worker])
                self._newest[log.worker] = log
                self._unread += 1
                self._turns.put(log)
                self._add_thread()
                if self._unread == MAX_STREAMS + 1:  # they take turns from now on, so none may keep a thread
                    self._close_streams()
            if log is not None:
                log.ended |= has_ended(pod)
                if new is None:
                    self._note_gone(log)

    def _add_thread(self) -> None:
        if len(self._threads) < min(self._unread, MAX_STREAMS):
            thread = threading.Thread(target=self._work, name=f"logs-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        """Read the logs, each when it is its turn."""
        while not self._stopped.is_set():
            log = self._turns.get(self._stopped)
            if log is None:
                continue
            try:
                wait_s = self._turn(log)
            except ElasticctlError as e:
                self._emit(e)
                return
            if wait_s is not None:
                self._turns.put(log, wait_s)
                continue
            with self._lock:
                self._unread -= 1
                log.done = True
                if log in self._gone.get(log.worker, ()):
                    self._gone[log.worker].remove(log)

    def _turn(self, log: PodLog) -> float | None:
        """Read what is new in a log; return the seconds until its next turn, or None when nothing more will come.

        Raises errors that another attempt cannot fix.
        """
        if (self._gone.get(log.worker) or [log])[0] is not log:
            return MIN_PAUSE_S  # its predecessor's last lines come first
        if log.gone:  # its name, by which logs are read, now belongs to its successor
            return self._read_stored_rest(log)
        ended = log.ended  # taken before reading, so that a complete log is read to its end
        try:
            read = self._read(log, follow=not ended and self._unread <= MAX_STREAMS, whole=ended)
        except (ForbiddenError, CredentialsError):
            raise
        except NotFoundError:
            with self._lock:
                self._note_gone(log)
            return self._read_stored_rest(log)
        except ClusterError as e:
            return self._after_failure(log, e, ended=ended)
        if ended:
            return None
        log.pause_s = MIN_PAUSE_S if read else min(MAX_PAUSE_S, 2 * log.pause_s)
        return 0.0 if log.ended or log.gone else log.pause_s

    def _note_gone(self, log: PodLog) -> None:
        """Note that the pod is gone; call this with the lock held."""
        if log.gone_at is None:
            log.gone_at = time.monotonic()
            if self._stored.kept and not log.done:
                self._gone.setdefault(log.worker, []).append(log)

    def _read_stored_rest(self, log: PodLog) -> float | None:
        """Read the last lines of a log from the storage, once they have had the time to get there."""
        if not self._stored.kept:
            return None
        if not log.settled:
            log.settled = True
            return SETTLE_S
        for line in log.stored_rest(self._stored):
            if not self._emit(line):
                break
        return None

    def _close_dead_streams(self) -> None:
        """Close the streams of pods that have been gone for a while: their node may not be there to close them."""
        if not self._stored.kept:
            return
        now = time.monotonic()
        with self._lock:
            for stream, log in self._streams.items():
                if log.gone_at is not None and now > log.gone_at + SETTLE_S:
                    stream.close()

    def _after_failure(self, log: PodLog, error: ClusterError, *, ended: bool) -> float | None:
        """Return the wait after a failure: the node does not answer, or the container does not exist."""
        answers = not isinstance(error, UnreachableError | BusyError)
        log.failures += ended
        if ended and (answers or log.failures >= LAST_TRIES):
            return self._read_stored_rest(log)
        wait_s, log.pause_s = log.pause_s, min(MAX_PAUSE_S, 2 * log.pause_s)
        return max(wait_s, (error.retry_after_s or 0.0) if isinstance(error, BusyError) else 0.0)

    def _read(self, log: PodLog, *, follow: bool, whole: bool) -> bool:
        """Make one request for a log; True when there were new lines."""
        read = False
        with closing(log.open(follow=follow)) as stream:
            with self._lock:
                self._streams[stream] = log
                if self._stopped.is_set() or (follow and self._unread > MAX_STREAMS):  # since the request was made
                    stream.close()
            try:
                for line in log.lines(stream, whole=whole):
                    read = self._emit(line)
            finally:
                with self._lock:
                    self._streams.pop(stream, None)
        return read

    def _emit(self, line: LogLine | ElasticctlError) -> bool:
        """Hand a line to the reader, waiting for space; False when following has been stopped."""
        while not self._stopped.is_set():
            try:
                self._lines.put(line, timeout=_NAP_S)
                return True
            except queue.Full:
                continue
        return False

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()

    def _stop(self) -> None:
        """Stop the threads; one that still waits for the first answer is a daemon and ends with the process."""
        self._stopped.set()
        self._reflector.stop()
        with self._lock:
            self._close_streams()
