"""Worker processes: start one under its shim, find the ones that already run, kill one with everything that it has
started."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from elasticctl.cluster.local.worker_processes import ENDED, find_shims, own_processes, variable_of
from elasticctl_controller.local import shim
from elasticctl_controller.local.command import WorkerCommand, termination_log
from elasticctl_controller.local.objects import KILLED_EXIT_CODE, Exit
from elasticctl_protocol import variables

POLL_S = 0.2
"""How often to look for exits where the kernel has no pidfd."""

_SHIM = str(Path(shim.__file__).resolve())


class WorkerProcess:
    """A running shim with its worker below it; a later process with the same pid has another start time."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)
        self._child = child

    def has_ended(self) -> bool:
        """True once the shim is gone (and reaped, if it is a child of this process)."""
        if self._child is not None:
            return self._child.poll() is not None
        try:
            return not self._process.is_running() or self._process.status() in ENDED
        except psutil.NoSuchProcess:
            return True

    def terminate(self) -> None:
        """Ask the worker's own process to stop (SIGTERM, through the shim)."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.terminate()

    def kill_tree(self) -> None:
        """SIGKILL everything below the shim; the shim then finds no child left, reports the end and exits."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.kill()

    def kill_shim(self) -> None:
        """SIGKILL the shim itself, in case it does not exit."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()


def start_shim(pod_dir: Path, command: WorkerCommand, umask: int = -1) -> WorkerProcess:
    """Start the shim of a worker in `pod_dir`, which exists and is private; OSError when the system refuses.

    `umask`: what the worker creates its files with; -1: with the same as this process.
    """
    working_dir = command.working_dir
    if not working_dir:
        working_dir = str(pod_dir / "work")
        os.makedirs(working_dir, exist_ok=True)
    order = {
        "argv": list(command.argv),
        "cwd": working_dir,
        "terminationLog": str(termination_log(pod_dir)),
    }
    write_private(pod_dir / "start.json", json.dumps(order))
    with _memory_file() as environment:  # it may hold secrets
        environment.write(json.dumps(dict(command.env)).encode())
        environment.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", _SHIM, str(pod_dir)],
            stdin=environment,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.defpath},
            umask=umask,
        )
    return WorkerProcess(child.pid, child)


def find_running(pods: Path) -> dict[str, WorkerProcess]:
    """Find the shims of workers under the folder `pods` that run already, by the uid of their pod."""
    found = {}
    for uid, process in find_shims(pods).items():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            found[uid] = WorkerProcess(process.pid)
    return found


def kill_strays(uid: str) -> None:
    """SIGKILL every process that has the pod's uid in its environment, anywhere in the process tree."""
    while strays := list(_strays(uid)):
        for process in strays:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(strays, timeout=1.0)


def read_started(pod_dir: Path) -> tuple[int, float] | None:
    """Return the worker's pid and the time it started at, or None when it has not."""
    report = _read_report(pod_dir / "started.json")
    return (int(report["pid"]), float(report["startedAt"])) if report else None


def read_exit(pod_dir: Path, now: float) -> Exit:
    """Return how the worker ended; without a report it was killed together with its shim."""
    report = _read_report(pod_dir / "exit.json")
    if report is None:
        message = "killed from outside, together with all its processes"
        return Exit(KILLED_EXIT_CODE, now, signal=signal.SIGKILL.value, message=message)
    return Exit(
        exit_code=int(report["exitCode"]),
        finished_at=float(report["finishedAt"]),
        signal=report["signal"],
        reason=str(report["reason"]),
        message=str(report["message"]),
    )


def has_run(pod_dir: Path) -> bool:
    """True when the shim has reported that the worker started, or how it ended."""
    return (pod_dir / "exit.json").exists() or read_started(pod_dir) is not None


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600; OSError when that fails."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


class ExitWatcher:
    """Waits until one of several processes ends, or `wake` is called."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._descriptors: dict[int, int] = {}
        self._unwatched: set[int] = set()
        self._receive, self._send = os.pipe()
        os.set_blocking(self._receive, False)
        os.set_blocking(self._send, False)
        self._selector.register(self._receive, selectors.EVENT_READ)

    def add(self, pid: int) -> None:
        """Watch a process."""
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):  # not Linux, an old kernel, or it has just gone
            self._unwatched.add(pid)
            return
        self._descriptors[pid] = descriptor
        self._selector.register(descriptor, selectors.EVENT_READ)

    def remove(self, pid: int) -> None:
        """Stop watching a process."""
        self._unwatched.discard(pid)
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Return after at most `timeout_s`, earlier when a watched process has ended or `wake` was called."""
        self._selector.select(min(timeout_s, POLL_S) if self._unwatched else timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._receive, 4096)

    def wake(self) -> None:
        """Make `wait` return; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full of wake-ups already
            os.write(self._send, b"\0")

    def close(self) -> None:
        """Close the descriptors."""
        for pid in list(self._descriptors):
            self.remove(pid)
        self._selector.close()
        os.close(self._receive)
        os.close(self._send)


def _memory_file() -> IO[bytes]:
    """Open a file without a name, on Linux in memory only."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("environment"), "w+b")
    return tempfile.TemporaryFile()


def _read_report(path: Path) -> Mapping[str, Any] | None:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return report if isinstance(report, dict) else None


def _strays(uid: str) -> Iterator[psutil.Process]:
    return (process for process in own_processes() if variable_of(process, variables.POD_UID) == uid)
