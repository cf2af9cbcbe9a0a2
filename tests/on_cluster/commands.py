"""What tests of a cluster type: kubectl, elasticctl, and the lab that takes parts of the cluster away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.on_cluster.waiting import wait_until

LAB = os.environ.get("ELASTICCTL_TEST_LAB", "")
"""The command that takes nodes away and brings them back: LAB kill-node NAME, LAB start-node NAME."""
LAB_HOME = Path(os.environ.get("KUBELAB_HOME", "/tmp/kubelab"))
"""Where the lab keeps the pids of its processes."""

_UNREACHED = ("Unable to connect to the server", "did you specify the right host or port?")
"""What kubectl says when it could not send its request."""
_READING = ("describe", "explain", "history", "logs", "status", "wait")
_PATIENCE_S = 600
_started: list[subprocess.Popen[bytes]] = []
"""Parts of the control plane; the lab ends them, after this process."""


@dataclass(frozen=True, slots=True)
class Typed:
    """How a command ended."""

    code: int
    out: str
    err: str


def kubectl(*words: str, given: str = "", timeout_s: float = 120) -> str:
    """What kubectl prints, `given` on its standard input; fails with what it says when it fails.

    It is typed again as long as it does not reach the server.
    """
    done = _run_kubectl(*words, given=given, timeout_s=timeout_s)
    assert done.code == 0, done
    return done.out


def refusal(*words: str, given: str = "") -> str:
    """What kubectl says when it fails."""
    done = _run_kubectl(*words, given=given, timeout_s=120)
    assert done.code != 0, done
    return done.err


def elasticctl(*words: str, patient: bool = True) -> Typed:
    """Run the command line against the current context of $KUBECONFIG, which must have been imported (`cli_home`).

    `patient`: a verb that only reads is typed again as long as the server does not answer it in time.
    """
    while True:
        done = _run([sys.executable, "-m", "elasticctl.cli", *words], timeout_s=_PATIENCE_S)
        if not (patient and words[0] in _READING and "no answer from the cluster" in done.err):
            return done


def need_lab() -> None:
    """Skip the test where parts of the cluster cannot be taken away."""
    if not LAB:
        pytest.skip("$ELASTICCTL_TEST_LAB is not set: nodes cannot be taken away")


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
    with stopped(part):
        pass


@contextmanager
def stopped(part: str) -> Iterator[None]:
    """Kill a part of the control plane, and start it as it was afterwards."""
    need_lab()
    pid, command = _pid(part), _command(part)
    os.kill(pid, signal.SIGKILL)
    try:
        wait_until(lambda: _has_ended(pid))
        yield
    finally:
        _start(part, command)


def start_node(name: str) -> None:
    """Bring back a node that was killed; it takes pods again then."""
    lab("start-node", name, timeout_s=300)
    wait_until(lambda: not kubectl("get", "node", name, "-o", "jsonpath={.spec.taints}"), every_s=0.5)


def kill_processes(pod_uid: str) -> None:
    """Kill the processes of a pod of the lab, on this machine: the deletion of a pod only signals them to stop."""
    need_lab()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if f"/pod{pod_uid}" in (process / "cgroup").read_text() and (process / "comm").read_text() != "pause\n":
                os.kill(int(process.name), signal.SIGKILL)


def _command(part: str) -> tuple[list[bytes], dict[bytes, bytes]]:
    """The command line and the environment of a part of the control plane, which runs."""
    process = Path(f"/proc/{_pid(part)}")
    environ = (process / "environ").read_bytes().rstrip(b"\0").split(b"\0")
    argv = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return argv, dict(one.split(b"=", 1) for one in environ if b"=" in one)


def _start(part: str, command: tuple[list[bytes], dict[bytes, bytes]]) -> None:
    argv, environ = command
    with (LAB_HOME / "log" / f"{part}.log").open("ab") as log:
        process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    _started.append(process)
    started_at = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    (LAB_HOME / "pid" / part).write_text(f"{process.pid} {started_at}")  # as the lab notes it


def _pid(part: str) -> int:
    return int((LAB_HOME / "pid" / part).read_text().split()[0])


def _has_ended(pid: int) -> bool:
    """Whether all its threads have. A thread that still ends holds the process's ports."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if thread.read_text().rpartition(")")[2].split()[0] not in "ZX":
                return False
    return True


def _run_kubectl(*words: str, given: str, timeout_s: float) -> Typed:
    deadline = time.monotonic() + timeout_s
    while True:
        done = _run(["kubectl", *words], given=given, timeout_s=timeout_s)
        if time.monotonic() > deadline or not any(said in done.err for said in _UNREACHED):
            return done
        time.sleep(0.5)


def _run(argv: list[str], *, given: str = "", timeout_s: float) -> Typed:
    done = subprocess.run(
        argv,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1"},
    )
    return Typed(done.returncode, done.stdout, done.stderr)
