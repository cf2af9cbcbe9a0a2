"""Bucket URLs: `s3://bucket/prefix?endpoint=…&region=…` taken apart. Pure.

A URL ends up in logs, job manifests and `ps`, so one that holds credentials is refused, and is not repeated in the
error either.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from elasticctl_store.errors import StorageError

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
        raise StorageError(f"{shown}: the URL has something before an '@'; credentials belong into the environment")
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
