"""A checkpoint's share documents, read and checked; without torch, so that whoever has none can read them too."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from elasticctl_store import checksums
from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.entries import Commit, ObjectRef
from elasticctl_store.errors import DamagedError
from elasticctl_store.storage import Storage

log = logging.getLogger("elasticctl_train")
T = TypeVar("T")

_AT_ONCE = 16


def fetch(storage: Storage, commit: Commit) -> list[Any]:
    """Read the share documents as JSON. Raises DamagedError or MissingError unless they are what was committed."""

    def document(ref: ObjectRef) -> Any:
        data = storage.get(ref.key)
        check(ref, data)
        return json.loads(data)

    with ThreadPoolExecutor(min(_AT_ONCE, len(commit.shares))) as pool:
        return list(pool.map(lambda ref: twice(lambda: document(ref)), commit.shares))


def check(ref: ObjectRef, data: bytes | memoryview) -> None:
    """Raise DamagedError unless these are the bytes that were committed."""
    if len(data) != ref.size_bytes or entries.as_checksum(checksums.of(data)) != ref.checksum:
        raise DamagedError(f"{ref.key}: its checksum does not match")


def twice(read: Callable[[], T]) -> T:
    """What `read` returns; once more where it finds damage, which may only have happened on the way from storage."""
    try:
        return read()
    except DamagedError as e:
        log.warning("%s; reading it once more", e)
        return read()
