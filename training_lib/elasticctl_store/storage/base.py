"""`Storage`: the few things a checkpoint asks of the place it is kept at.

Keys are `/`-separated names below the URL; no key is the folder of another. One contract test runs over every
implementation (tests/support/storage_contract.py). Every method may raise `StorageError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

PAGE_KEYS = 1000
"""At most this many keys in one page of a listing."""


class Storage(Protocol):
    """A flat set of objects; each is written whole or not at all."""

    @property
    def url(self) -> str:
        """The URL that opens this storage, fit to be shown: no credentials in it."""

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        """Write the concatenated `parts` as one object; durable and visible to all when this returns its CRC-32.

        With `if_absent`: ExistsError, and nothing changed, when the key is taken; of several writers exactly one wins.
        """

    def get(self, key: str) -> bytes:
        """Return a small object; MissingError when it is not there."""

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill `into` from byte `start` of an object; MissingError, or DamagedError when the object ends too early."""

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        """Return one page of the keys that start with `prefix` and sort behind `after`, in order; empty: no more."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects: the first before all others, these in any order; one that is not there is no error."""

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """Delete what killed writers left half-written, as far as listings do not show it, of keys that are ours.

        Nobody may be writing any of these.
        """


def all_keys(storage: Storage, prefix: str) -> Iterator[str]:
    """All keys that start with `prefix`, in order, page by page."""
    page = storage.list(prefix)
    while page:
        yield from page
        page = storage.list(prefix, after=page[-1])
