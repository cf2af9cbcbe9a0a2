"""The Python stacks of a rank and of its Python descendants, read from outside with py-spy.

py-spy reads the memory of the process without stopping it (`--nonblocking`), so that it does not disturb the process.
The kernel allows this to a process of the same user. Where Yama restricts it to ancestors, `bootstrap.py` has named the
launcher as an exception. A process that changes its stack during the read cannot always be read; there is no result
then.

`elasticctl stacks` runs `elasticctl-launch --stacks` in the worker. The launcher writes the list of its ranks to its
private folder. Every user who can read that folder can see the stacks.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from elasticctl_launcher.hangs.process_activity import family
from elasticctl_launcher.workspace import PREFIX, UnpackedWorkspace, folders_for_sockets, path_in_source
from elasticctl_protocol import variables

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
class StackFrame:
    """One call: the function's qualified name, its file, and the current line."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread of a Python process; the innermost frame comes first."""

    pid: int
    thread: str
    frames: tuple[StackFrame, ...]


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
            self._report_trouble("py-spy is not installed. FIX: pip install py-spy in the workers' image")
            return
        for member in islice(family(pid), most):
            try:
                stacks = self._dump(program, member)
            except PermissionError as error:
                self._report_trouble(f"{error}. FIX: allow ptrace to the workers' processes (seccomp, capabilities)")
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

    def _report_trouble(self, why: str) -> None:
        if not self.trouble:
            self.trouble = why
            log.warning(
                "the ranks' Python stacks cannot be read, so hangs are detected and explained less reliably: %s", why
            )


def find_program() -> str | None:
    """Return the path of py-spy, next to this interpreter or on the PATH; None if there is none."""
    near = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(near) if near.exists() else shutil.which("py-spy")


def parse(dump: Iterable[dict[str, Any]]) -> Stacks | None:
    """Parse `py-spy dump --json`; return None if it has no frames. Raises KeyError, TypeError or ValueError."""
    stacks = tuple(
        ThreadStack(
            int(thread["pid"]),
            str(thread.get("thread_name") or f"thread {thread.get('os_thread_id')}"),
            tuple(
                StackFrame(str(frame["name"]), str(frame["filename"]), int(frame["line"]))
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


RANKS = "ranks.json"


def write_rank_list(folder: Path, pids: Mapping[int, int], workspace: UnpackedWorkspace | None = None) -> None:
    """Write the ranks of this worker (rank -> pid), and what they run, to `folder`; skip it if the disk is full."""
    note: dict[str, Any] = {"pod": os.environ.get(variables.POD_UID, "")}
    note["ranks"] = [{"rank": rank, "pid": pids[rank]} for rank in pids]
    if workspace is not None:
        note |= {"copy": str(workspace.folder), "source": str(workspace.source or "")}
    new = folder / f"{RANKS}.new"
    with suppress(OSError):
        new.write_text(json.dumps(note), "utf-8")
        new.replace(folder / RANKS)


def stacks_of_ranks(pod: str) -> dict[str, Any]:
    """Return the Python stacks of the ranks of the worker whose pod has the uid `pod`, for JSON.

    `ranks` has one entry per rank, with `rank`, `pid` and `stacks`: one stack per thread of its processes, innermost
    frame first; files of the workspace are named as they were submitted. `trouble` says what could not be read; it is
    empty otherwise.
    """
    reader = StackReader()
    found: dict[str, Any] = next((note for note in _notes() if note.get("pod") == pod), {"ranks": []})
    ranks = [
        {**rank, "stacks": [_as_submitted(stack, found) for stack in reader.read_all(rank["pid"])]}
        for rank in found["ranks"]
    ]
    return {"ranks": ranks, "trouble": reader.trouble or ("" if ranks else "its ranks have not been started")}


def _as_submitted(stack: ThreadStack, note: Mapping[str, Any]) -> dict[str, Any]:
    copy, source = str(note.get("copy", "")), str(note.get("source", ""))
    frames = [{**dataclasses.asdict(frame), "file": path_in_source(frame.file, copy, source)} for frame in stack.frames]
    return {**dataclasses.asdict(stack), "frames": frames}


def _notes() -> Iterator[dict[str, Any]]:
    """The lists of ranks that launchers of this user have written; folders of other users are not trusted."""
    parents = dict.fromkeys(folders_for_sockets())
    for folder in (folder for parent in parents for folder in Path(parent).glob(f"{PREFIX}*")):
        with suppress(OSError, ValueError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                note = json.loads((folder / RANKS).read_text("utf-8"))
                if isinstance(note, dict):
                    yield note
