"""Does a job's storage do what checkpoints rest on? Tried out with an object of its own, which is deleted again."""

from __future__ import annotations

import secrets
import time

from elasticctl.doctor.check import Check, Outcome
from elasticctl_store import storage
from elasticctl_store.errors import ExistsError, StorageError
from elasticctl_store.storage import Patience, Storage

PREFIX = "elasticctl-doctor"
PATIENCE_S = 10.0
_CONTENT = b"elasticctl doctor: this may be deleted"


def storage_check(url: str) -> Check:
    """Write, read, list and delete one object, and see whether a second of the same name is refused.

    That is done with the credentials of this machine; the workers' may differ. Raises nothing.
    """
    try:
        place = storage.open(url, Patience(total_s=PATIENCE_S))
        return _tried(place)
    except StorageError as e:
        return Check("storage", Outcome.FAILED, str(e), "docs/storage.md")


def _tried(place: Storage) -> Check:
    key = f"{PREFIX}/{secrets.token_hex(8)}"
    began = time.monotonic()
    place.put(key, [_CONTENT], if_absent=True)
    try:
        broken = _broken(place, key)
    finally:
        place.delete([key])
    if broken:
        return Check("storage", Outcome.FAILED, f"{place.url}: {broken}", "use another store for checkpoints")
    took_ms = 1000 * (time.monotonic() - began)
    says = f"{place.url}: writes, reads, lists, refuses doubles, deletes; {took_ms:.0f} ms"
    return Check("storage", Outcome.OK, says)


def _broken(place: Storage, key: str) -> str:
    """What it does not do as it should; empty when all is well."""
    if place.get(key) != _CONTENT:
        return "what was written is read back as something else"
    if key not in place.list(key):
        return "what was written is not listed"
    try:
        place.put(key, [b"twice"], if_absent=True)
    except ExistsError:
        return ""
    return "it takes a second object of the same name: without conditional writes, runs can overwrite each other"
