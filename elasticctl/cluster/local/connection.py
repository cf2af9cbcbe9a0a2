"""One request to the supervisor over its socket, with the standard library: it has to be quick to import."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elasticctl.api.errors import (
    ClusterError,
    ConflictError,
    NotFoundError,
    SpecError,
    StorageFullError,
    UnreachableError,
)

REQUEST_TIMEOUT_S = 30.0

_ERRORS: Mapping[str, type[ClusterError]] = {
    "notFound": NotFoundError,
    "conflict": ConflictError,
    "full": StorageFullError,
    "failed": ClusterError,
}


class NotSentError(UnreachableError):
    """Nobody listens: the request has not left this process, so it can be made again."""


def request(api_socket: Path, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Make one request and return the answer's JSON.

    Raises NotSentError when nobody listens, UnreachableError when the answer was lost (what was asked for may have been
    done), otherwise the error that the supervisor names.
    """
    import http.client

    connection = http.client.HTTPConnection("localhost", timeout=REQUEST_TIMEOUT_S)
    connection.sock = _connected(api_socket)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, text = response.status, response.read()
    except (OSError, http.client.HTTPException) as e:
        raise UnreachableError(
            f"the local supervisor's answer was lost ({e or type(e).__name__}): see `elasticctl list` for what was done"
        ) from e
    finally:
        connection.close()
    answer = _decoded(text)
    if status >= 400:
        raise _error(status, answer)
    return answer


def _connected(api_socket: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(REQUEST_TIMEOUT_S)
    try:
        connection.connect(str(api_socket))
    except OSError as e:
        connection.close()
        raise NotSentError(f"the local supervisor does not answer on {api_socket}: {e}") from e
    return connection


def jobs_path(namespace: str, name: str = "", part: str = "") -> str:
    """The path of a namespace's jobs, of one job, or of a part of it; names of any content are fine."""
    return _path("v1", "namespaces", namespace, "jobs", *filter(None, (name, part)))


SHARING_PATH = "/v1/sharing"


def quotas_path(project: str = "") -> str:
    """The path of all quotas, or of one project's."""
    return _path("v1", "quotas", *filter(None, (project,)))


def eviction_path(namespace: str, pod: str) -> str:
    """The path to which the wish to take a pod away is posted."""
    return _path("v1", "namespaces", namespace, "pods", pod, "eviction")


def _path(*words: str) -> str:
    return "/" + "/".join(quote(word, safe="") for word in words)


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _error(status: int, answer: Any) -> Exception:
    kind = answer.get("error") if isinstance(answer, dict) else None
    if kind is None:
        return ClusterError(f"the local supervisor refused the request (HTTP {status})")
    message = str(answer.get("message", ""))
    if kind == "invalid":
        return SpecError(message, path=str(answer.get("path", "")))
    return _ERRORS.get(kind, ClusterError)(message)
