"""The training processes of one worker: start them, at once or from a warm spare, watch, read and stop them.

Each rank runs in a session of its own, and the kernel kills it when the launcher dies, so that a launcher that is
killed outright leaves no process behind. `bootstrap.py` is what a rank or spare starts as.

A spare has imported torch before it is needed. It costs the memory of an idle Python with torch (docs/performance.md)
and saves the seconds of that import at each restart. Only Python commands can have one (`python SCRIPT ...`,
`python -m MODULE ...`); others start as they are.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LAST_LINES = 20
MAX_LINE_BYTES = 16_000
"""Longer lines are broken up here: container runtimes and our own shim would do so at 16 KiB, unseen by us."""
KILL_WAIT_S = 10.0
MAX_SOURCE_BYTES = 1 << 20
BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
PLAIN_PYTHON_FLAGS = frozenset({"-u"})
"""Interpreter flags that a spare may drop: output is unbuffered anyway."""


@dataclass(slots=True)
class Rank:
    """One training process. `code` is Popen's return code: negative for a signal, None while it runs."""

    local_rank: int
    rank: int
    process: subprocess.Popen[bytes]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    code: int | None = None
    threads: tuple[threading.Thread, ...] = ()


class RankGroup:
    """The ranks of one generation on this worker.

    Calls `on_line(rank, text)` for each line that a rank prints, and `on_exit(rank)` when one ends; both from threads.
    """

    def __init__(
        self, starter: RankStarter, on_line: Callable[[int, str], None], on_exit: Callable[[Rank], None]
    ) -> None:
        self._starter, self._on_line, self._on_exit = starter, on_line, on_exit
        self.ranks: list[Rank] = []

    def start(self, environments: Sequence[tuple[int, Mapping[str, str]]]) -> None:
        """Start one process per (global rank, environment), from the main thread."""
        for local_rank, (global_rank, environment) in enumerate(environments):
            rank = Rank(local_rank, global_rank, self._starter.start(environment))
            self.ranks.append(rank)
            prefix = f"[rank{global_rank}] " if len(environments) > 1 else ""
            reader = threading.Thread(target=self._read_output, args=(rank, prefix), daemon=True)
            waiter = threading.Thread(target=self._wait_for_exit, args=(rank, reader), daemon=True)
            rank.threads = (reader, waiter)
            reader.start()
            waiter.start()

    def suspended(self) -> list[Rank]:
        """Ranks that were stopped from outside (SIGSTOP, a debugger): alive, but they will not move by themselves."""
        return [rank for rank in self.ranks if rank.code is None and _is_stopped(rank.process.pid)]

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to every rank, and SIGKILL to what is left of them after `grace_s`; return when all are gone."""
        if self.suspended():
            grace_s = 0.0  # they would not notice
        for rank in self.ranks:
            if rank.code is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.terminate()
        deadline = time.monotonic() + grace_s
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.process.wait(KILL_WAIT_S)
            for thread in rank.threads:
                thread.join(KILL_WAIT_S)
        self.ranks.clear()

    def _read_output(self, rank: Rank, prefix: str) -> None:
        """Pass the rank's output on, line by line."""
        pipe = rank.process.stdout
        if pipe is None:
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while line := pipe.readline(MAX_LINE_BYTES):
                # A character in which a long line is broken is passed on whole, with the next piece.
                text = decoder.decode(line, final=line.endswith(b"\n")).rstrip("\n")
                rank.last_lines.append(text)
                self._on_line(rank.rank, f"{prefix}{text}")

    def _wait_for_exit(self, rank: Rank, reader: threading.Thread) -> None:
        code = rank.process.wait()
        reader.join(1.0)  # its last lines belong in the failure; a grandchild may keep the pipe open for longer
        rank.code = code
        self._on_exit(rank)


def _is_stopped(pid: int) -> bool:
    """True for a process in state T or t; False where /proc does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


class RankStarter:
    """Starts the processes of one worker; `preload` names the modules that a spare imports (empty: no spares).

    `environment` is what all of them share; some libraries read it while they are imported.

    Every method must be called from the main thread: the kernel ties a process to the thread that started it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], preload: Sequence[str]) -> None:
        self._command, self._preload = list(command), list(preload)
        self.environment = dict(environment)
        self._python = PythonCommand.parse(command) if preload else None
        self._spares: list[subprocess.Popen[bytes]] = []
        self._warming: list[int] = []  # pipes, each of which closes when a spare is warm

    def warm(self, count: int) -> None:
        """Start spares until there are `count`."""
        self._spares = [spare for spare in self._spares if spare.poll() is None]
        while self._python and len(self._spares) < count:
            warm, tell = os.pipe()
            argv = [self._python.interpreter, BOOTSTRAP, str(os.getpid()), "spare", str(tell), *self._preload]
            try:
                spare = self._popen(argv, self.environment, subprocess.PIPE, pass_fds=(tell,))
            except OSError:
                os.close(warm)
                raise
            finally:
                os.close(tell)
            self._spares.append(spare)
            self._warming.append(warm)

    def wait_until_warm(self, timeout_s: float) -> None:
        """Wait until every spare has imported its modules or has ended; at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._warming:
            warm, _, _ = select.select(self._warming[:1], [], [], max(0.0, deadline - time.monotonic()))
            if not warm and time.monotonic() < deadline:
                continue
            os.close(self._warming.pop(0))

    def start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start one training process with `environment`; its output (both streams) is `.stdout`."""
        while self._python and self._spares:
            spare = self._spares.pop(0)
            assignment = json.dumps({"argv": self._python.argv, "env": dict(environment)})
            with contextlib.suppress(OSError):  # it has died: take the next one, or a fresh process
                if spare.stdin and spare.poll() is None:
                    spare.stdin.write(assignment.encode() + b"\n")
                    spare.stdin.close()
                    spare.stdin = None
                    return spare
            self._kill_spare(spare)
        argv = [sys.executable, "-I", "-S", BOOTSTRAP, str(os.getpid()), "exec", *self._command]
        return self._popen(argv, environment, subprocess.DEVNULL)

    def close(self) -> None:
        """Kill the spares that were not needed."""
        self.wait_until_warm(0.0)
        for spare in self._spares:
            self._kill_spare(spare)
        self._spares.clear()

    def _kill_spare(self, spare: subprocess.Popen[bytes]) -> None:
        spare.kill()
        spare.wait()
        for pipe in (spare.stdin, spare.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

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


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command that a spare can run: the interpreter, and its arguments from the script on."""

    interpreter: str
    argv: tuple[str, ...]

    @classmethod
    def parse(cls, command: Sequence[str]) -> PythonCommand | None:
        """Read `python [-u] SCRIPT ...` or `python [-u] -m MODULE ...`; None for anything else."""
        if not os.path.basename(command[0]).startswith("python"):
            return None
        interpreter = shutil.which(command[0])
        rest = list(command[1:])
        while rest and rest[0] in PLAIN_PYTHON_FLAGS:
            del rest[0]
        is_script = bool(rest) and not rest[0].startswith("-")
        is_module = len(rest) > 1 and rest[0] == "-m"
        return cls(interpreter, tuple(rest)) if interpreter and (is_script or is_module) else None


def shared_environment() -> dict[str, str]:
    """What all ranks and spares of a worker share: this process's environment, with defaults for what is not set."""
    on_loopback = os.environ.get("ELASTICCTL_POD_IP", "127.0.0.1") in ("127.0.0.1", "::1")
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if on_loopback and os.path.exists("/sys/class/net/lo") else {}
    return {**interface, "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}


def installed_imports(script: str) -> list[str]:
    """The installed modules that `script` imports at its top level, in order; empty if it cannot be parsed."""
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
    """True for a package in this interpreter's library folders; False for one in the working folder or elsewhere."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or [])]
    libraries = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))
    return any(place.startswith(libraries) for place in places)
