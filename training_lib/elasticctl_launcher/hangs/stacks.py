"""The Python stacks of a rank and of its Python descendants, read from outside with py-spy.

py-spy reads the memory of the process without stopping it (`--nonblocking`), so that it does not disturb the process.
The kernel allows this to a process of the same user. Where Yama restricts it to ancestors, `bootstrap.py` has named the
launcher as an exception. A process that changes its stack during the read cannot always be read; there is no result
then.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from elasticctl_launcher.hangs.process_activity import family

TIMEOUT_S = 10.0
"""The timeout for reading one process, which takes about 50 ms, and this long only on an overloaded machine."""
MAX_TRIES = 8
"""A rank may be a shell that has started Python, so this many of its processes are tried."""
MAX_PROCESSES = 32
"""The log shows the stacks of this many processes of a rank, such as the workers of a data loader."""

BOOTSTRAP = "/elasticctl_launcher/bootstrap.py"
"""The file of our own frames below the script, which are left out."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: the function's qualified name, its file, and the current line."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread of a Python process; the innermost frame comes first."""

    pid: int
    thread: str
    frames: tuple[Frame, ...]


Stacks = tuple[ThreadStack, ...]


class StackReader:
    """Reads stacks. If that is impossible, logs the reason once, and keeps it in `trouble` (empty: there is none)."""

    def __init__(self) -> None:
        self.trouble = ""

    def read(self, pid: int) -> Stacks | None:
        """Return the threads of the first Python process at or below `pid`; None if they cannot be read."""
        return next(self._read_each(pid, MAX_TRIES), None)

    def read_all(self, pid: int) -> Stacks:
        """Return the threads of every Python process at or below `pid`."""
        return tuple(thread for stacks in self._read_each(pid, MAX_PROCESSES) for thread in stacks)

    def _read_each(self, pid: int, most: int) -> Iterator[Stacks]:
        program = find_program()
        if program is None:
            self._tell("py-spy is not installed. FIX: pip install py-spy in the workers' image")
            return
        for member in islice(family(pid), most):
            try:
                stacks = self._dump(program, member)
            except PermissionError as error:
                self._tell(f"{error}. FIX: allow ptrace to the workers' processes (seccomp, capabilities)")
                return
            if stacks is not None:
                yield stacks

    def _dump(self, program: str, pid: int) -> Stacks | None:
        """The stacks of one process; None if it is not Python, or is too busy. Raises PermissionError."""
        command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode == 0:
                return parse(json.loads(done.stdout))
        except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
            log.debug("no stack of process %d: %s", pid, error)
            return None
        why = done.stderr.partition("\n")[0]
        if "ermission" in done.stderr:
            raise PermissionError(why)
        log.debug("no stack of process %d: %s", pid, why)
        return None

    def _tell(self, why: str) -> None:
        if not self.trouble:
            self.trouble = why
            log.warning(
                "the ranks' Python stacks cannot be read, so hangs are detected and explained less reliably: %s", why
            )


def find_program() -> str | None:
    """Return the path of py-spy, beside this interpreter or on the PATH; None if there is none."""
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def parse(dump: Iterable[dict[str, Any]]) -> Stacks | None:
    """Parse `py-spy dump --json`; return None if it has no frames. Raises KeyError, TypeError or ValueError."""
    stacks = tuple(
        ThreadStack(
            int(thread["pid"]),
            str(thread.get("thread_name") or f"thread {thread.get('os_thread_id')}"),
            tuple(
                Frame(str(frame["name"]), str(frame["filename"]), int(frame["line"]))
                for frame in thread["frames"]
                if not str(frame["filename"]).endswith(BOOTSTRAP)
            ),
        )
        for thread in dump
    )
    return stacks if any(stack.frames for stack in stacks) else None


def main_thread(stacks: Stacks) -> ThreadStack | None:
    """Return the main thread of the outermost process that has Python frames."""
    first = [stack for stack in stacks if stack.pid == stacks[0].pid and stack.frames]
    named = [stack for stack in first if stack.thread == "MainThread"]
    return next(iter(named or first), None)


def to_lines(stacks: Stacks, known_path: Callable[[str], str] = str) -> Iterator[str]:
    """Yield a block of lines per thread, innermost call first; threads of descendants show their process id.

    `known_path(path)` returns the path that is shown of a file.
    """
    for stack in stacks:
        process = "" if stack.pid == stacks[0].pid else f" of process {stack.pid}"
        yield f"{stack.thread}{process}:"
        for frame in stack.frames:
            yield f"    {frame.function} ({known_path(frame.file)}:{frame.line})"
