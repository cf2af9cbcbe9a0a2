"""`Storage`, the interface of every backend, and `Location`, a bucket URL taken apart. No I/O.

Keys are `/`-separated names below the URL; no key is the folder of another. One contract test runs over every backend
(tests/support/storage_contract.py). Every method may raise `StorageError`.

A URL ends up in logs, job manifests and `ps`, so a URL that contains credentials is refused, and the error does not
repeat them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from elasticctl_store.errors import StorageError

PAGE_KEYS = 1000
"""At most this many keys in one page of a listing."""
MOST_GOT_BYTES = 1 << 28
"""The largest object that is read in one go: a share document of some million tensors."""
MOST_ENTRY_BYTES = 1 << 24
"""The largest below `journal/`: more than the entry of a checkpoint by a hundred thousand ranks."""


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
        """Return a small object; MissingError when it is not there, DamagedError for one beyond `most_bytes`."""

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


def most_bytes(key: str) -> int:
    """How many bytes of an object are read in one go at most: what is larger is none of ours."""
    return MOST_ENTRY_BYTES if key.startswith("journal/") else MOST_GOT_BYTES


_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a job's objects are. `prefix` is empty or ends in `/`; `options` are those of the URL, all known."""

    scheme: str
    bucket: str
    prefix: str
    options: Mapping[str, str]

    @property
    def url(self) -> str:
        """The URL that names this location."""
        query = "?" + urlencode(self.options, safe=":/") if self.options else ""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/") + query

    def path_of(self, key: str) -> str:
        """The object name of a key, or of a prefix of keys, percent-encoded for the path of an HTTP request."""
        return quote(self.prefix + key, safe="/~")


def without_secrets(url: str) -> str:
    """A URL as far as it can be shown in an error: no user, no password, no query."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


def parse(url: str, options: Collection[str]) -> Location:
    """Take a bucket URL apart; `options` are the ones its scheme knows. Raises StorageError."""
    scheme, _, rest = url.partition("://")
    shown = without_secrets(url)
    name, _, query = rest.partition("?")
    bucket, _, prefix = name.partition("/")
    if "@" in bucket or (":" in bucket and "@" in name):  # a secret access key may have slashes
        raise StorageError(f"{shown}: the URL has something before an '@'; credentials belong in the environment")
    if not _BUCKET.fullmatch(bucket):
        raise StorageError(f"{shown}: {bucket!r} is not the name of a bucket; write {scheme}://BUCKET/PREFIX")
    prefix = prefix.rstrip("/")
    if prefix and not (is_key(prefix) and prefix.isprintable()):
        raise StorageError(f"{shown}: {prefix!r} is not a prefix: it must be names separated by single slashes")
    pairs = parse_qsl(query, keep_blank_values=True)
    for option, value in pairs:
        if option not in options:
            raise StorageError(f"{shown}: {option!r} is not an option of {scheme}://; known: {', '.join(options)}")
        if option == "endpoint":
            check_endpoint(value, shown)
        elif not value:
            raise StorageError(f"{shown}: the option {option!r} is empty")
    return Location(scheme, bucket, prefix + "/" if prefix else "", dict(pairs))


def check_endpoint(endpoint: str, shown: str) -> None:
    """Raise StorageError, naming the URL `shown`, unless `endpoint` is an HTTP origin without credentials."""
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
        parts = urlsplit("")
    if not good or "@" in parts.netloc or parts.query or parts.fragment:
        example = "http://minio.storage:9000"
        raise StorageError(f"{shown}: the endpoint must be an http or https URL without credentials, as {example}")


def is_key(key: str) -> bool:
    """Is it names separated by single slashes? What leads elsewhere (`..`) is no key."""
    parts = key.split("/")
    return all(parts) and "." not in parts and ".." not in parts and "\0" not in key
