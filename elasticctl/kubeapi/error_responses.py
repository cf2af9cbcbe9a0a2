"""An API server's refusal (an HTTP status and a `Status` object) as an error of this project."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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
