"""The output of a worker: the lines of its ranks and of the launcher, printed here and copied to the job's storage.

`WorkerOutput` prints each line immediately and as a whole. It passes each line to the uploads before it prints it, so
that the log in the storage has the same lines in the same order as the log that the cluster keeps.

`LogUploader` sends the lines to the storage as they come, so that they can be read after the worker's node is gone. It
has one thread, which sleeps while nothing is printed, and bounded memory: if the storage is away for long, the oldest
pending lines are dropped, and the numbers of the other lines show the gap. Printing never waits for it. The thread runs
at normal priority, because a thread that is preempted while it holds the interpreter's lock delays all others.

The metrics that rank 0 reports are stored in the same way, in separate objects (`elasticctl_store.stored_metrics`).

A worker that is killed loses the lines of its last `FLUSH_S` seconds, and those of its first `WARM_UP_S` seconds if it
is killed within them.
"""

from __future__ import annotations

import io
import itertools
import logging
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from elasticctl_launcher.workspace import UnpackedWorkspace
from elasticctl_protocol import variables
from elasticctl_store import stored_logs, stored_metrics
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import Patience, Storage
from elasticctl_store.storage import open as open_storage
from elasticctl_store.stored_logs import Incarnation, StoredLine

PRINT_TIMEOUT_S = 1.0
"""How long a message of the launcher waits for the ranks' lines: it continues even if nothing reads its output."""

AUTO, ON, OFF = "auto", "on", "off"
CHOICES = (AUTO, ON, OFF)
FLUSH_S = 2.0
METRICS_FLUSH_S = 10.0
"""Each flush is a write request, which storage services charge for."""
HURRIED_FLUSH_S = 0.5
"""The interval once this machine is about to be reclaimed."""
WARM_UP_S = 5.0
"""No upload begins before, because the start of the worker needs the CPU more than the import of a cloud's client."""
CLOSE_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
LINE_OVERHEAD_BYTES = 200
"""The memory that a pending line takes in addition to its text."""
PATIENCE = Patience(tries=2, total_s=10.0, connect_s=5.0, silence_s=10.0)

log = logging.getLogger(__name__)


class WorkerOutput:
    """The worker's stdout and stderr.

    `workspace`, if there is one, is the copy that the ranks run.
    """

    def __init__(self) -> None:
        self.workspace: UnpackedWorkspace | None = None
        self._uploads = Uploads()
        self._lock = threading.Lock()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # $PYTHONIOENCODING or the locale may lack a character

    def store_in(self, uploads: Uploads) -> None:
        """Have each line and each row of metrics uploaded, too, from now on."""
        self._uploads = uploads

    def show_as_submitted(self, workspace: UnpackedWorkspace) -> None:
        """Name the files of the copy that the ranks run as they were submitted."""
        self.workspace = workspace

    def reword(self, line: str) -> str:
        """Return what is printed and stored instead of a line of a rank: it names files as they were submitted."""
        return line if self.workspace is None else self.workspace.with_known_paths(line)

    def known_path(self, path: str) -> str:
        """Return the path of a rank's file as it was submitted."""
        return path if self.workspace is None else self.workspace.known_path(path)

    def print_rank_line(self, rank: int, text: str) -> None:
        """Print a line of a rank to stdout."""
        self._print(sys.stdout, rank, text, -1)

    def store_metrics(self, rows: Sequence[str]) -> None:
        """Store rows of metrics (lines of JSON) without printing them."""
        if self._uploads.metrics is not None:
            for row in rows:
                self._uploads.metrics.add(time.time(), 0, row)

    def print_message(self, text: str) -> None:
        """Print a message of the launcher to stderr."""
        for line in text.splitlines():
            self._print(sys.stderr, None, f"[launcher] {line}", PRINT_TIMEOUT_S)

    def _print(self, stream: TextIO, rank: int | None, text: str, timeout_s: float) -> None:
        locked = self._lock.acquire(timeout=timeout_s)
        try:
            if self._uploads.log is not None:
                self._uploads.log.add(time.time(), rank, text)
            with suppress(OSError):  # the reader has gone
                stream.write(f"{text}\n")
                stream.flush()
        finally:
            if locked:
                self._lock.release()


class OutputHandler(logging.Handler):
    """Prints log records as messages of the launcher."""

    def __init__(self, output: WorkerOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record. `logging` itself reports a record that cannot be formatted."""
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - as every handler does: a bad record must not end the launcher
            self.handleError(record)
            return
        self._output.print_message(text)


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """The limits of an uploader.

    `pending_bytes` limits the lines in memory that have not been stored, and `stored_bytes` the compressed lines of one
    incarnation in the storage. The oldest lines beyond them are dropped or deleted. `flush_s` is the interval between
    uploads, `warm_up_s` the time before the first one, and `first_pause_s` the pause after a first failure.
    """

    pending_bytes: int = 4 << 20
    stored_bytes: int = 256 << 20
    flush_s: float = FLUSH_S
    warm_up_s: float = WARM_UP_S
    first_pause_s: float = FIRST_PAUSE_S


@dataclass(frozen=True, slots=True)
class Format:
    """How lines are stored.

    `key(incarnation, number)` is the key of the object that begins with line `number`; `encode(lines)` is its text.
    """

    key: Callable[[Incarnation, int], str]
    encode: Callable[[Iterable[StoredLine]], bytes]


LOG = Format(Incarnation.key, stored_logs.encode)
METRICS = Format(stored_metrics.key, stored_metrics.encode)


class LogUploader:
    """Stores the lines that are passed to `add`, from any thread.

    `connect()` opens the storage; it is called on the uploader's own thread.
    """

    def __init__(
        self,
        connect: Callable[[], Storage],
        incarnation: Incarnation,
        limits: UploadLimits = UploadLimits(),
        form: Format = LOG,
    ) -> None:
        self._connect, self._incarnation, self._limits, self._form = connect, incarnation, limits, form
        self._changed = threading.Condition()
        self._pending: deque[StoredLine] = deque()
        self._pending_bytes, self._number = 0, 0
        self._pending_since = 0.0
        self._flush_s = limits.flush_s
        self._warm_at, self._retry_at = time.monotonic() + limits.warm_up_s, 0.0
        self._closing = False
        self._segment = _Segment(1, form)
        self._stored: deque[tuple[str, int]] = deque()
        self._storage: Storage | None = None
        self._failures, self._cannot_delete = 0, False
        self._thread = threading.Thread(target=self._run, name="log-upload", daemon=True)
        self._thread.start()

    def add(self, at: float, rank: int | None, text: str) -> None:
        """Queue a line; never wait for the storage.

        `at` is Unix time in seconds; `rank` is None for the launcher itself.
        """
        with self._changed:
            self._number += 1
            if not self._pending:
                self._pending_since = time.monotonic()
                self._changed.notify()
            self._pending.append(StoredLine(self._number, at, rank, text))
            was_crowded = self._is_crowded()
            self._pending_bytes += len(text) + LINE_OVERHEAD_BYTES
            if self._is_crowded() and not was_crowded:
                self._changed.notify()
            while self._pending_bytes > self._limits.pending_bytes:
                self._pending_bytes -= len(self._pending.popleft().text) + LINE_OVERHEAD_BYTES

    def hurry(self) -> None:
        """Send pending lines now, and later ones sooner, because this machine is about to be reclaimed."""
        with self._changed:
            self._flush_s, self._warm_at, self._retry_at = min(self._flush_s, HURRIED_FLUSH_S), 0.0, 0.0
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send the remaining lines, for `timeout_s` seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._wait():
            stored = self._upload()
            with self._changed:
                if self._closing and (not stored or not self._pending):
                    return
                self._retry_at = 0.0 if stored else time.monotonic() + self._pause_s()

    def _wait(self) -> bool:
        """Wait until an upload is due; return False if there is nothing left to send after `close`."""
        with self._changed:
            while not self._closing:
                if not self._pending and not self._segment.dirty:
                    self._changed.wait()
                    continue
                due_at = 0.0 if self._is_crowded() else max(self._pending_since + self._flush_s, self._warm_at)
                left_s = max(due_at, self._retry_at) - time.monotonic()
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
            return bool(self._pending) or self._segment.dirty

    def _is_crowded(self) -> bool:
        """True if so many lines are pending that they are sent early."""
        return self._pending_bytes > self._limits.pending_bytes // 2

    def _upload(self) -> bool:
        """Send pending lines; return True once all that fit into one object have been stored."""
        self._segment.add(self._take_pending(self._segment.room_bytes))
        if not self._segment.dirty:
            return True
        key = self._form.key(self._incarnation, self._segment.first)
        try:
            if self._storage is None:
                self._storage = self._connect()
            self._storage.put(key, self._segment.parts)
            self._segment.dirty = False
            if self._segment.room_bytes <= 0:
                self._stored.append((key, self._segment.size_bytes))
                self._segment = _Segment(self._segment.last + 1, self._form)
                self._delete_oldest(self._storage)
        except StorageError as e:
            if not self._failures:
                log.warning("cannot store the log for now: %s", e)
            self._failures += 1
            return False
        if self._failures:
            log.info("the log is stored again")
        self._failures = 0
        return True

    def _take_pending(self, room_bytes: int) -> list[StoredLine]:
        """Take pending lines with `room_bytes` of text; the last one may exceed that."""
        taken: list[StoredLine] = []
        with self._changed:
            while self._pending and room_bytes > 0:
                line = self._pending.popleft()
                self._pending_bytes -= len(line.text) + LINE_OVERHEAD_BYTES
                room_bytes -= len(line.text)
                taken.append(line)
            self._pending_since = time.monotonic() if not self._pending else 0.0
        return taken

    def _delete_oldest(self, storage: Storage) -> None:
        """Delete the oldest objects of this incarnation beyond `stored_bytes`; a failure does not stop the upload."""
        count, left_bytes = 0, sum(size for _, size in self._stored)
        while count < len(self._stored) - 1 and left_bytes > self._limits.stored_bytes:
            left_bytes -= self._stored[count][1]
            count += 1
        if not count:
            return
        try:
            storage.delete([key for key, _ in itertools.islice(self._stored, count)])
        except StorageError as error:  # tried again with the next object
            if not self._cannot_delete:
                self._cannot_delete = True
                log.warning("cannot delete the oldest lines of the log for now: %s", error)
            return
        for _ in range(count):
            self._stored.popleft()

    def _pause_s(self) -> float:
        longest_s = min(LONGEST_PAUSE_S, self._limits.first_pause_s * 2.0 ** (self._failures - 1))
        return longest_s * (0.5 + random.random() / 2)  # noqa: S311 - jitter, no secret


class _Segment:
    """The object that is being written: `parts` are its gzip members, and `dirty` is set if some are not stored yet."""

    def __init__(self, first: int, form: Format) -> None:
        self.first, self.last, self._form = first, first - 1, form
        self.parts: list[bytes] = []
        self.room_bytes = stored_logs.SEGMENT_BYTES
        self.dirty = False

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.parts))

    def add(self, lines: list[StoredLine]) -> None:
        if not lines:
            return
        if not self.parts:
            self.first = lines[0].number
        text = self._form.encode(lines)
        self.parts.append(stored_logs.compress(text))
        self.room_bytes -= len(text)
        self.last, self.dirty = lines[-1].number, True


@dataclass(frozen=True, slots=True)
class Uploads:
    """The uploaders of a worker's log and of its metrics; None for what is not stored."""

    log: LogUploader | None = None
    metrics: LogUploader | None = None

    def hurry(self) -> None:
        """See `LogUploader.hurry`."""
        for uploader in self._both():
            uploader.hurry()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send the remaining lines, for `timeout_s` seconds at most."""
        until_s = time.monotonic() + timeout_s
        self.hurry()  # both upload at the same time
        for uploader in self._both():
            uploader.close(max(0.0, until_s - time.monotonic()))

    def _both(self) -> list[LogUploader]:
        return [uploader for uploader in (self.log, self.metrics) if uploader is not None]


def start_uploads(choice: str, environ: Mapping[str, str]) -> Uploads:
    """Start to store a worker's output.

    `choice` is one of `CHOICES`. With `auto`, the log is stored if the job has a storage. It is not if that is a folder
    and the job runs on the local cluster (recognized by its Unix socket), which keeps the logs of its workers itself.
    Metrics are stored whenever there is a storage.
    """
    url, job_uid = environ.get(variables.STORAGE, ""), environ.get(variables.JOB_UID, "")
    worker, uid = environ.get(variables.WORKER, ""), environ.get(variables.POD_UID, "")
    local = environ.get(variables.RENDEZVOUS_ENDPOINT, "").startswith("unix://") and not url.startswith(("s3:", "gs:"))
    if choice == OFF or (choice == AUTO and not url):
        return Uploads()
    missing = [name for name, text in ((variables.STORAGE, url), (variables.JOB_UID, job_uid)) if not text]
    if missing or not all(map(stored_logs.is_name, (job_uid, worker, uid))):
        log.warning(
            "the log is not stored: %s", f"{missing[0]} is not set" if missing else "this worker has no identity"
        )
        return Uploads()
    life = Incarnation(job_uid, worker, time.time(), uid)
    limits = UploadLimits(flush_s=FLUSH_S if local else METRICS_FLUSH_S)
    return Uploads(
        LogUploader(lambda: open_storage(url, PATIENCE), life) if choice == ON or not local else None,
        LogUploader(lambda: open_storage(url, PATIENCE), life, limits, METRICS),
    )
