"""The small process above each worker: starts it, keeps its output and reports its end, with or without a supervisor.

Run as `python -I shim.py POD_DIR`, by path and with the standard library alone, so that it starts in milliseconds.
POD_DIR holds `start.json` (argv, cwd); the worker's environment, which may hold secrets, comes as JSON on stdin and is
written nowhere. The shim leaves in POD_DIR:

    log            the worker's stdout and stderr, each line after its time (RFC 3339, UTC); what does not fit goes to
                   log.1, log.2, ..., of which the last are kept
    started.json   once the worker runs: its pid and when
    exit.json      once nothing of the worker is left: exit code, signal, time, termination message

It is a subreaper: processes that the worker leaves behind become its children, so "no children" means that nothing is
left. If the shim itself is killed, the worker is killed with it and there is no exit.json: by definition, that is exit
code 137.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

READ_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 14
MAX_LOG_BYTES, LOG_FILES = 10 << 20, 5
"""The size of a file of the log, and how many are kept, as the kubelet has them. The kubelet keeps the last ones; the
first one is kept here as well, because it says how the job began.
"""
MAX_MESSAGE_BYTES = 4096
RESERVED_BYTES = 8 * MAX_MESSAGE_BYTES
"""Disk space reserved for each report before the worker starts: a full disk must not turn a success into a loss."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
START_ERROR_EXIT_CODE = 127


def main(pod_dir: str) -> int:
    """Run the worker described in `pod_dir` to its end. The umask is the worker's: what the shim leaves is private."""
    umask = os.umask(0o077)
    os.chdir(pod_dir)
    with open("start.json", encoding="utf-8") as file:
        start = {**json.load(file), "env": json.load(sys.stdin)}
    try:
        for name in ("started.tmp", "exit.tmp"):
            _reserve(name)
    except OSError as e:  # the supervisor tries again later
        sys.exit(f"{pod_dir}: no room for the worker's reports, so it is not started yet: {e.strerror}")
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals = _watch_signals()
    log = Log("log")
    output, worker_output = os.pipe()
    try:
        worker = _start(start, worker_output, umask)
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        message = f"cannot start {start['argv'][0]!r}: {_why(e, start)}"
        log.add(message.encode() + b"\n")
        _write_exit(START_ERROR_EXIT_CODE, None, "StartError", message)
        return 0
    finally:
        os.close(worker_output)
    _publish("started", {"pid": worker.pid, "startedAt": time.time()})
    status = _follow(worker.pid, output, signals, log)
    worker.returncode = os.waitstatus_to_exitcode(status)
    _kill_descendants()
    _drain(output, log)
    log.end()
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    _write_exit(128 + number if number else os.WEXITSTATUS(status), number, "", _termination_message(start))
    return 0


class Log:
    """Appends lines with their times. While the disk is full it drops them, and reports that later."""

    def __init__(self, path: str) -> None:
        self._path, self._number = path, 0
        self._file, self._size = _open_log(path), 0
        self._rest = b""
        self._dropped = 0
        self._torn = False

    def add(self, chunk: bytes) -> None:
        """Add what the worker wrote; whole lines go to the file immediately, with one write."""
        lines, newline, rest = (self._rest + chunk).rpartition(b"\n")
        if not newline and len(rest) >= MAX_LINE_BYTES:
            lines, rest = rest, b""
        self._rest = rest
        if lines or newline:
            self._write(lines)

    def end(self) -> None:
        """Write what was left without a newline."""
        if self._rest:
            self._write(self._rest)
            self._rest = b""

    def _write(self, lines: bytes) -> None:
        stamp = _timestamp(time.time())
        text = stamp + lines.replace(b"\n", b"\n" + stamp) + b"\n"
        if self._dropped:
            text = stamp + b"elasticctl: %d lines were lost because the disk was full\n" % self._dropped + text
        if self._size + len(text) > MAX_LOG_BYTES:
            self._start_next_file()
        if self._torn:
            text = b"\n" + text
        try:
            written = os.write(self._file, text)
        except OSError:
            written = 0
        self._size += written
        if written == len(text):
            self._dropped, self._torn = 0, False
        else:
            self._dropped += lines.count(b"\n") + 1
            self._torn = self._torn or written > 0

    def _start_next_file(self) -> None:
        """Begin another file, and delete the oldest but the first."""
        try:
            file = _open_log(f"{self._path}.{self._number + 1}")
        except OSError:
            return  # for now, this one becomes longer
        os.close(self._file)
        self._file, self._size, self._torn = file, 0, False
        self._number += 1
        oldest = self._number - LOG_FILES + 1
        if oldest > 0:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}.{oldest}")


def _open_log(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere a no-op."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _start(start: dict[str, Any], output: int, umask: int) -> subprocess.Popen[bytes]:
    shim = os.getpid()

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:  # it died before prctl took effect
            os._exit(137)

    return subprocess.Popen(
        start["argv"],
        env=start["env"],
        cwd=start["cwd"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        umask=umask,
        preexec_fn=in_child,
    )


def _watch_signals() -> int:
    """Return a descriptor that delivers the number of each signal received, as one byte."""
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN: the worker would inherit that
    return receive


def _follow(worker: int, output: int, signals: int, log: Log) -> int:
    """Copy the worker's output and forward SIGTERM until it has ended; returns its wait status."""
    sources = [output, signals]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if output in ready:
            chunk = os.read(output, READ_BYTES)
            if chunk:
                log.add(chunk)
            else:
                sources.remove(output)
        if signals in ready:
            received = os.read(signals, 4096)
            if signal.SIGTERM in received:
                os.kill(worker, signal.SIGTERM)  # not reaped yet, so the pid is still its own
            status = _reap(worker)
            if status is not None:
                return status


def _reap(worker: int) -> int | None:
    """Collect every child that has ended; returns the worker's wait status if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == worker:
            found = status


def _kill_descendants() -> None:
    """Kill all remaining descendants; as their subreaper, the shim is done when it has no child to wait for."""
    while True:
        for pid in _children(os.getpid()):
            with contextlib.suppress(PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children(parent: int) -> list[int]:
    """The direct children of a process; empty where there is no /proc."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(name))
    return found


def _drain(output: int, log: Log) -> None:
    """Read what is still in the pipe, without waiting for its end: another process may hold the other side open."""
    os.set_blocking(output, False)
    try:
        while chunk := os.read(output, READ_BYTES):
            log.add(chunk)
    except BlockingIOError:
        return


def _why(error: Exception, start: dict[str, Any]) -> str:
    if isinstance(error, OSError) and not os.path.isdir(start["cwd"]):
        return f"the working directory {start['cwd']} does not exist"
    if isinstance(error, FileNotFoundError) and "/" not in start["argv"][0]:
        return "there is no such program on the PATH"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _termination_message(start: dict[str, Any]) -> str:
    try:
        with open(start["terminationLog"], "rb") as file:
            return file.read(MAX_MESSAGE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _write_exit(exit_code: int, number: int | None, reason: str, message: str) -> None:
    report = {"exitCode": exit_code, "signal": number, "reason": reason, "message": message, "finishedAt": time.time()}
    _publish("exit", report)


def _reserve(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b" " * RESERVED_BYTES)
        os.fsync(file.fileno())


def _publish(name: str, report: dict[str, Any]) -> None:
    """Write `<name>.json` into the reserved space (JSON allows trailing blanks), then rename it."""
    with open(f"{name}.tmp", "r+b") as file:
        file.write(json.dumps(report).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{name}.tmp", f"{name}.json")


def _timestamp(at: float) -> bytes:
    whole, micros = divmod(int(at * 1_000_000), 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)).encode() + b".%06dZ " % micros


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
