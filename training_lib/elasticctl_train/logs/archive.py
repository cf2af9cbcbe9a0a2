"""Read what workers have printed from their job's storage; for `elasticctl logs`. Without torch.

Only what is wanted is read: a listing tells the number of the first line of each object, so the last lines are found
without the first ones, and a time by halving.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from functools import lru_cache

from elasticctl_train.errors import DamagedError, MissingError
from elasticctl_train.logs import book
from elasticctl_train.logs.book import Incarnation, Line
from elasticctl_train.parallel import each
from elasticctl_train.storage import Storage, all_keys

_KEPT_SEGMENTS = 3
_AT_ONCE = 8
_DELETED_AT_ONCE = 1000


class StoredLog:
    """One incarnation's lines; `firsts` are the numbers of its objects' first lines, in order.

    Every method may raise StorageError. Not for two threads at once.
    """

    def __init__(self, storage: Storage, incarnation: Incarnation, firsts: tuple[int, ...]) -> None:
        self.incarnation, self.firsts = incarnation, firsts
        self._storage = storage
        self._segment = lru_cache(_KEPT_SEGMENTS)(self._read)

    def lines(self, *, since: float | None = None, tail: int | None = None) -> Iterator[Line]:
        """All lines in order, or those from a time (seconds since the epoch) on, or the last ones, or both.

        Where lines are missing, one says so.
        """
        start, first = self._start(since, tail)
        wanted = (line for line in self._from(start) if line.number >= first)
        young = (line for line in wanted if since is None or line.at >= since)
        return book.with_gaps(young, 1 if since is None and tail is None else None)

    def prime(self, *, since: float | None = None, tail: int | None = None) -> None:
        """Read ahead what `lines` will need first, so that many logs can be opened at once."""
        self._segment(self._start(since, tail)[0])

    def _start(self, since: float | None, tail: int | None) -> tuple[int, int]:
        """The object to begin with, and the number of the first line that is wanted."""
        start, first = 0, 0
        if tail is not None:
            first = self._last_number() - tail + 1
            start = max(0, bisect.bisect_right(self.firsts, first) - 1)
        if since is not None:
            start = max(start, bisect.bisect_right(range(len(self.firsts)), since, key=self._begins_at) - 1)
        return start, first

    def _from(self, start: int) -> Iterator[Line]:
        for index in range(start, len(self.firsts)):
            yield from self._segment(index)

    def _begins_at(self, index: int) -> float:
        lines = self._segment(index)
        return lines[0].at if lines else 0.0

    def _last_number(self) -> int:
        lines = self._segment(len(self.firsts) - 1)
        return lines[-1].number if lines else self.firsts[-1]

    def _read(self, index: int) -> tuple[Line, ...]:
        """The lines of an object; none of one that has been deleted since it was listed."""
        key = self.incarnation.key(self.firsts[index])
        try:
            return tuple(book.decode(self._storage.get(key)))
        except MissingError:
            return ()
        except DamagedError as e:
            raise DamagedError(f"{key}: {e}") from e


def find(storage: Storage, job_uid: str, worker: str = "") -> list[StoredLog]:
    """What there is of a job's workers, or of one, in order of worker and time. Raises StorageError."""
    firsts: dict[Incarnation, list[int]] = {}
    for key in all_keys(storage, book.job_folder(job_uid) + (f"{worker}/" if worker else "")):
        found = book.parse_key(key)
        if found is not None:
            firsts.setdefault(found[0], []).append(found[1])
    return [StoredLog(storage, incarnation, tuple(numbers)) for incarnation, numbers in firsts.items()]


def prime(logs: list[StoredLog], *, since: float | None = None, tail: int | None = None) -> None:
    """Open several logs at once."""
    each(lambda log: log.prime(since=since, tail=tail), logs, threads=_AT_ONCE)


def delete(storage: Storage, job_uid: str) -> int:
    """Delete all that a job's workers have printed; returns how many objects that were. Raises StorageError."""
    keys = list(all_keys(storage, book.job_folder(job_uid)))
    for start in range(0, len(keys), _DELETED_AT_ONCE):
        storage.delete(keys[start : start + _DELETED_AT_ONCE])
    return len(keys)
