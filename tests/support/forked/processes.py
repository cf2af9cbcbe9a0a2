"""Become another Python program by a fork, where the product would start Python, which takes seconds with torch.

`ForkingPopen` does so for the programs below; everything else is started as usual. What a program would find
after `exec` it finds here, too: its arguments, environment, streams and signals, in /proc as well, and no other file.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import inspect
import io
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from elasticctl_controller.local import shim
from elasticctl_launcher import bootstrap

PLAIN = subprocess.Popen
SHIM = str(Path(shim.__file__).resolve())
LAUNCHER = "elasticctl-launch"
UNUSED = -1
TITLE_BYTES = 4095
"""A page: Linux shows no more of a command that a process has written over its own."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a fork becomes: a command line, and what it comes down to here."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    run: Callable[[], int | None]


class ForkingPopen(subprocess.Popen[bytes]):
    """Forks shims, launchers, spares and other ranks: see `_known_program`."""

    def _execute_child(self, *arguments: Any) -> None:
        plain = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(plain).bind(*arguments).arguments
        program = _known_program(given["args"], os.environ if given["env"] is None else given["env"])
        if program is None or not os.path.isdir(given["cwd"] or "."):
            plain(*arguments)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _take_place(given)
            except BaseException:  # noqa: BLE001 (nothing may return into the frames below)
                traceback.print_exc()
                os._exit(1)
            become(program, given["pass_fds"])
        self._child_created = True
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _known_program(command: Sequence[str], environ: Mapping[str, str]) -> Program | None:
    """The shim of a worker, its launcher, or a rank, if it is to be run by this very Python without any flags."""
    if list(command[:3]) == [sys.executable, "-I", SHIM]:
        return Program(command, environ, lambda: shim.main(command[3]))
    if os.path.basename(command[0]) == LAUNCHER:
        return Program(command, environ, lambda: launch(list(command[1:])))
    if list(command[1:2]) == [bootstrap.__file__] and "spare" in command and _is_this_python(command[0]):
        return Program(command, environ, lambda: _be_rank(command[1:], environ))
    if list(command[3:4]) == [bootstrap.__file__] and _is_this_python(command[6]) and _names_script(command[7:]):
        return Program(command[6:], environ, lambda: _be_rank(command[3:], environ))
    return None


def _names_script(arguments: Sequence[str]) -> bool:
    return bool(arguments) and (arguments[0] == "-m" or not arguments[0].startswith("-"))


def launch(argv: list[str]) -> int:
    """Be the launcher."""
    from elasticctl_launcher.main import main

    return main(argv)


def _is_this_python(interpreter: str) -> bool:
    folder = Path(sys.executable).parent
    return Path(shutil.which(interpreter) or "").parent == folder


def _be_rank(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    import torch

    subprocess.Popen = PLAIN  # type: ignore[misc]  # what the user's script starts is started as ever
    sys.argv = list(argv)
    sys.path.insert(0, os.path.dirname(argv[0]))
    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", torch.get_num_threads())))  # torch reads it at its import
    bootstrap.exec_command = _run_python
    bootstrap.main()


def _run_python(command: list[str]) -> None:
    """What is left of a rank that is no spare's when it would become Python."""
    if not bootstrap.is_path_safe():
        sys.path.pop(0)  # as a spare does: the folder of our file
    bootstrap.run_script(command[1:])


def _take_place(given: Mapping[str, Any]) -> None:
    """What `Popen` has been asked for."""
    if given["start_new_session"]:
        os.setsid()
    for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if given[name] != UNUSED:
            os.dup2(given[name], number)
    if given["umask"] >= 0:
        os.umask(given["umask"])
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["preexec_fn"] is not None:
        given["preexec_fn"]()


def become(program: Program, pass_fds: Iterable[int] = ()) -> NoReturn:
    """Be what `exec` would make of this process, which is a fork with the program's streams; never to return."""
    code: object = 1
    try:
        gc.freeze()  # what other threads had is not to be closed: the number is another file's by then
        first = 3
        for kept in (*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, kept)
            first = kept + 1
        _reset_process()
        os.environ.clear()
        os.environ.update(program.environ)
        show(program.argv, program.environ)
        _open_streams(unbuffered=bool(program.environ.get("PYTHONUNBUFFERED")))
        if program.environ.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        sys.path[:0] = filter(None, program.environ.get("PYTHONPATH", "").split(os.pathsep))
        code = program.run() or 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 (as the interpreter would)
        traceback.print_exc()
    finally:
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _reset_process() -> None:
    """Let go of what this process was as another program."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for handler in list(logging.root.handlers):
        logging.root.removeHandler(handler)
    logging.root.setLevel(logging.WARNING)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # they would remove folders of the other's
    _resource_tracker._fd = _resource_tracker._pid = None  # the file has been closed
    tempfile.tempdir = None
    random.seed()
    time.tzset()


def _open_streams(*, unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    raw = io.FileIO(1, "w", closefd=False)
    out = io.TextIOWrapper(raw if unbuffered else io.BufferedWriter(raw), "utf-8", write_through=unbuffered)  # type: ignore[arg-type]
    err = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", errors="backslashreplace", write_through=True)  # type: ignore[type-var]
    sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = err  # type: ignore[misc]


def show(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have /proc show this command and environment, which the cluster finds its processes by.

    They are written over what this process, or the one that it is forked from, was started with. Linux only.
    """
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = (int(field) for field in fields[45:49])
    title = " ".join(argv).encode("utf-8", "surrogateescape")
    # By the last byte, Linux sees that it has been written over.
    room = arguments_end - arguments - 1
    _overwrite(arguments, title[: min(room - 1, TITLE_BYTES)].ljust(room, b"\0") + b"\1")
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    room = variables_end - variables
    assert len(block) <= room, "the server that this is forked from was started without `start_server`"
    _overwrite(variables, block.ljust(room, b"\0"))


def _overwrite(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))
