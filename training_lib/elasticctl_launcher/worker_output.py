"""Send what a worker prints to the job's storage as it comes, so that it can be read when the worker's node is gone.

A thread of its own, which sleeps while nothing is said, and bounded memory: where the storage is away for long, the
oldest lines that it has not taken are dropped, and their numbers tell that they are missing. Printing never waits. The
thread is not of lower priority than others: who is put off while it holds the interpreter's lock holds up all of them.

A worker that is killed outright loses what it said in its last `FLUSH_S` seconds, and in its first `WARM_UP_S`.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from elasticctl_store import stored_logs
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import Patience, Storage
from elasticctl_store.storage import open as open_storage
from elasticctl_store.stored_logs import Incarnation, Line

PATIENCE_S = 1.0
"""How long the launcher waits for its turn: where nobody reads what ranks print, it has to go on all the same."""

Keep = Callable[[float, int | None, str], None]
"""`keep(at, rank, text)`: `at` in seconds since the epoch, `rank` None for the launcher itself."""


class WorkerOutput:
    """The worker's stdout and stderr; `keep` may be set once it is known who wants a copy."""

    def __init__(self) -> None:
        self.keep: Keep | None = None
        self._lock = threading.Lock()

    def rank_says(self, rank: int, text: str) -> None:
        """Print a line of a rank's."""
        self._print(sys.stdout, rank, text, -1)

    def say(self, text: str) -> None:
        """Print what the launcher has to say itself."""
        for line in text.splitlines():
            self._print(sys.stderr, None, f"[launcher] {line}", PATIENCE_S)

    def handler(self) -> logging.Handler:
        """A handler by which log records are said."""
        return _Handler(self)

    def _print(self, stream: TextIO, rank: int | None, text: str, patience_s: float) -> None:
        in_turn = self._lock.acquire(timeout=patience_s)
        try:
            if self.keep is not None:
                self.keep(time.time(), rank, text)
            with suppress(OSError):  # nobody reads it any more
                stream.write(f"{text}\n")
                stream.flush()
        finally:
            if in_turn:
                self._lock.release()


class _Handler(logging.Handler):
    def __init__(self, output: WorkerOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Say a record; one that cannot be put into words is logging's to complain about."""
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - as every handler does: a wrong record is no reason to end
            self.handleError(record)
            return
        self._output.say(text)


AUTO, ON, OFF = "auto", "on", "off"
CHOICES = (AUTO, ON, OFF)

FLUSH_S = 2.0
HURRIED_S = 0.5
"""The same once this machine is about to go."""
WARM_UP_S = 5.0
"""Before this, a worker's start needs the processor more than importing a cloud's client does."""
CLOSE_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
LINE_OVERHEAD_BYTES = 200
"""What a waiting line takes beside its text."""
PATIENCE = Patience(tries=2, total_s=10.0, connect_s=5.0, silence_s=10.0)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """`pending_bytes`: lines in memory that the storage has not taken. `kept_bytes`: compressed, of one incarnation,
    in the storage; the oldest make room.
    """

    pending_bytes: int = 4 << 20
    kept_bytes: int = 256 << 20
    flush_s: float = FLUSH_S
    warm_up_s: float = WARM_UP_S
    first_pause_s: float = FIRST_PAUSE_S


class LogUploader:
    """Takes lines with `add`, from any thread; `connect` opens the storage, on the shipper's own thread."""

    def __init__(
        self, connect: Callable[[], Storage], incarnation: Incarnation, bounds: UploadLimits = UploadLimits()
    ) -> None:
        self._connect, self._incarnation, self._bounds = connect, incarnation, bounds
        self._changed = threading.Condition()
        self._pending: deque[Line] = deque()
        self._pending_bytes, self._number = 0, 0
        self._waits_since = 0.0
        self._flush_s = bounds.flush_s
        self._warm_at, self._retry_at = time.monotonic() + bounds.warm_up_s, 0.0
        self._closing = False
        self._segment = _Segment(1)
        self._kept: deque[tuple[str, int]] = deque()
        self._storage: Storage | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="logship", daemon=True)
        self._thread.start()

    def add(self, at: float, rank: int | None, text: str) -> None:
        """Take a line; never waits for the storage."""
        with self._changed:
            self._number += 1
            if not self._pending:
                self._waits_since = time.monotonic()
                self._changed.notify()
            self._pending.append(Line(self._number, at, rank, text))
            was_crowded = self._crowded()
            self._pending_bytes += len(text) + LINE_OVERHEAD_BYTES
            if self._crowded() and not was_crowded:
                self._changed.notify()
            while self._pending_bytes > self._bounds.pending_bytes:
                self._pending_bytes -= len(self._pending.popleft().text) + LINE_OVERHEAD_BYTES

    def hurry(self) -> None:
        """This machine is about to go: send what there is now, and what follows sooner."""
        with self._changed:
            self._flush_s, self._warm_at, self._retry_at = min(self._flush_s, HURRIED_S), 0.0, 0.0
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, for `timeout_s` seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._wait():
            stored = self._ship()
            with self._changed:
                if self._closing and (not stored or not self._pending):
                    return
                self._retry_at = 0.0 if stored else time.monotonic() + self._pause_s()

    def _wait(self) -> bool:
        """Wait until something is to be sent; False when nothing ever will be."""
        with self._changed:
            while not self._closing:
                if not self._pending and not self._segment.dirty:
                    self._changed.wait()
                    continue
                wanted_at = 0.0 if self._crowded() else max(self._waits_since + self._flush_s, self._warm_at)
                left_s = max(wanted_at, self._retry_at) - time.monotonic()
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
            return bool(self._pending) or self._segment.dirty

    def _crowded(self) -> bool:
        """Do so many lines wait that they had better go before their time?"""
        return self._pending_bytes > self._bounds.pending_bytes // 2

    def _ship(self) -> bool:
        """Send what waits; True when all of it that fits an object has been stored."""
        self._segment.add(self._take(self._segment.room_bytes))
        if not self._segment.dirty:
            return True
        key = self._incarnation.key(self._segment.first)
        try:
            if self._storage is None:
                self._storage = self._connect()
            self._storage.put(key, self._segment.parts)
            self._segment.dirty = False
            if self._segment.room_bytes <= 0:
                self._kept.append((key, self._segment.size_bytes))
                self._segment = _Segment(self._segment.last + 1)
                self._make_room(self._storage)
        except StorageError as e:
            if not self._failures:
                log.warning("what is printed is not kept in the storage for now: %s", e)
            self._failures += 1
            return False
        if self._failures:
            log.info("what is printed is kept in the storage again")
        self._failures = 0
        return True

    def _take(self, room_bytes: int) -> list[Line]:
        """Waiting lines that fill `room_bytes` of text; the last may be too long for it."""
        taken: list[Line] = []
        with self._changed:
            while self._pending and room_bytes > 0:
                line = self._pending.popleft()
                self._pending_bytes -= len(line.text) + LINE_OVERHEAD_BYTES
                room_bytes -= len(line.text)
                taken.append(line)
            self._waits_since = time.monotonic() if not self._pending else 0.0
        return taken

    def _make_room(self, storage: Storage) -> None:
        """Delete the oldest objects of this incarnation beyond what is kept of one."""
        doomed = []
        while len(self._kept) > 1 and sum(size for _, size in self._kept) > self._bounds.kept_bytes:
            doomed.append(self._kept.popleft()[0])
        if doomed:
            storage.delete(doomed)

    def _pause_s(self) -> float:
        longest_s = min(LONGEST_PAUSE_S, self._bounds.first_pause_s * 2.0 ** (self._failures - 1))
        return longest_s * (0.5 + random.random() / 2)  # noqa: S311 - jitter, no secret


class _Segment:
    """The object that is being written: `parts` are its gzip members, `dirty` says that not all of them are stored."""

    def __init__(self, first: int) -> None:
        self.first, self.last = first, first - 1
        self.parts: list[bytes] = []
        self.room_bytes = stored_logs.SEGMENT_BYTES
        self.dirty = False

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.parts))

    def add(self, lines: list[Line]) -> None:
        if not lines:
            return
        if not self.parts:
            self.first = lines[0].number
        text = stored_logs.encode(lines)
        self.parts.append(stored_logs.compress(text))
        self.room_bytes -= len(text)
        self.last, self.dirty = lines[-1].number, True


def create_uploader(choice: str, environ: Mapping[str, str]) -> LogUploader | None:
    """The shipper of this worker, or None where nothing is to be sent.

    `auto`: wherever the job has a storage, but for a folder on this machine's own local cluster (known by its Unix
    socket), which keeps what its workers print itself.
    """
    url, job_uid = environ.get("ELASTICCTL_STORAGE", ""), environ.get("ELASTICCTL_JOB_UID", "")
    worker, uid = environ.get("ELASTICCTL_WORKER", ""), environ.get("ELASTICCTL_POD_UID", "")
    local = environ.get("ELASTICCTL_RDZV_ENDPOINT", "").startswith("unix://") and not url.startswith(("s3:", "gs:"))
    if choice == OFF or (choice == AUTO and (local or not url)):
        return None
    missing = [name for name, text in (("ELASTICCTL_STORAGE", url), ("ELASTICCTL_JOB_UID", job_uid)) if not text]
    if missing or not all(map(stored_logs.is_name, (job_uid, worker, uid))):
        log.warning("what is printed is not kept in the storage: %s", f"no {missing[0]}" if missing else "no identity")
        return None
    return LogUploader(lambda: open_storage(url, PATIENCE), Incarnation(job_uid, worker, time.time(), uid))
