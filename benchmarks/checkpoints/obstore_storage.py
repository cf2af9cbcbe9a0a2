"""`Storage` on top of the library obstore, to compare with ours: the minimum of code that checkpoints need.

Multipart uploads that were never finished are not cleaned up: obstore can neither list nor abort them.
docs/performance.md says what else is missing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import MemoryStore, S3Store

from elasticctl_store.checksums import crc32
from elasticctl_store.errors import DamagedError, ExistsError, MissingError, StorageError
from elasticctl_store.parallel import each, per_rank
from elasticctl_store.storage.base import PAGE_KEYS, is_key, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

_PART_BYTES = 16 << 20
_RANGE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_READERS = 8
_MOST_SENDERS = 8
_NICENESS = 10
_CLIENT = {"allow_http": True, "timeout": timedelta(hours=1), "read_timeout": timedelta(seconds=60)}
"""The library's own limit is 30 s for a whole request, however large."""


def connect(url: str) -> ObstoreStorage:
    """Return the storage that an s3:// URL names, with credentials from the environment. Sends nothing."""
    place = parse(url, ("endpoint", "region"))
    store = S3Store(
        place.bucket,
        prefix=place.prefix.rstrip("/") or None,
        client_options=_CLIENT,
        unsigned_payload=True,
        checksum_algorithm="crc64nvme",
        disable_bulk_delete=True,
        **place.options,
    )
    _start_niced()
    return ObstoreStorage(place.url, store)


class ObstoreStorage:
    """See `elasticctl_store.storage.Storage`."""

    def __init__(self, url: str, store: Any) -> None:
        self.url, self._store = url, store

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        _check(key)
        data = memoryview(parts[0]).cast("B") if len(parts) == 1 and len(parts[0]) else b"".join(parts)
        with self._explained(key):
            try:
                obstore.put(
                    self._store,
                    key,
                    data,
                    mode="create" if if_absent else "overwrite",
                    use_multipart=len(data) > _PART_BYTES and not if_absent,
                    chunk_size=_PART_BYTES,
                    max_concurrency=max(1, min(per_rank() - 1, _MOST_SENDERS)),
                )
            except AlreadyExistsError:  # possibly the result of an earlier try of its own whose response was lost
                if self.get(key) != data:
                    raise
        return crc32(data)

    def get(self, key: str) -> bytes:
        _check(key)
        with self._explained(key):
            return bytes(obstore.get(self._store, key).bytes().to_bytes())

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        _check(key)

        def read(offset: int) -> None:
            at, end = offset, min(offset + _RANGE_BYTES, len(into))
            answer = obstore.get(self._store, key, options={"range": (start + at, start + end)})
            for chunk in answer.stream(_CHUNK_BYTES):
                into[at : at + len(chunk)] = chunk
                at += len(chunk)
            if at != end:
                raise DamagedError(f"{self.url}: {key} ends too early")

        with self._explained(key):
            try:
                each(read, range(0, len(into), _RANGE_BYTES), _READERS)
            except BaseError as e:  # includes reads beyond the end, for which it has no separate error
                if obstore.head(self._store, key)["size"] < start + len(into):
                    raise DamagedError(f"{self.url}: {key} ends too early") from e
                raise

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        folder = prefix.rpartition("/")[0]
        with self._explained(prefix):
            for page in obstore.list(self._store, folder or None, offset=after or None, chunk_size=PAGE_KEYS):
                found = [item["path"] for item in page if item["path"].startswith(prefix)]
                if found:
                    return found
        return []

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            _check(key)
        with self._explained(" ".join(keys[:1])):
            for some in (keys[:1], keys[1:]):
                if some:
                    obstore.delete(self._store, some)

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        return

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as e:
            raise MissingError(f"{self.url}: {key} is not there") from e
        except AlreadyExistsError as e:
            raise ExistsError(f"{self.url}: {key} is already there") from e
        except BaseError as e:
            raise StorageError(f"{self.url}: {key}: {str(e).splitlines()[0]}") from e


def _check(key: str) -> None:
    """Refuse keys that obstore changes: `/a` and `a/` become `a`."""
    if not is_key(key):
        raise StorageError(f"{key!r} is not a key: it must be names separated by single slashes")


def _start_niced() -> None:
    """Make its threads, which start with the first request, yield the processors to training, like ours."""

    def start() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        obstore.put(MemoryStore(), "any", b"")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
