"""An API server's answers: their JSON, and its refusals as errors of this project.

An API server stores 10,000 levels in fields without a schema, such as the template of an ElasticJob. Python's JSON
parser fails at about a thousand, and so does code that compares or writes such values. One such object would break
every watch and every list that contains it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from elasticctl.api.errors import (
    BusyError,
    ClusterError,
    ConflictError,
    CredentialsError,
    ElasticctlError,
    ExpiredError,
    ForbiddenError,
    NotFoundError,
    SpecError,
)

_MESSAGE_CHARS = 1000
_LIMITS = re.compile(r"^.*ValidatingAdmissionPolicy 'elasticctl-limits' with binding '[^']*' denied request: ")


class NoSuchApiError(NotFoundError):
    """The server does not know this kind of object: its definition is not installed."""


def refusal(status: int, body: bytes, headers: Mapping[str, str], request: str) -> ElasticctlError:
    """The error for an answer of status 400 or more; `request` is its verb and path, for the message."""
    answer = _decode_body(body)
    message = " ".join(str(answer.get("message") or body[:_MESSAGE_CHARS].decode("utf-8", "replace")).split())
    message = _LIMITS.sub("the limits of its project do not allow this job: ", message)
    message = message[:_MESSAGE_CHARS] or f"HTTP {status}"
    retry_after_s = _retry_after_s(headers.get("Retry-After"))
    if status in (429, 503, 504) or (status == 500 and retry_after_s is not None):
        return BusyError(f"the cluster is busy: {message} ({request})", retry_after_s)
    if status == 401:
        return CredentialsError(f"the cluster does not accept the credentials ({message}). FIX: log in again")
    if status == 403:
        if " cannot " in message:  # a missing right; quotas and admission rules explain themselves
            return ForbiddenError(f"{message}. FIX: ask the cluster's administrator for that right")
        return ForbiddenError(f"{message} ({request})")
    if status == 404:
        return NotFoundError(message) if answer.get("details") else NoSuchApiError(f"{message} ({request})")
    if status in (409, 412):
        return ConflictError(message)
    if status == 410:
        return ExpiredError(message)
    if status == 422:
        return SpecError(message, path=_first_field(answer))
    return ClusterError(f"the cluster refused {request}: {message}")


def _first_field(answer: Mapping[str, Any]) -> str:
    details = answer.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    fields = [cause.get("field") for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []
    return next((field for field in fields if isinstance(field, str)), "")


def _retry_after_s(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 7 else None


def _decode_body(body: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


MOST_LEVELS = 400
"""Deeper values read as null: no field of Kubernetes' own is a tenth as deep."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STRING_OR_BRACKET = re.compile(_STRING.pattern + rb"|[\[{\]}]", re.DOTALL)
_BEGIN, _END = b"[{", b"]}"
_STEPS = {**dict.fromkeys(_BEGIN, 1), **dict.fromkeys(_END, -1)}
_OTHERS = bytes(set(range(256)) - set(_BEGIN + _END))


def parse_json(text: bytes) -> Any:
    """Return the value; those in it that are nested deeper than `MOST_LEVELS` are null. Raises ValueError."""
    return json.loads(b"".join(_without_deep(text)) if _is_deep(text) else text)


def _is_deep(text: bytes) -> bool:
    if sum(map(text.count, (b"[", b"{"))) <= MOST_LEVELS:  # most objects have no more brackets than that
        return False
    brackets = _STRING.sub(b"", text).translate(None, _OTHERS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MOST_LEVELS


def _without_deep(text: bytes) -> Iterator[bytes]:
    """The text in pieces, with null in place of what is too deep."""
    level, start = 0, 0
    for found in _STRING_OR_BRACKET.finditer(text):
        step = _STEPS.get(text[found.start()], 0)
        if step > 0 and level == MOST_LEVELS:
            yield text[start : found.start()] + b"null"
        level += step
        if step < 0 and level == MOST_LEVELS:
            start = found.end()
    yield text[start:] if level <= MOST_LEVELS else b""
