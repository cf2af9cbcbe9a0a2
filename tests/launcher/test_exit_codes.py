"""The launcher's exit code on each way it ends: 0 for success alone, and the same in the termination message."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elasticctl_launcher import rendezvous
from elasticctl_launcher.failure import APPLICATION, WorkerFailure
from elasticctl_launcher.main import main
from elasticctl_launcher.rendezvous import ServiceRefused, WorkerIdentity

REPORTS_ONCE = """
import json, os, socket, time
report = {"kind": "progress", "generation": int(os.environ["ELASTICCTL_GENERATION"]), "rank": 0, "step": 1}
wire = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
wire.sendto(json.dumps(report).encode(), os.environ["ELASTICCTL_AGENT_SOCKET"])
time.sleep(600)
"""


@dataclass
class ScriptedRendezvous:
    """A group of one. `answers` are the service's, by verb; `on_join` is called with each generation as it forms."""

    answers: Mapping[str, dict[str, Any] | Exception] = field(default_factory=dict)
    on_join: Callable[[ScriptedRendezvous], None] = lambda handler: None
    generation: int = 0
    stale_reason: str = "test"
    identity: WorkerIdentity = WorkerIdentity("uid-a-0", "a-0", "127.0.0.1", 1)
    on_stale: Callable[[int], None] = lambda generation: None
    on_drain: Callable[[int], None] = lambda generation: None

    @property
    def client(self) -> ScriptedRendezvous:
        return self

    @property
    def members(self) -> list[dict[str, Any]]:
        return [{"uid": self.identity.uid, "slots": 1}]

    def call(self, verb: str, body: object, timeout_s: float = 0.0) -> dict[str, Any]:
        answer = self.answers.get(verb, {})
        if isinstance(answer, Exception):
            raise answer
        return answer

    call_until = call

    def next_rendezvous(self) -> RendezvousInfo:
        self.generation += 1
        self.on_join(self)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 1))

    def get_backend(self) -> str:
        return "scripted"

    def get_run_id(self) -> str:
        return "default.job"

    def shutdown(self) -> bool:
        return True


def raising(error: Exception, generation: int = 1) -> Callable[[ScriptedRendezvous], None]:
    """Have joining `generation` fail."""

    def join(handler: ScriptedRendezvous) -> None:
        if handler.generation == generation:
            raise error

    return join


def get_sigterm(handler: ScriptedRendezvous) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def end_soon(handler: ScriptedRendezvous) -> None:
    """The generation is over in a moment; one that ends before its rank is suspended is followed by another."""
    threading.Timer(0.3, handler.on_stale, [handler.generation]).start()


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs the launcher in this process."""
    message = tmp_path / "message"
    environment = {"JOB": "job", "WORKER": "a-0", "POD_UID": "uid-a-0", "RDZV_ENDPOINT": "x", "RDZV_TOKEN_FILE": "x"}
    for name, value in {**environment, "TERMINATION_LOG": str(message)}.items():
        monkeypatch.setenv(f"ELASTICCTL_{name}", value)
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    levels = {name: logging.getLogger(name).level for name in ("torch", "torch.distributed.elastic", "botocore")}

    def run(handler: ScriptedRendezvous, *command: str, options: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr(rendezvous, "handler_from_environment", lambda *_: handler)
        code = main(["--preload", "none", "--stop-grace", "1", *options, "--", *command])
        assert message.exists() == (code != 0)
        assert code == 0 or json.loads(message.read_text())["exitCode"] == code
        return code

    yield run
    for number, action in signals.items():
        signal.signal(number, action)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


BLAMED = {"fail": {"verdict": "exit"}}
EXCUSED = {"fail": {"verdict": "rejoin"}}
LOST = "echo Connection reset by peer; exit 1"


@pytest.mark.parametrize(
    ("handler", "script", "code"),
    [
        (ScriptedRendezvous(BLAMED), "exit 3", 3),
        (ScriptedRendezvous(BLAMED), LOST, 1),
        (ScriptedRendezvous({"fail": ServiceRefused(410, "no running job")}), "exit 4", 4),
        (ScriptedRendezvous(), "kill -KILL $$", 137),
        (ScriptedRendezvous(BLAMED), "kill -ABRT $$", 134),
        (ScriptedRendezvous(on_join=end_soon), "kill -STOP $$", 1),
        (ScriptedRendezvous(on_join=raising(RendezvousClosedError("the job is over"))), "true", 1),
        (ScriptedRendezvous(on_join=raising(OSError("no sockets left"))), "true", 1),
        (ScriptedRendezvous(EXCUSED, raising(RendezvousTimeoutError("no group"), 2)), LOST, 1),
        (ScriptedRendezvous({"finish": OSError("no sockets left")}), "exit 0", 1),
        (ScriptedRendezvous(on_join=get_sigterm), "exit 0", 143),
        (ScriptedRendezvous(), "kill -TERM $PPID; sleep 600", 143),
    ],
    ids=[
        "error of its own", "blamed for a peer's loss", "no verdict", "killed", "aborted", "suspended", "join refused",
        "join impossible", "rejoin refused", "error at the end", "SIGTERM while joining", "SIGTERM while running",
    ],
)  # fmt: skip
def test_a_failure_never_exits_with_0(
    launch: Callable[..., int], handler: ScriptedRendezvous, script: str, code: int
) -> None:
    assert launch(handler, "sh", "-c", script) == code


def test_a_hang_that_this_worker_is_blamed_for_exits_with_1(launch: Callable[..., int]) -> None:
    handler = ScriptedRendezvous(BLAMED)
    assert launch(handler, sys.executable, "-c", REPORTS_ONCE, options=("--hang-timeout", "0.2")) == 1


def test_a_command_that_cannot_be_started_exits_with_127(launch: Callable[..., int]) -> None:
    assert launch(ScriptedRendezvous(BLAMED), "no-such-program") == 127


def test_ranks_that_cannot_be_started_exit_with_1(launch: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticctl_launcher.rank_processes.sys.executable", "/no/python")
    assert launch(ScriptedRendezvous(), "true") == 1


@pytest.mark.parametrize("script", ["exit 0", '[ "$ELASTICCTL_GENERATION" = 2 ] || { echo Broken pipe; exit 1; }'])
def test_success_exits_with_0_also_after_a_restart(launch: Callable[..., int], script: str) -> None:
    assert launch(ScriptedRendezvous({**EXCUSED, "finish": {"state": "done"}}), "sh", "-c", script) == 0


@pytest.mark.parametrize("code", [0, -9, 256])
def test_no_failure_can_have_the_exit_code_of_a_success(code: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 255"):
        WorkerFailure(APPLICATION, "a-0", 1, code)
