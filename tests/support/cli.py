"""The command line, in this process (`run`) and as a process of its own (`start`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pexpect
import pytest

from elasticctl.cli.main import main


@dataclass(frozen=True, slots=True)
class Done:
    """How a command line ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have times printed in UTC."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which no cluster is ever started."""
    monkeypatch.setenv("ELASTICCTL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ELASTICCTL_CONTEXT", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    without_aws(monkeypatch)
    return tmp_path / "home"


def without_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials of the machine the tests run on: plans would ask for spot prices with them."""
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")


def with_programs(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have a shell of these names on the PATH: what they would do with their arguments is none of the test's affair."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("list", "-o", "json")` in this process."""

    def call(*args: str) -> Done:
        capsys.readouterr()
        code = main(args)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start("logs", "-f", "x")` as a process with pipes, in a session of its own: what it leaves is ended too."""
    started: list[subprocess.Popen[str]] = []

    def begin(*args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "elasticctl.cli", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "120"},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


Start = Callable[..., "subprocess.Popen[str]"]


Spawn = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def terminal() -> Iterator[Spawn]:
    """`terminal("status", "-w", "x", width=80)`: the command line on a terminal of its own."""
    spawned: list[pexpect.spawn[str]] = []

    def spawn(*args: str, width: int = 120, **environ: str) -> pexpect.spawn[str]:
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        child: pexpect.spawn[str] = pexpect.spawn(
            sys.executable,
            ["-m", "elasticctl.cli", *args],
            env={**env, "TERM": "xterm-256color", **environ},
            encoding="utf-8",
            timeout=240,
            dimensions=(40, width),
        )
        spawned.append(child)
        return child

    yield spawn
    for child in spawned:
        child.close(force=True)
