"""Follow the logs of a job's workers, in bounded memory and with a bounded number of threads.

A watch tells of the job's pods, so that a worker is read from its first moment and one that is made again is followed
too. Each log is one request that stays open; where there are more of them than `MAX_STREAMS`, they take turns, and a
turn reads what has been added since the last. A stream that breaks is taken up where it broke. What a worker said last
is read from the job's storage when its pod is gone.
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

LOOK_EVERY_S = 1.0
"""How often a job is asked whether it has ended."""
MAX_PAUSE_S = 8.0
LAST_TRIES = 4
"""How often the log of a worker that has ended is asked for, when nobody answers for its node."""
SETTLE_S = 3.0
"""How long a worker that is gone gets to have its last lines in the storage: longer than its launcher waits to send."""
BACKLOG_LINES = 1000
"""Lines read and not yet taken: readers wait when there are as many."""
_NAP_S = 0.2


class _Turns:
    """Logs in order of when it is their turn, and how long to wait after failures; owned by the threads in turn."""

    def __init__(self) -> None:
        self._queue: queue.PriorityQueue[tuple[float, int, PodLog]] = queue.PriorityQueue()
        self._numbers = itertools.count()

    def put(self, log: PodLog, wait_s: float = 0.0) -> None:
        """Give a log its next turn in `wait_s` seconds."""
        self._queue.put((time.monotonic() + wait_s, next(self._numbers), log))

    def get(self, stopped: threading.Event) -> PodLog | None:
        """The log whose turn it is, or None after a moment without one."""
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


class Following:
    """Follows the workers of a job, those that are still to come too, until it has ended and all is said.

    `job_path` and `pods` are where the job and its pods are found; `stored` is what it keeps of those that are gone.
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
        self._logs: dict[str, PodLog] = {}  # by pod uid, those that have been read to their end too
        self._newest: dict[str, PodLog] = {}  # by worker
        self._gone: dict[str, list[PodLog]] = {}  # by worker, those whose rest is still to be read from the storage
        self._unread = 0
        self._streams: dict[Stream, PodLog] = {}
        self._turns = _Turns()
        self._said: queue.Queue[LogLine | ElasticctlError] = queue.Queue(BACKLOG_LINES)
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def lines(self, pods: Iterable[Manifest] = ()) -> Iterator[LogLine]:
        """Yield lines as they come; ends with the job. To be called once.

        `pods`: those that were there before; one that has gone since is read from the storage.
        """
        for pod in pods:
            self._changed(None, pod)
        self._reflector.store.subscribe(self._changed)
        self._reflector.start()
        try:
            yield from self._until_over()
        finally:
            self._stop()

    def _until_over(self) -> Iterator[LogLine]:
        look_at, over = 0.0, False
        while True:
            nothing_to_come = over and not self._unread
            try:
                said = self._said.get(timeout=0 if nothing_to_come else _NAP_S)
            except queue.Empty:
                if nothing_to_come:
                    return
            else:
                if isinstance(said, ElasticctlError):
                    raise said
                yield said
            if time.monotonic() >= look_at:
                self._hang_up()
                over = over or self._is_over()
                look_at = time.monotonic() + LOOK_EVERY_S

    def _is_over(self) -> bool:
        """True when the job has ended or is gone; every pod that it has left is known then."""
        try:
            job = ElasticJob.from_manifest(self._connection.request("GET", self._job_path))
            if job.uid == self._job.uid and not job.status.phase.terminal:
                return False
            pods = self._connection.request("GET", self._pods.path, None, self._pods.params())
        except NotFoundError:
            return True
        except (UnreachableError, BusyError):
            return False  # not known; asked again
        for pod in pods.get("items") or []:
            self._changed(None, pod)
        return True

    def _changed(self, old: Manifest | None, new: Manifest | None) -> None:
        """A pod has come, changed or gone: begin to read it once it runs."""
        if old is not None and new is not None and old["metadata"]["uid"] != new["metadata"]["uid"]:
            self._changed(old, None)  # gone, and made again under its name, between two looks
        pod = new or old
        if pod is None or not is_owned(pod, self._job.uid) or not is_wanted(pod, self._query):
            return
        uid = str(pod["metadata"]["uid"])
        with self._lock:
            log = self._logs.get(uid)
            if log is None and new is not None and has_started(pod):
                log = self._logs[uid] = PodLog(self._connection, pod, self._query)
                if log.worker in self._newest:  # what is called so now is this one
                    self._note_gone(self._newest[log.worker])
                self._newest[log.worker] = log
                self._unread += 1
                self._turns.put(log)
                self._hire()
                if self._unread == MAX_STREAMS + 1:  # turns from now on: nobody may keep a thread
                    self._close_streams()
            if log is not None:
                log.ended |= has_ended(pod)
                if new is None:
                    self._note_gone(log)

    def _hire(self) -> None:
        if len(self._threads) < min(self._unread, MAX_STREAMS):
            thread = threading.Thread(target=self._work, name=f"logs-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        """Give the log whose turn it is a turn, again and again."""
        while not self._stopped.is_set():
            log = self._turns.get(self._stopped)
            if log is None:
                continue
            try:
                wait_s = self._turn(log)
            except ElasticctlError as e:
                self._say(e)
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
        """Read what there is of a log; seconds until its next turn, or None when it has been read to its end.

        Raises what no other try can mend.
        """
        if (self._gone.get(log.worker) or [log])[0] is not log:
            return MIN_PAUSE_S  # its predecessor's last lines come first
        if log.gone:  # what is called so now, and read by that name, is its successor
            return self._leave(log)
        ended = log.ended  # before it is read: what was complete then is read to its end
        try:
            read = self._read(log, follow=not ended and self._unread <= MAX_STREAMS, whole=ended)
        except (ForbiddenError, CredentialsError):
            raise
        except NotFoundError:
            with self._lock:
                self._note_gone(log)
            return self._leave(log)
        except ClusterError as e:
            return self._after_failure(log, e, ended=ended)
        if ended:
            return None
        log.pause_s = MIN_PAUSE_S if read else min(MAX_PAUSE_S, 2 * log.pause_s)
        return 0.0 if log.ended or log.gone else log.pause_s

    def _note_gone(self, log: PodLog) -> None:
        """The pod is no longer there; to be called with the lock held."""
        if log.gone_at is None:
            log.gone_at = time.monotonic()
            if self._stored.kept and not log.done:
                self._gone.setdefault(log.worker, []).append(log)

    def _leave(self, log: PodLog) -> float | None:
        """The log cannot be read any more: read what the storage has beyond it, once that can be all."""
        if not self._stored.kept:
            return None
        if not log.settled:
            log.settled = True
            return SETTLE_S
        for line in log.stored_rest(self._stored):
            if not self._say(line):
                break
        return None

    def _hang_up(self) -> None:
        """Close the streams of pods that are gone for a while: nobody may be there to do it at the other end."""
        if not self._stored.kept:
            return
        now = time.monotonic()
        with self._lock:
            for stream, log in self._streams.items():
                if log.gone_at is not None and now > log.gone_at + SETTLE_S:
                    stream.close()

    def _after_failure(self, log: PodLog, error: ClusterError, *, ended: bool) -> float | None:
        """The node, or the way to it, does not answer; or the container is not there yet, or no longer."""
        answers = not isinstance(error, UnreachableError | BusyError)
        log.failures += ended
        if ended and (answers or log.failures >= LAST_TRIES):
            return self._leave(log)
        wait_s, log.pause_s = log.pause_s, min(MAX_PAUSE_S, 2 * log.pause_s)
        return max(wait_s, (error.retry_after_s or 0.0) if isinstance(error, BusyError) else 0.0)

    def _read(self, log: PodLog, *, follow: bool, whole: bool) -> bool:
        """One request; True when there was anything new."""
        read = False
        with closing(log.open(follow=follow)) as stream:
            with self._lock:
                self._streams[stream] = log
                if self._stopped.is_set() or (follow and self._unread > MAX_STREAMS):  # since it was asked for
                    stream.close()
            try:
                for line in log.lines(stream, whole=whole):
                    read = self._say(line)
            finally:
                with self._lock:
                    self._streams.pop(stream, None)
        return read

    def _say(self, said: LogLine | ElasticctlError) -> bool:
        """Hand a line on, when there is room; False when nobody wants it any more."""
        while not self._stopped.is_set():
            try:
                self._said.put(said, timeout=_NAP_S)
                return True
            except queue.Full:
                continue
        return False

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()

    def _stop(self) -> None:
        """End the threads; one that still waits for an answer to begin is a daemon and ends with the process."""
        self._stopped.set()
        self._reflector.stop()
        with self._lock:
            self._close_streams()
