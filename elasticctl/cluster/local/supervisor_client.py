"""The client of the supervisor: starts and stops it, and makes requests over its socket.

The supervisor is started by module name, as this package must not import it. Requests use the standard library, which
is quick to import.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import elasticctl
from elasticctl.api.codec import from_rfc3339
from elasticctl.api.errors import (
    ClusterError,
    ConflictError,
    NotFoundError,
    SpecError,
    StorageFullError,
    UnreachableError,
)
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.private_paths import connect_private, storage_error
from elasticctl_protocol import variables

SUPERVISOR = "elasticctl_controller.local.supervisor"
START_TIMEOUT_S = 60.0
"""A machine with ten times more to do than it has cores needs more than 15 s to start the supervisor."""
STOP_TIMEOUT_S = 120.0
MAX_LOG_BYTES = 4 << 20
LOG_LINES_SHOWN = 3

_POLL_S = 0.02
_LOG_PREFIX = re.compile(r"^[\d-]+ [\d:,]+ [A-Z]+ \S+: ")


@dataclass(frozen=True, slots=True)
class SupervisorInfo:
    """The running supervisor; `started_at` is seconds since the epoch, `gpus` are ids for CUDA_VISIBLE_DEVICES."""

    pid: int
    version: str
    started_at: float
    gpus: tuple[str, ...]


def supervisor_info(paths: LocalPaths) -> SupervisorInfo | None:
    """Return the running supervisor, or None; starts nothing."""
    try:
        answer: dict[str, Any] = request(paths.api_socket, "GET", "/v1/info")
    except UnreachableError:
        return None
    started_at = from_rfc3339(answer.get("startedAt")) or 0.0
    return SupervisorInfo(int(answer["pid"]), str(answer["version"]), started_at, tuple(answer["gpus"]))


def ensure_supervisor(paths: LocalPaths, say: Callable[[str], None]) -> SupervisorInfo:
    """Make sure that a supervisor of this version runs; concurrent clients start only one.

    An older one is replaced, which workers do not notice and `say` reports. Raises UnreachableError with the last lines
    of the log when it does not start, and ClusterError when a newer one runs.
    """
    info = supervisor_info(paths)
    if info is not None and info.version == elasticctl.__version__:
        return info
    paths.create()
    with _lock_file(paths.start_lock, START_TIMEOUT_S):
        info = supervisor_info(paths)
        if info is not None and info.version != elasticctl.__version__:
            _replace_older(paths, info, say)
            info = None
        if info is None:
            start_supervisor(paths)
            info = supervisor_info(paths)
    if info is None:
        raise UnreachableError(f"the local supervisor ended right after it started. Next: see {paths.supervisor_log}")
    return info


def shut_down(paths: LocalPaths, *, keep_jobs: bool, say: Callable[[str], None]) -> bool:
    """Stop all workers, with their grace periods, and the supervisor; returns False when nothing was running.

    The jobs stay stored and continue from their last checkpoint when a supervisor is started again; `keep_jobs` False
    deletes them first. A supervisor that was killed is started once more to stop the workers that it left behind.
    """
    from elasticctl.cluster.local.worker_processes import any_left  # psutil is slow to import

    idle = supervisor_info(paths) is None and not any_left(paths.pods)
    if not paths.database.exists() or (idle and keep_jobs):
        return False
    ensure_supervisor(paths, say)
    if not keep_jobs:
        _delete_all_jobs(paths)
    request(paths.api_socket, "POST", "/v1/shutdown", {"workers": "stop"})
    _wait_until_gone(paths)
    return not idle


def _delete_all_jobs(paths: LocalPaths) -> None:
    for job in request(paths.api_socket, "GET", "/v1/jobs")["items"]:
        try:
            request(paths.api_socket, "DELETE", jobs_path(job["metadata"]["namespace"], job["metadata"]["name"]))
        except NotFoundError:
            continue


def _replace_older(paths: LocalPaths, info: SupervisorInfo, say: Callable[[str], None]) -> None:
    if _parts(info.version) > _parts(elasticctl.__version__):
        raise ClusterError(
            f"the local supervisor runs elasticctl {info.version}, but this is {elasticctl.__version__}."
            " FIX: use the newer version, or stop it with `elasticctl local down` of that version"
        )
    say(f"replacing the local supervisor of elasticctl {info.version} with {elasticctl.__version__}; workers continue")
    request(paths.api_socket, "POST", "/v1/shutdown", {"workers": "keep"})
    _wait_until_gone(paths)


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def start_supervisor(paths: LocalPaths) -> None:
    """Run the supervisor's start command, which returns once it answers or has failed."""
    import subprocess

    environ = {name: value for name, value in os.environ.items() if name != variables.POD_UID}
    if variables.HOME in environ:  # may be relative to this process's working directory, which is not the supervisor's
        environ[variables.HOME] = str(paths.state.parent)
    with _open_log(paths.supervisor_log) as (log, size):
        try:
            started = subprocess.run(
                [sys.executable, "-m", SUPERVISOR, "--detach"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environ,
                start_new_session=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise UnreachableError(
                f"the local supervisor did not answer within {START_TIMEOUT_S:.0f} s: "
                f"{_last_lines(paths.supervisor_log, size)}. Next: run the command again; on a machine that is this "
                "busy, a start takes long. Workers that run are not affected"
            ) from e
    if started.returncode != 0:
        raise UnreachableError(f"the local supervisor did not start: {_last_lines(paths.supervisor_log, size)}")


@contextmanager
def _open_log(path: Path) -> Iterator[tuple[int, int]]:
    """Open the supervisor's log for appending, a fresh one when it has grown large; yields (descriptor, size)."""
    try:
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as e:
        raise storage_error(f"open {path}", e) from e
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _last_lines(path: Path, since_bytes: int) -> str:
    """Return the last lines of a log after a position, on one line, and the path of the log."""
    with path.open("rb") as file:
        file.seek(since_bytes)
        lines = file.read().decode(errors="replace").splitlines()
    said = " | ".join(_LOG_PREFIX.sub("", line) for line in lines[-LOG_LINES_SHOWN:]) or "it printed nothing"
    return f"{said} (see {path})"


def _wait_until_gone(paths: LocalPaths) -> None:
    with _lock_file(paths.supervisor_lock, STOP_TIMEOUT_S):
        return


@contextmanager
def _lock_file(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file `path`; UnreachableError when another process holds it for longer than `timeout_s`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise storage_error(f"lock {path}", e) from e
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise UnreachableError(f"{path} has been held by another process for {timeout_s:.0f} s. Next: see `ps`")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


REQUEST_TIMEOUT_S = 30.0

_ERRORS: Mapping[str, type[ClusterError]] = {
    "notFound": NotFoundError,
    "conflict": ConflictError,
    "full": StorageFullError,
    "failed": ClusterError,
}


class NotSentError(UnreachableError):
    """Nothing listens on the socket: the request was not sent, so it can be repeated."""


def request(api_socket: Path, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Make one request and return the answer's JSON.

    Raises NotSentError when nothing listens, UnreachableError when the answer was lost (the request may have been
    carried out), and otherwise the error that the supervisor names.
    """
    import http.client

    connection = http.client.HTTPConnection("localhost", timeout=REQUEST_TIMEOUT_S)
    connection.sock = _connect(api_socket)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, text = response.status, response.read()
    except (OSError, http.client.HTTPException) as e:
        raise UnreachableError(
            f"the local supervisor's answer was lost ({e or type(e).__name__})."
            " Next: check with `elasticctl list` what was done"
        ) from e
    finally:
        connection.close()
    answer = _decode(text)
    if status >= 400:
        raise _error(status, answer)
    return answer


def _connect(api_socket: Path) -> socket.socket:
    try:
        return connect_private(api_socket, REQUEST_TIMEOUT_S)
    except OSError as e:
        raise NotSentError(f"the local supervisor does not answer on {api_socket}: {e}") from e


def jobs_path(namespace: str, name: str = "", part: str = "") -> str:
    """The path of a namespace's jobs, of one job, or of a part of it; names are quoted."""
    return _path("v1", "namespaces", namespace, "jobs", *filter(None, (name, part)))


SHARING_PATH = "/v1/sharing"


def quotas_path(project: str = "") -> str:
    """The path of all quotas, or of one project's."""
    return _path("v1", "quotas", *filter(None, (project,)))


def eviction_path(namespace: str, pod: str) -> str:
    """The path to which the eviction of a pod is posted."""
    return _path("v1", "namespaces", namespace, "pods", pod, "eviction")


def _path(*words: str) -> str:
    return "/" + "/".join(quote(word, safe="") for word in words)


def _decode(text: bytes) -> Any:
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
