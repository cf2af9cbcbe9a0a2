"""The launcher's exit code in each case: 0 only for success, and the same code in the termination message."""

from __future__ import annotations

import json
import sys

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from elasticctl_launcher.failure import WorkerFailure
from elasticctl_launcher.rendezvous import GroupFinished, WorkerRemoved
from elasticctl_launcher.service.client import ServiceRefused
from elasticctl_protocol.failures import MAX_MESSAGE_BYTES, FailureVerdict
from tests.support.scripted_rendezvous import Launch, ScriptedRendezvous, end_soon, get_sigterm, raising

REPORTS_ONCE = """
import json, os, socket, time
report = {"kind": "progress", "generation": int(os.environ["ELASTICCTL_GENERATION"]), "rank": 0, "step": 1}
wire = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
wire.sendto(json.dumps(report).encode(), os.environ["ELASTICCTL_AGENT_SOCKET"])
time.sleep(600)
"""


BLAMED = {"fail": {"verdict": "exit"}}
EXCUSED = {"fail": {"verdict": "rejoin"}}
LOST = "echo Connection reset by peer; exit 1"


@pytest.mark.parametrize(
    ("handler", "script", "code"),
    [
        (ScriptedRendezvous(BLAMED), "exit 3", 3),
        (ScriptedRendezvous(BLAMED), LOST, 1),
        (ScriptedRendezvous({"fail": ServiceRefused(410, "no running job")}), "exit 4", 4),
        (ScriptedRendezvous(BLAMED), "kill -KILL $$", 137),
        (ScriptedRendezvous(BLAMED), "kill -ABRT $$", 134),
        (ScriptedRendezvous(on_join=end_soon), "kill -STOP $$", 1),
        (ScriptedRendezvous(on_join=raising(RendezvousClosedError("the job is over"))), "true", 1),
        (ScriptedRendezvous(on_join=raising(OSError("no sockets left"))), "true", 1),
        (ScriptedRendezvous(EXCUSED, raising(RendezvousTimeoutError("no group"), 2)), LOST, 1),
        (ScriptedRendezvous(on_join=raising(WorkerRemoved("no running job"))), "true", 143),
        (ScriptedRendezvous(on_join=get_sigterm), "exit 0", 143),
        (ScriptedRendezvous(), "kill -TERM $PPID; sleep 600", 143),
    ],
    ids=[
        "error of its own", "blamed for a peer's loss", "no verdict", "killed", "aborted", "suspended", "join refused",
        "join impossible", "rejoin refused", "removed", "SIGTERM while joining", "SIGTERM while running",
    ],
)  # fmt: skip
def test_a_failure_never_exits_with_0(launch: Launch, handler: ScriptedRendezvous, script: str, code: int) -> None:
    assert launch(handler, "sh", "-c", script) == code


def test_a_worker_blamed_for_a_hang_exits_with_1(launch: Launch) -> None:
    handler = ScriptedRendezvous(BLAMED)
    assert launch(handler, sys.executable, "-c", REPORTS_ONCE, options=("--hang-timeout", "0.2")) == 1


def test_a_command_that_cannot_be_started_exits_with_127(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(ScriptedRendezvous(BLAMED), "no-such-program") == 127
    assert "cannot start 'no-such-program'" in capfd.readouterr().out


def test_ranks_that_cannot_be_started_exit_with_1(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticctl_launcher.ranks.warm_spares.sys.executable", "/no/python")
    assert launch(ScriptedRendezvous(), "true") == 1


@pytest.mark.parametrize("script", ["exit 0", '[ "$ELASTICCTL_GENERATION" = 2 ] || { echo Broken pipe; exit 1; }'])
def test_success_after_a_restart_exits_with_0(launch: Launch, script: str) -> None:
    assert launch(ScriptedRendezvous({**EXCUSED, "finish": {"state": "done"}}), "sh", "-c", script) == 0


def test_a_launcher_whose_group_has_finished_exits_with_0(launch: Launch) -> None:
    handler = ScriptedRendezvous(EXCUSED, raising(GroupFinished("all have succeeded"), 2))
    assert launch(handler, "sh", "-c", "exit 1") == 0


def test_the_termination_message_fits_kubernetes_limit() -> None:
    failure = WorkerFailure(
        FailureVerdict.APPLICATION, "a-0", 1, 1, error="\U0001f600" * 500, last_lines=("\U0001f600" * 400,) * 20
    )
    message = failure.to_message()
    assert len(message) <= MAX_MESSAGE_BYTES
    assert failure.error.startswith(json.loads(message)["error"])


@pytest.mark.parametrize("code", [0, -9, 256])
def test_a_failure_cannot_have_exit_code_0(code: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 255"):
        WorkerFailure(FailureVerdict.APPLICATION, "a-0", 1, code)
