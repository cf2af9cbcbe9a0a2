"""The responses of Google Cloud Storage: its JSON, its refusals, and what to do about them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elasticctl_store.errors import MissingError, StorageError
from elasticctl_store.storage.base import Location
from elasticctl_store.storage.cloud import Action
from elasticctl_store.storage.http import HttpResponse, Verdict, is_temporary

WRITE = Action("write", "to", "storage.objects.create")
READ = Action("read", "from", "storage.objects.get, and storage.objects.list to find out what is not there")
LIST = Action("list", "in", "storage.objects.list")
DELETE = Action("delete", "from", "storage.objects.delete")

_TEMPORARY_REASONS = {"rateLimitExceeded", "userRateLimitExceeded"}


def multipart_body(
    about: Mapping[str, str], boundary: str, views: Sequence[memoryview]
) -> Iterator[bytes | memoryview]:
    """Yield an object and its metadata as the two parts of one multipart/related body."""
    yield f"--{boundary}\r\ncontent-type: application/json; charset=UTF-8\r\n\r\n".encode()
    yield json.dumps(about).encode()
    yield f"\r\n--{boundary}\r\ncontent-type: application/octet-stream\r\n".encode()
    yield b"content-transfer-encoding: binary\r\n\r\n"
    yield from views
    yield f"\r\n--{boundary}--\r\n".encode()


def parse(answer: HttpResponse) -> Mapping[str, Any]:
    """Return the JSON object of a response. Raises StorageError if it is not one."""
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError) as e:
        raise StorageError(
            f"the endpoint answers with something that is not GCS's JSON ({e}). FIX: check its URL"
        ) from e
    if not isinstance(found, dict):
        raise StorageError("the endpoint answers with something that is not GCS's JSON. FIX: check its URL")
    return found


def parse_listing(answer: HttpResponse) -> Mapping[str, Any]:
    """Return a page of a listing. Raises StorageError if it is not one; even an empty page states its kind."""
    found = parse(answer)
    if not found:
        raise StorageError("the endpoint answers with nothing to the request for a listing")
    names(found)
    return found


def names(listing: Mapping[str, Any]) -> list[str]:
    """Return the names of the objects in a listing. Raises StorageError."""
    try:
        return [str(item["name"]) for item in listing.get("items", [])]
    except (TypeError, KeyError) as e:
        raise StorageError(
            "the endpoint answers with something that is not a listing of GCS. FIX: check its URL"
        ) from e


def stored_crc32c(answer: HttpResponse, name: str) -> str:
    """Return the CRC-32C (base64) of the object `name` from the response to its upload; "" if it is not given.

    Raises StorageError if the response does not describe that object: then nothing shows that it was stored.
    """
    found = parse(answer)
    if found.get("name") != name:
        raise StorageError("the response to a write does not describe the object that was written. FIX: check the URL")
    return str(found.get("crc32c") or "")


def judge(answer: HttpResponse) -> Verdict:
    """Decide whether the request is worth retrying."""
    if answer.status == 401:
        return Verdict.STALE_CREDENTIALS
    limited = answer.status == 403 and _reasons(answer) & _TEMPORARY_REASONS
    damaged = answer.status == 400 and "crc32c" in _message(answer).lower()  # damaged in transit
    return Verdict.TEMPORARY if is_temporary(answer.status) or limited or damaged else Verdict.FINAL


def reason(answer: HttpResponse) -> str:
    """Describe the refusal in a few words."""
    return f"{answer.status} {' '.join(sorted(_reasons(answer)))}".strip()


def is_missing(answer: HttpResponse) -> bool:
    """Return whether it is the object that does not exist, rather than its bucket."""
    return answer.status == 404 and "bucket does not exist" not in _message(answer)


def crc32c(answer: HttpResponse) -> str:
    """Return the checksum of the whole object in base64; "" if it is not given, or not that of the bytes that were
    sent."""
    if "x-goog-stored-content-encoding" in answer.headers and answer.headers.get("content-encoding"):
        return ""
    hashes = (part.strip().partition("=") for part in answer.headers.get("x-goog-hash", "").split(","))
    return next((value for name, _, value in hashes if name == "crc32c"), "")


def as_error(answer: HttpResponse, action: Action, key: str, place: Location) -> StorageError:
    """Return the error for a refusal: what failed, why, and how to fix it."""
    if is_missing(answer) and action is READ:
        return MissingError(f"{place.url}: {key} is not there")
    what = f"cannot {action.verb} {key or 'the keys'} {action.preposition} {place.url}"
    return StorageError(f"{what}: {_fix(answer, action, place)}")


def _fix(answer: HttpResponse, action: Action, place: Location) -> str:
    if answer.status == 404:
        return f"there is no bucket {place.bucket!r}. FIX: create it, or correct the URL"
    if answer.status == 401:
        return "the Google credentials were refused, and refreshed ones too. FIX: renew them"
    message = _message(answer)[:200]
    if answer.status == 403:
        return f"no permission: the credentials in use need {action.permission}; GCS says: {message or 'nothing'}"
    return f"{reason(answer)} {message}".strip()


def _error(answer: HttpResponse) -> Mapping[str, Any]:
    try:
        error = json.loads(answer.body).get("error", {})
    except (ValueError, AttributeError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}


def _message(answer: HttpResponse) -> str:
    """Return the service's message about a refusal, on one line; requests for media are refused in plain text."""
    said = _error(answer).get("message") or answer.body[:500].decode("utf-8", "replace")
    return " ".join(str(said).split())


def _reasons(answer: HttpResponse) -> set[str]:
    errors = _error(answer).get("errors")
    return {str(item.get("reason")) for item in errors if isinstance(item, dict)} if isinstance(errors, list) else set()
