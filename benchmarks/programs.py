"""What the programs of this folder have in common: options, Ctrl-C, and the processes and clusters that they start."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import psutil

from elasticctl.api.errors import ElasticctlError
from elasticctl.settings import contexts
from elasticctl_protocol import variables

MARK = "ELASTICCTL_BENCHMARK"
"""The name of the variable that every process of a trial has in its environment; its value identifies the trial."""
ROOT = Path(__file__).resolve().parents[1]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints the module's docstring as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def count(text: str) -> int:
    """Parse an option's value that is a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1 is needed")
    return value


def end_as_by_ctrl_c() -> None:
    """Make SIGTERM end this process like Ctrl-C: what was started is ended, and the results so far are shown."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # `timeout` sends it twice, to its command and to the group; the second one must not interrupt the clean-up.
    signal.signal(number, lambda number, frame: None)
    raise KeyboardInterrupt


def installed_environment() -> dict[str, str]:
    """Return this process's environment, without what would make Python compile the command line at each start.

    An installed command line is compiled already.
    """
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def elasticctl() -> str:
    """Return the path of the installed script of this interpreter's environment."""
    found = Path(sys.executable).with_name("elasticctl")
    if not found.exists():
        raise SystemExit(f"{found} does not exist. FIX: install elasticctl into this environment: pip install -e .")
    return str(found)


def run_elasticctl(*arguments: str, environ: Mapping[str, str] | None = None) -> str:
    """Run the installed command and return its output. Raises ElasticctlError if it fails."""
    done = subprocess.run(
        [elasticctl(), *arguments], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        raise ElasticctlError(f"elasticctl {arguments[0]}: exit code {done.returncode}: {said}")
    return done.stdout


@contextlib.contextmanager
def local_cluster() -> Iterator[dict[str, str]]:
    """Have a local cluster with a home of its own; yield the environment in which commands use it.

    It starts with the first command that needs it, and has ended, with all its processes, when this is left.
    """
    home = tempfile.mkdtemp(prefix="ec-", dir="/tmp")  # a short path, because it contains sockets
    environ = {**installed_environment(), variables.HOME: home, variables.CONTEXT: contexts.LOCAL}
    try:
        yield environ
    finally:
        subprocess.run([elasticctl(), "local", "down"], env=environ, capture_output=True, check=False)
        sweep(home, variables.HOME)
        shutil.rmtree(home, ignore_errors=True)


def kill_trees(pids: Iterable[int]) -> float:
    """Send SIGKILL to processes and all their descendants, as if their machines had failed; return when, in Unix
    seconds.

    The given processes are killed first, so that none of them reacts to the end of its descendants.
    """
    tops = [process for process in map(_process, pids) if process is not None]
    below = []
    for top in tops:
        with contextlib.suppress(psutil.Error):
            below += top.children(recursive=True)
    at = time.time()
    for process in [*tops, *below]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return at


def owner_of(pid: int, owners: Mapping[int, int]) -> int | None:
    """Return the key of the process in `owners` (key -> pid) that `pid` is, or descends from; None if there is none."""
    process = _process(pid)
    if process is None:
        return None
    with contextlib.suppress(psutil.Error):
        line = {pid, *(parent.pid for parent in process.parents())}
        return next((key for key, owner in owners.items() if owner in line), None)
    return None


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; do nothing if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def sweep(value: str, name: str = MARK) -> None:
    """Send SIGKILL to every process with `name=value` in its environment, also to stopped ones."""
    found = [process for process in psutil.process_iter() if _carries(process, name, value)]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=5.0)


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _carries(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(name) == value
    except psutil.Error:
        return False
