"""`Storage`, the interface of every backend, and `Location`, a parsed bucket URL. No I/O.

Keys are names separated by `/`, relative to the URL; no key is a folder of another. One contract test runs on every
backend (tests/support/storage_contract.py). Every method may raise StorageError.

A URL appears in logs, job manifests and `ps`. A URL that contains credentials is therefore refused, with an error that
does not repeat them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from elasticctl_store.errors import StorageError

PAGE_KEYS = 1000
"""The maximum number of keys in one page of a listing."""
MOST_GOT_BYTES = 1 << 28
"""The maximum size of an object that is read in one request: a share document of some million tensors."""
MOST_ENTRY_BYTES = 1 << 24
"""The same below `journal/`: more than the entry of a checkpoint written by a hundred thousand ranks."""


class Storage(Protocol):
    """A flat set of objects. Each is written completely or not at all."""

    @property
    def url(self) -> str:
        """The URL that opens this storage. It contains no credentials, so it can be shown."""

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        """Write the concatenated `parts` as one object, and return its CRC-32.

        When this returns, the object is durable and visible to all readers. With `if_absent`, raises ExistsError and
        changes nothing if the key exists; of several concurrent writers exactly one succeeds.
        """

    def get(self, key: str) -> bytes:
        """Return a small object. Raises MissingError if it does not exist, DamagedError if it is larger than
        `most_bytes`."""

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill `into` with an object's bytes from byte `start` on.

        Raises MissingError if the object does not exist, DamagedError if it ends too early.
        """

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        """Return one page of the keys that start with `prefix` and sort after `after`, in order; empty if there are no
        more."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects: the first one before all others, the others in any order. Missing objects are no error."""

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """Delete what killed writers have left half-written and listings do not show, for the keys for which `is_ours`
        is true.

        No process may be writing these keys.
        """


def all_keys(storage: Storage, prefix: str) -> Iterator[str]:
    """Yield all keys that start with `prefix`, in order, page by page."""
    page = storage.list(prefix)
    while page:
        yield from page
        page = storage.list(prefix, after=page[-1])


def most_bytes(key: str) -> int:
    """Return the maximum size of an object that is read in one request; a larger one was not written by this
    library."""
    return MOST_ENTRY_BYTES if key.startswith("journal/") else MOST_GOT_BYTES


_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a job's objects are. `prefix` is empty or ends in `/`; `options` are those of the URL, all of them
    known."""

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
        """The name of an object, or of a prefix, percent-encoded for the path of an HTTP request."""
        return quote(self.prefix + key, safe="/~")


def without_secrets(url: str) -> str:
    """Return the part of a URL that may be shown in an error: without user, password and query."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


def parse(url: str, options: Collection[str]) -> Location:
    """Parse a bucket URL; `options` are the ones that its scheme supports. Raises StorageError."""
    scheme, _, rest = url.partition("://")
    shown = without_secrets(url)
    name, _, query = rest.partition("?")
    bucket, _, prefix = name.partition("/")
    if "@" in bucket or (":" in bucket and "@" in name):  # a secret access key may contain slashes
        raise StorageError(
            f"{shown}: the URL has something before an '@'. FIX: remove it, and set credentials in the environment"
        )
    if not _BUCKET.fullmatch(bucket):
        raise StorageError(f"{shown}: {bucket!r} is not a valid bucket name. FIX: write {scheme}://BUCKET/PREFIX")
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
    """Raise StorageError, with the URL `shown`, unless `endpoint` is an HTTP origin without credentials."""
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
        parts = urlsplit("")
    if not good or "@" in parts.netloc or parts.query or parts.fragment:
        example = "http://minio.storage:9000"
        raise StorageError(f"{shown}: the endpoint must be an http or https URL without credentials, such as {example}")


def is_key(key: str) -> bool:
    """Return whether `key` is names separated by single slashes. A key that leads elsewhere (`..`) is not valid."""
    parts = key.split("/")
    return all(parts) and "." not in parts and ".." not in parts and "\0" not in key
