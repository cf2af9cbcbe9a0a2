"""What tests of a cluster type: kubectl, elasticctl, and the lab that takes parts of the cluster away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.on_cluster.waiting import wait_until

LAB = os.environ.get("ELASTICCTL_TEST_LAB", "")
"""The command that takes nodes away and brings them back: LAB kill-node NAME, LAB start-node NAME."""
LAB_HOME = Path(os.environ.get("KUBELAB_HOME", "/tmp/kubelab"))
"""Where the lab keeps the pids of its processes."""

_STARTS = 10
"""Threads of what has been killed may hold its port a moment longer."""
_started: list[subprocess.Popen[bytes]] = []
"""Parts of the control plane; the lab ends them, after this process."""


@dataclass(frozen=True, slots=True)
class Typed:
    """How a command ended, and after how long."""

    code: int
    out: str
    err: str
    took_s: float


def kubectl(*words: str, given: str = "", timeout_s: float = 120) -> str:
    """What kubectl prints, `given` on its standard input; fails with what it says when it fails."""
    done = _run(["kubectl", *words], given=given, timeout_s=timeout_s)
    assert done.code == 0, done
    return done.out


def elasticctl(*words: str, timeout_s: float = 120) -> Typed:
    """Run the command line against the current context of $KUBECONFIG, which has to be imported (`cli_home`)."""
    return _run([sys.executable, "-m", "elasticctl.cli", *words], timeout_s=timeout_s)


def need_lab() -> None:
    """Skip the test where nobody can take parts of the cluster away."""
    if not LAB:
        pytest.skip("$ELASTICCTL_TEST_LAB is not set: nobody to take nodes away")


def lab(*words: str, timeout_s: float = 120) -> None:
    """Have the lab do something, such as `kill-node NAME`."""
    need_lab()
    subprocess.run([LAB, *words], check=True, timeout=timeout_s)


@contextmanager
def frozen(part: str = "kube-apiserver") -> Iterator[None]:
    """Meanwhile a part of the control plane accepts connections, and says nothing."""
    need_lab()
    pid = _pid(part)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def restart(part: str) -> None:
    """Kill a part of the control plane, and start it as it was."""
    need_lab()
    pid, command = _pid(part), _command(part)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _born(pid) in ("", None), 10)
    _start(part, command)


@contextmanager
def revived(part: str) -> Iterator[None]:
    """Start a part of the control plane as it was, if it has ended meanwhile."""
    need_lab()
    command = _command(part)
    try:
        yield
    finally:
        if _born(_pid(part)) in ("", None):
            _start(part, command)


def _command(part: str) -> tuple[list[bytes], dict[bytes, bytes]]:
    """The command line and the environment of a part of the control plane, which runs."""
    process = Path(f"/proc/{_pid(part)}")
    environ = (process / "environ").read_bytes().rstrip(b"\0").split(b"\0")
    argv = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return argv, dict(one.split(b"=", 1) for one in environ if b"=" in one)


def _start(part: str, command: tuple[list[bytes], dict[bytes, bytes]]) -> None:
    argv, environ = command
    with (LAB_HOME / "log" / f"{part}.log").open("ab") as log:
        for _ in range(_STARTS):
            process = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                break
        else:
            raise AssertionError(f"{part} does not start again")
    _started.append(process)
    (LAB_HOME / "pid" / part).write_text(f"{process.pid} {_born(process.pid)}")


def _pid(part: str) -> int:
    return int((LAB_HOME / "pid" / part).read_text().split()[0])


def _born(pid: int) -> str | None:
    """When a process was started, as the lab notes it beside its pid; "" when it has ended, None: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    return "" if fields[0] == "Z" else fields[19]


def _run(argv: list[str], *, given: str = "", timeout_s: float) -> Typed:
    began = time.monotonic()
    done = subprocess.run(
        argv,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1"},
    )
    return Typed(done.returncode, done.stdout, done.stderr, time.monotonic() - began)
