"""Starts training processes, directly or from a warm spare.

A spare has imported torch before it is needed. It costs the memory of an idle Python process with torch
(docs/performance.md), and saves the seconds of that import at each restart. Only Python commands can have spares
(`python SCRIPT ...`, `python -m MODULE ...`); others are started directly. `bootstrap.py` is the first code of every
rank and spare.

A spare whose imports fail, or take longer than `WARM_S` seconds, is given up with a warning. The next restart then
takes longer by the time of the imports.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticctl_protocol import variables

BOOTSTRAP = str(Path(__file__).parents[1] / "bootstrap.py")
WARM_S = 60.0
"""How long a rank or a newcomer waits for a spare's imports."""
KILL_WAIT_S = 1.0
LAST_WORDS_BYTES = 4096

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Spare:
    """A process that imports the modules of a future rank. It writes to the pipe `ready` when it has; -1: it has."""

    process: subprocess.Popen[bytes]
    ready: int
    started: float

    def wait_until_warm(self, timeout_s: float) -> bool:
        """Wait for its imports; return False if they take longer than `timeout_s`. Raises SpareFailed if they fail."""
        if self.ready < 0:
            return True
        poll = select.poll()
        poll.register(self.ready, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return False
        imported = os.read(self.ready, 1) != b""
        self.close_pipe()
        if not imported:
            raise SpareFailed(self._last_words())
        return True

    def close_pipe(self) -> None:
        """Close the pipe, if it is still open."""
        if self.ready >= 0:
            os.close(self.ready)
            self.ready = -1

    def assign(self, assignment: bytes) -> bool:
        """Turn it into a rank; return False if it has died."""
        if self.process.stdin is None or self.process.poll() is not None:
            return False
        with contextlib.suppress(OSError):
            self.process.stdin.write(assignment)
            self.process.stdin.close()
            self.process.stdin = None
            self.close_pipe()
            return True
        return False

    def kill(self) -> None:
        """Kill it, and close its pipes."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in uninterruptible sleep, it ends when it wakes up
            self.process.wait(KILL_WAIT_S)
        self.close_pipe()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _last_words(self) -> str:
        self.process.kill()  # it is about to end anyway
        code = self.process.wait()
        output = b""
        if self.process.stdout:
            os.set_blocking(self.process.stdout.fileno(), False)
            output = self.process.stdout.read() or b""
        lines = output[-LAST_WORDS_BYTES:].decode("utf-8", "replace").strip().splitlines()
        return f"exit code {code}" + (f": {lines[-1]}" if lines else "")


class SpareFailed(Exception):
    """A spare ended before it had made its imports; the text says how."""


class RankStarter:
    """Starts the processes of one worker; `preload` names the modules that a spare imports (empty: no spares).

    `environment` is common to all of them; some libraries read it while they are imported.

    Every method must be called from the main thread, because the kernel ties a process to the thread that started it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        preload: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.command, self._preload, self._clock = list(command), list(preload), clock
        self.environment = dict(environment)
        self._python = PythonCommand.parse(command) if preload else None
        self._spares: list[Spare] = []
        self._was_slow = False

    def warm(self, count: int) -> None:
        """Start spares until there are `count`. Raises OSError."""
        for spare in list(self._spares):
            if not self._is_usable(spare):
                self._drop(spare)
        while self._python and len(self._spares) < count:
            ready, report = os.pipe()
            python = [self._python.interpreter, *self._python.flags]
            argv = [*python, BOOTSTRAP, str(os.getpid()), "spare", str(report), *self._preload]
            try:
                process = self._popen(argv, self.environment, subprocess.PIPE, pass_fds=(report,))
            except OSError:
                os.close(ready)
                raise
            finally:
                os.close(report)
            self._spares.append(Spare(process, ready, self._clock()))

    def wait_until_warm(self, timeout_s: float) -> None:
        """Wait until every spare has made its imports or has ended, for `timeout_s` seconds at most."""
        deadline = self._clock() + timeout_s
        for spare in self._spares:
            self._is_warm(spare, deadline - self._clock())

    def start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start one training process with `environment`. Raises OSError.

        The process's `stdout` is a pipe with both of its output streams.
        """
        for spare in list(self._spares):
            if not self._is_reliable(spare) or self._python is None:
                continue
            assignment = json.dumps({"argv": self._python.argv, "env": dict(environment)})
            if spare.assign(assignment.encode() + b"\n"):
                self._spares.remove(spare)
                return spare.process
            self._drop(spare)
        argv = [sys.executable, "-I", "-S", BOOTSTRAP, str(os.getpid()), "exec", *self.command]
        return self._popen(argv, environment, subprocess.DEVNULL)

    def close(self) -> None:
        """Kill the remaining spares."""
        while self._spares:
            self._drop(self._spares[0])

    def own_pids(self) -> set[int]:
        """Return the process ids of the spares."""
        return {spare.process.pid for spare in self._spares}

    def _is_usable(self, spare: Spare) -> bool:
        """False for a spare that has died."""
        self._is_warm(spare)
        return spare.process.poll() is None

    def _is_reliable(self, spare: Spare) -> bool:
        """True for a spare that is warm, or that will be soon, provided that none has ever been slow."""
        if self._is_warm(spare):
            return True
        if not self._was_slow and self._clock() - spare.started >= WARM_S:
            self._was_slow = True
            log.warning("a spare has not finished its imports within %.0f s: ranks start without spares", WARM_S)
        return not self._was_slow and self._python is not None

    def _is_warm(self, spare: Spare, timeout_s: float = 0.0) -> bool:
        """True once the spare has made its imports. If they fail, no more spares are started."""
        try:
            return spare.wait_until_warm(timeout_s)
        except SpareFailed as failed:
            if self._python is not None:
                self._python = None
                log.warning(
                    "a spare cannot import %s (%s): ranks start without spares", ",".join(self._preload), failed
                )
            return False

    def _drop(self, spare: Spare) -> None:
        self._spares.remove(spare)
        spare.kill()

    def _popen(
        self, argv: Sequence[str], environment: Mapping[str, str], stdin: int, pass_fds: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            pass_fds=pass_fds,
            env=dict(environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def shared_environment() -> dict[str, str]:
    """Return the environment that ranks and spares share: this process's own, with defaults for unset variables."""
    on_loopback = os.environ.get(variables.POD_IP, "127.0.0.1") in ("127.0.0.1", "::1")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    interface = dict.fromkeys(names, "lo") if on_loopback and os.path.exists("/sys/class/net/lo") else {}
    # PYTHONFAULTHANDLER: Python prints the line at which a signal such as SIGSEGV ended it.
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONFAULTHANDLER": "1"}
    return {**interface, **defaults, **os.environ}


MAX_SOURCE_BYTES = 1 << 20
PLAIN_FLAGS = frozenset("bBdEIOPqRsSuv")
"""One-letter flags of the interpreter that do not change which program it runs."""
FLAGS_WITH_VALUE = frozenset("WX")


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command that a spare can run: the interpreter, its flags, and the arguments from the script on."""

    interpreter: str
    argv: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, command: Sequence[str]) -> PythonCommand | None:
        """Parse `python [FLAGS] SCRIPT ...` or `python [FLAGS] -m MODULE ...`; return None for anything else."""
        if not os.path.basename(command[0]).startswith("python"):
            return None
        interpreter = shutil.which(command[0])
        rest = list(command[1:])
        flags: list[str] = []
        while rest and (count := _words_of_flag(rest[0])):
            flags += rest[:count]
            del rest[:count]
        is_script = bool(rest) and not rest[0].startswith("-")
        is_module = len(rest) > 1 and rest[0] == "-m"
        return cls(interpreter, tuple(rest), tuple(flags)) if interpreter and (is_script or is_module) else None


def _words_of_flag(word: str) -> int:
    """How many words the interpreter's flags in `word` take: 2 for `-X dev`, 0 if one of them is unknown."""
    if word == "--check-hash-based-pycs":
        return 2
    if len(word) < 2 or word[0] != "-":
        return 0
    for at, letter in enumerate(word[1:], 2):
        if letter in FLAGS_WITH_VALUE:
            return 1 if word[at:] else 2
        if letter not in PLAIN_FLAGS:
            return 0
    return 1


def installed_imports(script: str) -> list[str]:
    """Return the installed modules that `script` imports at its top level, in order; empty if it cannot be parsed."""
    path = Path(script)
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return []
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    modules: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            modules += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            modules.append(statement.module)
    return [module for module in dict.fromkeys(modules) if is_installed(module.split(".")[0])]


def is_installed(package: str) -> bool:
    """True for a package in this interpreter's library folders; False for one elsewhere, as in the working folder."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or [])]
    libraries = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))
    return any(place.startswith(libraries) for place in places)
