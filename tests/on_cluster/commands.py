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

LAB = os.environ.get("ELASTICCTL_TEST_LAB", "")
"""The command that takes nodes away and brings them back: LAB kill-node NAME, LAB start-node NAME."""
LAB_HOME = Path(os.environ.get("KUBELAB_HOME", "/tmp/kubelab"))
"""Where the lab keeps the pids of its processes."""


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
def frozen_api_server() -> Iterator[None]:
    """Meanwhile the API server accepts connections, and says nothing."""
    need_lab()
    pid = int((LAB_HOME / "pid" / "kube-apiserver").read_text().split()[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


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
