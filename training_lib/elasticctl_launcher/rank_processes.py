"""Starting training processes: at once, or from a warm spare that has imported torch ahead of need.

A spare costs the memory of an idle Python with torch (docs/performance.md) and saves the seconds of importing it at
each restart. Only Python can have one (`python SCRIPT …`, `python -m MODULE …`); other commands start as they are.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

LAST_LINES = 20
MAX_LINE_BYTES = 16_000
"""Longer lines are broken up here: container runtimes, and our own shim, would do it at 16 KiB, out of our sight."""
KILL_WAIT_S = 10.0


@dataclass(slots=True)
class Rank:
    """One running training process. `code` is Popen's return code: negative for a signal, None while it runs."""

    local_rank: int
    rank: int
    process: subprocess.Popen[bytes]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    code: int | None = None
    threads: tuple[threading.Thread, ...] = ()


class RankGroup:
    """The ranks of one generation on this worker.

    From threads, `on_line(rank, text)` is called with each line that one of them prints, and `on_exit(rank)` when one
    ends.
    """

    def __init__(
        self, starter: RankStarter, on_line: Callable[[int, str], None], on_exit: Callable[[Rank], None]
    ) -> None:
        self._starter, self._on_line, self._on_exit = starter, on_line, on_exit
        self.ranks: list[Rank] = []

    def start(self, environments: Sequence[tuple[int, Mapping[str, str]]]) -> None:
        """Start one process per (global rank, environment), from the main thread."""
        prefixed = len(environments) > 1
        for local_rank, (rank, env) in enumerate(environments):
            process = self._starter.start(env)
            entry = Rank(local_rank, rank, process)
            self.ranks.append(entry)
            prefix = f"[rank{rank}] " if prefixed else ""
            reader = threading.Thread(target=self._read, args=(entry, prefix), daemon=True)
            waiter = threading.Thread(target=self._wait, args=(entry, reader), daemon=True)
            entry.threads = (reader, waiter)
            reader.start()
            waiter.start()

    def suspended(self) -> list[Rank]:
        """Ranks that somebody has stopped (SIGSTOP, a debugger): they live, but will not move by themselves."""
        return [entry for entry in self.ranks if entry.code is None and _is_stopped(entry.process.pid)]

    def stop(self, grace_s: float) -> None:
        """SIGTERM to every rank, SIGKILL to what is left of them after `grace_s`; returns when all are gone."""
        if self.suspended():
            grace_s = 0.0  # they would not notice
        for entry in self.ranks:
            if entry.code is None:
                with contextlib.suppress(ProcessLookupError):
                    entry.process.terminate()
        deadline = time.monotonic() + grace_s
        for entry in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                entry.process.wait(max(0.0, deadline - time.monotonic()))
        for entry in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(entry.process.pid, signal.SIGKILL)
        for entry in self.ranks:
            entry.process.wait(KILL_WAIT_S)
            for thread in entry.threads:
                thread.join(KILL_WAIT_S)
        self.ranks.clear()

    def _read(self, entry: Rank, prefix: str) -> None:
        """Pass a rank's output on, line by line."""
        pipe = entry.process.stdout
        if pipe is None:
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while line := pipe.readline(MAX_LINE_BYTES):
                # A character that a long line is broken within comes whole with the next piece.
                text = decoder.decode(line, final=line.endswith(b"\n")).rstrip("\n")
                entry.last_lines.append(text)
                self._on_line(entry.rank, f"{prefix}{text}")

    def _wait(self, entry: Rank, reader: threading.Thread) -> None:
        code = entry.process.wait()
        reader.join(1.0)  # what it said last belongs to the report; a grandchild may hold the pipe open for longer
        entry.code = code
        self._on_exit(entry)


def _is_stopped(pid: int) -> bool:
    """True for a process in state T or t; False where /proc does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def torchrun_environment(group: WorkerGroup, worker: Worker) -> dict[str, str]:
    """One rank's place in its group. The store is the agent's; no restart is torch's to make."""
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": group.spec.role,
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


MAX_SOURCE_BYTES = 1 << 20


def installed_imports(script: str) -> list[str]:
    """The installed modules that `script` imports at its top level, in order; empty when it cannot be parsed."""
    path = Path(script)
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return []
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    named = dict.fromkeys(_top_level(tree.body))
    return [module for module in named if is_installed(module.split(".")[0])]


def is_installed(package: str) -> bool:
    """True for a package of this interpreter's library folders; False for a module of anybody's working folder."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or [])]
    libraries = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))
    return any(place.startswith(libraries) for place in places)


def _top_level(body: Iterable[ast.stmt]) -> Iterable[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module


BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
PLAIN_PYTHON_FLAGS = frozenset({"-u"})
"""Interpreter flags that a spare may drop: output is unbuffered anyway."""


def common_environment() -> dict[str, str]:
    """What all ranks and spares of a worker share: this process's own, and defaults for what it leaves open."""
    loopback = os.environ.get("ELASTICCTL_POD_IP", "127.0.0.1") in ("127.0.0.1", "::1")
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if loopback and os.path.exists("/sys/class/net/lo") else {}
    return {**interface, "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command that a spare can run: the interpreter, and what follows it from the script on."""

    interpreter: str
    argv: tuple[str, ...]

    @classmethod
    def parse(cls, command: Sequence[str]) -> PythonCommand | None:
        """Read `python [-u] SCRIPT …` or `python [-u] -m MODULE …`; None for anything else."""
        if not os.path.basename(command[0]).startswith("python"):
            return None
        interpreter = shutil.which(command[0])
        rest = list(command[1:])
        while rest and rest[0] in PLAIN_PYTHON_FLAGS:
            del rest[0]
        is_script = bool(rest) and not rest[0].startswith("-")
        is_module = len(rest) > 1 and rest[0] == "-m"
        return cls(interpreter, tuple(rest)) if interpreter and (is_script or is_module) else None


class RankStarter:
    """Starts the processes of one worker; `preload` names the modules a spare imports (empty: no spares).

    `environment` is what all of them have in common; libraries read some of it while they are imported.

    Every method must be called from the main thread: the kernel ties a process to the thread that started it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], preload: Sequence[str]) -> None:
        self._command, self._preload = list(command), list(preload)
        self.environment = dict(environment)
        self._python = PythonCommand.parse(command) if preload else None
        self._spares: list[subprocess.Popen[bytes]] = []
        self._unready: list[int] = []  # pipes that close when a spare is ready

    def warm(self, count: int) -> None:
        """Have `count` spares, starting those that are missing."""
        self._spares = [spare for spare in self._spares if spare.poll() is None]
        while self._python and len(self._spares) < count:
            ready, tell = os.pipe()
            argv = [self._python.interpreter, BOOTSTRAP, str(os.getpid()), "spare", str(tell), *self._preload]
            try:
                spare = self._popen(argv, self.environment, subprocess.PIPE, pass_fds=(tell,))
            except OSError:
                os.close(ready)
                raise
            finally:
                os.close(tell)
            self._spares.append(spare)
            self._unready.append(ready)

    def wait_until_warm(self, timeout_s: float) -> None:
        """Wait until every spare has imported what it is to import, or has ended; at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._unready:
            ready, _, _ = select.select(self._unready[:1], [], [], max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() < deadline:
                continue
            os.close(self._unready.pop(0))

    def start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start one training process with `environment`; its output (both streams) is `.stdout`."""
        while self._python and self._spares:
            spare = self._spares.pop(0)
            assignment = json.dumps({"argv": self._python.argv, "env": dict(environment)})
            with contextlib.suppress(OSError):  # it has died: the next one, or a fresh one
                if spare.stdin and spare.poll() is None:
                    spare.stdin.write(assignment.encode() + b"\n")
                    spare.stdin.close()
                    spare.stdin = None
                    return spare
            self._discard(spare)
        argv = [sys.executable, "-I", "-S", BOOTSTRAP, str(os.getpid()), "exec", *self._command]
        return self._popen(argv, environment, subprocess.DEVNULL)

    def close(self) -> None:
        """End the spares that were not needed."""
        self.wait_until_warm(0.0)
        for spare in self._spares:
            self._discard(spare)
        self._spares.clear()

    def _discard(self, spare: subprocess.Popen[bytes]) -> None:
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
