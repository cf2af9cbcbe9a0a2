"""How the ends of ranks are reported to the service, and the effect of its answers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticctl_launcher.service.client import ServiceAway
from elasticctl_protocol.requests import Doing
from tests.support.jobs import LIGHT
from tests.support.scripted_rendezvous import Launch, ScriptedRendezvous, get_sigterm
from tests.support.waiting import wait_until

EXIT, REJOIN, PENDING = {"verdict": "exit"}, {"verdict": "rejoin"}, {"verdict": "pending"}
AWAY = ServiceAway("not there")
DONE = {"state": "done"}
FIRST = '[ "$ELASTICCTL_GENERATION" = 1 ]'


def python(*lines: str) -> tuple[str, str, str]:
    return sys.executable, "-c", "\n".join(lines)


def once(condition: Callable[[], object], act: Callable[[], object]) -> None:
    threading.Thread(target=lambda: (wait_until(condition), act()), daemon=True).start()


def over_once_up(handler: ScriptedRendezvous) -> None:
    """The first generation is over once its rank has created the file `up`."""
    if handler.generation == 1:
        once(Path("up").exists, lambda: handler.end_generation(1))


def test_all_evidence_is_reported(launch: Launch) -> None:
    handler = ScriptedRendezvous({"fail": EXIT})
    assert launch(handler, *python("import sys", "print('a', flush=True)", "raise ValueError('no')")) == 1
    (body,) = handler.bodies("fail")
    assert (body["uid"], body["generation"]) == ("uid-a-0", 1)
    assert (body["of_peers"], body["permanent"], body["stopping"]) == (False, False, False)
    assert body["ended_s_ago"] >= 0
    lines = body["failure"].pop("last_lines")
    assert lines[0] == "a"
    assert lines[-1] == "ValueError: no"
    assert body["failure"] == {
        "rank": 0, "exit_code": 1, "signal": "", "error": "ValueError: no", "verdict": "application",
    }  # fmt: skip


GETS_SIGTERM = """
import os, signal, sys, time

def has_ended(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ready, handled = os.pipe()
child = os.fork()
if child == 0:
    os.write(handled, b".")
    time.sleep(60)
    os._exit(1)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)  # not a signal to the rank itself
os.waitpid(child, 0)
if os.environ["LOCAL_RANK"] == os.environ["SIGNALED"]:
    with open("terminated", "w") as file:
        file.write(str(os.getpid()))
    os.rename("terminated", "pid")
    os.kill(os.getpid(), signal.SIGTERM)
elif "PEER" in os.environ:
    while not os.path.exists("pid") or not has_ended(int(open("pid").read())):
        time.sleep(0.1)
    time.sleep(0.5)
    raise RuntimeError("Connection closed by peer")
"""


@pytest.mark.parametrize("terminated", [True, False])
def test_exit_code_0_after_a_foreign_sigterm_is_not_success(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminated: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIGNALED", "0" if terminated else "none")
    (tmp_path / "train.py").write_text(GETS_SIGTERM)
    handler = ScriptedRendezvous({"finish": DONE})
    assert launch(handler, sys.executable, str(tmp_path / "train.py"), options=LIGHT) == 0
    (body,) = handler.bodies("finish")
    assert body.get("terminated", False) is terminated


def test_a_rank_that_got_a_foreign_sigterm_explains_the_error_of_its_peer(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIGNALED", "1")
    monkeypatch.setenv("PEER", "yes")
    (tmp_path / "train.py").write_text(GETS_SIGTERM)
    handler = ScriptedRendezvous({"fail": EXIT})
    options = (*LIGHT, "--nproc-per-node", "2")
    assert launch(handler, sys.executable, str(tmp_path / "train.py"), options=options) == 143
    (body,) = handler.bodies("fail")
    assert (body["failure"]["rank"], body["failure"]["signal"], body["of_peers"]) == (1, "SIGTERM", False)
    assert body["failure"]["error"] == "it got SIGTERM, not from its launcher, and ended with exit code 0"


def test_a_native_crash_is_reported_with_the_line_of_the_script(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import ctypes\n\ndef step():\n    ctypes.string_at(0)\n\nstep()\n")
    handler = ScriptedRendezvous({"fail": EXIT})
    assert launch(handler, sys.executable, str(script)) == 139
    (body,) = handler.bodies("fail")
    failure = body["failure"]
    assert (failure["signal"], failure["error"]) == ("SIGSEGV", "Fatal Python error: Segmentation fault")
    assert f'  File "{script}", line 4 in step' in failure["last_lines"]


def test_arguments_that_the_script_refuses_are_a_permanent_failure(launch: Launch) -> None:
    handler = ScriptedRendezvous({"fail": EXIT})
    words = python("import argparse", "argparse.ArgumentParser('train.py').parse_args(['--epoch', '3'])")
    assert launch(handler, *words) == 2
    (body,) = handler.bodies("fail")
    assert body["permanent"]
    assert body["failure"]["error"] == "train.py: error: unrecognized arguments: --epoch 3"


def test_a_killed_rank_is_reported_and_restarts_in_place(launch: Launch) -> None:
    handler = ScriptedRendezvous({"fail": REJOIN, "finish": DONE})
    assert launch(handler, "sh", "-c", f"{FIRST} && kill -KILL $$; exit 0") == 0
    (body,) = handler.bodies("fail")
    assert (body["failure"]["exit_code"], body["failure"]["signal"]) == (137, "SIGKILL")
    assert (handler.generation, handler.bodies("leave")) == (2, [])


@pytest.mark.parametrize("wait", [[PENDING, PENDING], [AWAY, AWAY, AWAY]], ids=["pending", "away"])
def test_the_launcher_waits_for_the_verdict(launch: Launch, wait: list[object]) -> None:
    handler = ScriptedRendezvous({"fail": [*wait, REJOIN], "finish": DONE})  # type: ignore[list-item]
    assert launch(handler, "sh", "-c", f"{FIRST} && exit 3; exit 0") == 0
    bodies = handler.bodies("fail")
    assert len(bodies) == len(wait) + 1
    ages = [body.pop("ended_s_ago") for body in bodies]
    assert ages == sorted(set(ages)), "the reported age grows"
    assert all(body == bodies[0] for body in bodies)


@pytest.mark.parametrize("verb", ["fail", "finish"])
def test_sigterm_ends_the_wait_for_the_service(launch: Launch, verb: str) -> None:
    silent = threading.Event()

    def hang(body: object) -> dict[str, object]:
        get_sigterm(handler)
        silent.wait(60)
        return {}

    handler = ScriptedRendezvous({verb: hang})
    code = launch(handler, "sh", "-c", "exit 3" if verb == "fail" else "exit 0")
    silent.set()
    assert code == 143
    assert handler.bodies("leave")


def test_ranks_restart_if_a_peer_is_lost_before_its_ranks_have_ended(launch: Launch) -> None:
    handler = ScriptedRendezvous({"finish": [{"state": "waiting"}, {"state": "rejoin"}, DONE]})
    assert launch(handler, "true") == 0
    assert handler.generation == 2
    assert [body["generation"] for body in handler.bodies("finish")] == [1, 1, 2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks run in the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("here")
def test_a_failure_is_reported_although_the_generation_is_over(launch: Launch) -> None:
    """The rank fails by itself while it is being stopped: its `finally` ends after the generation."""
    lines = (
        "import os, signal, sys, time",
        "terminated = []",
        "signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))",
        "if os.environ['ELASTICCTL_GENERATION'] == '1':",
        "    try:",
        "        raise ValueError('step 5')",
        "    finally:",
        "        open('up', 'w').close()",
        "        while not terminated: time.sleep(0.02)",
    )
    handler = ScriptedRendezvous({"fail": REJOIN, "finish": DONE}, over_once_up)
    assert launch(handler, *python(*lines), options=("--stop-grace", "600")) == 0
    (body,) = handler.bodies("fail")
    assert (body["generation"], body["stopping"], body["failure"]["error"]) == (1, True, "ValueError: step 5")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "line",
    ["signal.signal(signal.SIGTERM, lambda *_: os._exit(7))", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", ""],
    ids=["handles it", "ignores it", "dies of it"],
)
def test_an_exit_after_our_own_signal_is_not_a_failure(launch: Launch, line: str) -> None:
    last = "time.sleep(600 if os.environ['ELASTICCTL_GENERATION'] == '1' else 0)"
    handler = ScriptedRendezvous({"finish": DONE}, over_once_up)
    assert launch(handler, *python("import os, signal, time", line, "open('up', 'w').close()", last)) == 0
    assert handler.bodies("fail") == []


@pytest.mark.usefixtures("here")
def test_a_better_explanation_from_another_rank_is_reported_too(launch: Launch) -> None:
    """Rank 0 loses its connection because rank 1 fails, which ends later."""
    lines = (
        "import os, signal, time",
        "signal.signal(signal.SIGTERM, lambda *_: None)",
        "if os.environ['RANK'] == '0':",
        "    while not os.path.exists('up'): time.sleep(0.02)",
        "    raise RuntimeError('Connection closed by peer')",
        "try:",
        "    raise ValueError('mine')",
        "finally:",
        "    open('up', 'w').close()",
        "    while not os.path.exists('terminated'): time.sleep(0.02)",
    )

    def judge(body: Mapping[str, Any]) -> dict[str, object]:
        Path("terminated").touch()
        return PENDING if body["of_peers"] else EXIT  # type: ignore[return-value]

    handler = ScriptedRendezvous({"fail": judge})
    handler.identity = type(handler.identity)("uid-a-0", "a-0", "127.0.0.1", 2)
    assert launch(handler, *python(*lines), options=("--nproc-per-node", "2", "--stop-grace", "600")) == 1
    terminated = [(body["of_peers"], body["failure"]["rank"]) for body in handler.bodies("fail")]
    assert terminated[0] == (True, 0)
    assert terminated[-1] == (False, 1)


def test_the_launcher_reports_what_it_does(launch: Launch) -> None:
    handler = ScriptedRendezvous({"fail": REJOIN, "finish": DONE})
    assert launch(handler, "sh", "-c", f"{FIRST} && exit 3; exit 0") == 0
    assert [doing for n, doing in enumerate(handler.said) if handler.said[n - 1 : n] != [doing]] == [
        Doing.RUNNING, Doing.STOPPING, Doing.RUNNING, Doing.FINISHING,
    ]  # fmt: skip


@pytest.mark.usefixtures("here")
def test_sigterm_while_ranks_are_stopped_is_handled_afterwards(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_GRACE_S", "2")

    def stop(handler: ScriptedRendezvous) -> None:
        over_once_up(handler)
        once(Path("terminated").exists, lambda: get_sigterm(handler))

    lines = (
        "import signal, time",
        "signal.signal(signal.SIGTERM, lambda *_: open('terminated', 'w').close())",
        "open('up', 'w').close()",
        "time.sleep(600)",
    )
    handler = ScriptedRendezvous(on_join=stop)
    assert launch(handler, *python(*lines), options=("--stop-grace", "1.5")) == 143
    assert handler.generation == 1


def test_ranks_of_a_leaving_worker_get_its_whole_grace_period(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for them, so a script that saves on SIGTERM has more time than before a restart."""
    monkeypatch.setenv("ELASTICCTL_GRACE_S", "600")
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    lines = (
        "import pathlib, signal, sys, time",
        "def save(*_):",
        "    time.sleep(1)",
        f"    pathlib.Path({str(saved)!r}).touch()",
        "    sys.exit()",
        "signal.signal(signal.SIGTERM, save)",
        f"pathlib.Path({str(ready)!r}).touch()",
        "time.sleep(60)",
    )

    handler = ScriptedRendezvous(on_join=lambda handler: once(ready.exists, lambda: get_sigterm(handler)))
    assert launch(handler, *python(*lines), options=("--stop-grace", "0.1")) == 143
    assert saved.exists()
