"""URLs of storages: what a user may type for one, and where a new job keeps its state."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass, field

from elasticctl.api.errors import UsageError
from elasticctl.api.text import quote
from elasticctl.settings.contexts import LOCAL, Context

SCHEMES = ("file", "s3", "gs")
_NEAR_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(:/*)|(s3|gs)(//+)")


def storage_url(given: str, working_dir: str) -> str:
    """A storage URL, or a path turned into one. Raises UsageError for an unknown scheme."""
    scheme, separator, rest = given.partition("://")
    check_near_url(given)
    if not separator:
        from pathlib import Path

        # Shells leave the tilde of --storage=~/runs alone.
        return Path(working_dir, os.path.expanduser(given)).resolve().as_uri()
    check_public(given)
    if scheme not in SCHEMES or not rest:
        raise UsageError(
            f"--storage {quote(given)}: give a folder, file:///path, s3://bucket/prefix or gs://bucket/prefix"
        )
    return given


def check_near_url(given: str) -> None:
    """Raise UsageError for a misspelt URL, which would be taken for the name of a folder.

    `s3:/bucket`, `gs:x`, `S3://bucket`, `file:/path`, `s3//bucket`, `s3:///prefix`.
    """
    near = _NEAR_URL.match(given)
    if near is None:
        return
    scheme, marks, rest = near[1] or near[3], near[2] or near[4], given[near.end() :]
    slashes = ("://", ":///") if scheme == "file" and rest.startswith("localhost/") else (":///",)
    if scheme in SCHEMES and marks in (slashes if scheme == "file" else ("://",)):
        return
    if scheme.lower() in SCHEMES:
        fix = f"{scheme.lower()}://{'/' if scheme.lower() == 'file' else ''}{rest or 'bucket'}"
    elif marks.startswith("://"):
        return  # an unknown kind of storage; opening it raises an error that lists the known ones
    else:
        fix = f"a folder, or a URL such as s3://bucket/prefix; ./{given} is a folder of that name"
    raise UsageError(f"{quote(given)} is not the URL of a storage. FIX: give {fix}")


def check_public(url: str) -> None:
    """Raise UsageError, without the URL, for a storage URL with credentials."""
    place = url.partition("://")[2]
    host = place.partition("/")[0]
    if "@" in host or (":" in host and "@" in place):  # a secret access key may have slashes
        raise UsageError(
            "--storage: the URL has something before an '@', and would be stored as written. FIX:"
            " pass credentials through"
            " the environment (elasticctl secret)"
        )


def child_url(url: str, name: str) -> str:
    """The URL of `name` below another URL, with its options (`?endpoint=…`)."""
    place, choices = split_url(url)
    return f"{place.rstrip('/')}/{name}{choices}"


def sibling_url(url: str, name: str) -> str:
    """A storage URL next to another one; its options (`?endpoint=…`) stay."""
    place, choices = split_url(url)
    return f"{place.rstrip('/').rpartition('/')[0]}/{name}{choices}"


def split_url(url: str) -> tuple[str, str]:
    """A storage URL without its options, and the options with their `?`; a folder has none."""
    place, mark, choices = (url, "", "") if url.startswith("file:") else url.partition("?")
    return place, mark + choices


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """Where a new job keeps its state: at `url`, or else in a new place below `base`. Both blank: not known."""

    url: str = ""
    base: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(4))

    def __bool__(self) -> bool:
        return bool(self.url or self.base)

    def url_for(self, name: str) -> str:
        """The URL for a job of this name."""
        return self.url or child_url(self.base, f"{name}-{self.token}")


def find_storage_choice(given: str, context: Context) -> StorageChoice:
    """The given place, or a new one in the context's storage, if it has one. Raises UsageError for an invalid URL."""
    here = os.getcwd()
    if given:
        return StorageChoice(storage_url(given, here))
    if context.storage:
        return StorageChoice(base=storage_url(context.storage, here))
    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths

        return StorageChoice(base=local_paths().storage.as_uri())
    return StorageChoice()


def choose_storage(given: str, context: Context) -> StorageChoice:
    """The same. Raises UsageError if the user has to give a place."""
    found = find_storage_choice(given, context)
    if not found:
        raise needed_error("--storage", context)
    return found


def needed_error(flag: str, context: Context) -> UsageError:
    """The error for an option that neither the command line nor the context gives."""
    return UsageError(
        f"{flag} is needed in context {context.name}. FIX: add it, or set it with `elasticctl config set-context`"
    )
