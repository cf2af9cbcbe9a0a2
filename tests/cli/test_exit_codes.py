"""A job that fails never ends in exit code 0: each verb that waits for a job or follows it, in a process of its own."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticctl.cli.__main__ import run as run_process
from elasticctl.cli.submit import failover
from elasticctl.cluster.local.client import LocalCluster
from tests.support.cli import Run
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

Start = Callable[..., subprocess.Popen[str]]

FAILS = "while [ ! -e {gate} ]; do sleep 0.05; done; echo no such data >&2; exit 7"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file: the job fails once it is there."""
    return tmp_path / "gate"


@pytest.fixture
def job(local_cluster: LocalCluster, gate: Path) -> str:
    """A job that runs until it fails, for good."""
    local_cluster.create_job(shell_job("doomed", FAILS.format(gate=gate), backoffLimit=0))
    wait_until(lambda: local_cluster.get_job("default", "doomed").get("status", {}).get("active") == 1)
    return "doomed"


@pytest.mark.parametrize(
    "words",
    [
        ("wait", "doomed"),
        ("logs", "-f", "doomed"),
        ("status", "-w", "doomed"),
        ("events", "-w", "doomed"),
    ],
    ids=" ".join,
)
def test_a_verb_that_follows_a_job_fails_with_it(words: tuple[str, ...], start: Start, job: str, gate: Path) -> None:
    follower = start(*words)
    with pytest.raises(subprocess.TimeoutExpired):
        follower.wait(timeout=1.5)  # it does follow
    gate.touch()
    out, err = follower.communicate(timeout=240)
    assert follower.returncode == 1, (out, err)


def test_scale_fails_with_the_job_that_it_waits_for(
    start: Start, job: str, gate: Path, local_cluster: LocalCluster
) -> None:
    scaling = start("scale", job, "--to", "20", "--wait")
    workers = local_cluster.get_job
    wait_until(lambda: workers("default", job)["spec"]["replicaSpecs"]["Worker"]["replicas"] == 20)
    gate.touch()  # before all of them run
    out, err = scaling.communicate(timeout=240)
    assert scaling.returncode == 1, (out, err)


@pytest.mark.parametrize("words", [("wait",), ("logs", "-f"), ("status", "-w"), ("events", "-w")], ids=" ".join)
def test_nor_does_one_that_comes_too_late(
    words: tuple[str, ...], run: Run, job: str, gate: Path, local_cluster: LocalCluster
) -> None:
    gate.touch()
    wait_until(lambda: local_cluster.get_job("default", job)["status"]["phase"] == "Failed")
    assert run(*words, job).code == 1
    assert run("wait", job, "--for", "running").code == 1
    assert run("logs", job).code == 0  # which only prints what there is


@pytest.mark.usefixtures("light_spares", "forked_workers")
@pytest.mark.parametrize("words", [("--wait",), ()], ids=["--wait", "attached"])
def test_submit_and_rerun_fail_with_their_job(
    words: tuple[str, ...], start: Start, local_cluster: LocalCluster, tmp_path: Path, gate: Path
) -> None:
    assert local_cluster.list_jobs(None) == []  # which starts the supervisor
    gate.touch()
    script = tmp_path / "bad.py"
    script.write_text("raise SystemExit(7)\n")
    submitted = start("submit", str(script), "--workers", "1", "--backoff-limit", "0", *words)
    out, err = submitted.communicate(timeout=100)
    assert submitted.returncode == 1, (out, err)
    assert "bad failed" in err
    again = start("rerun", "bad", *words)
    out, err = again.communicate(timeout=100)
    assert again.returncode == 1, (out, err)
    assert "bad-2 failed" in err


@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_a_search_for_capacity_fails_with_a_job_that_fails_meanwhile(
    run: Run, local_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_place = failover.Search.first

    def find_place_until_failed(*args: Any) -> Any:
        found = find_place(*args)
        wait_until(lambda: local_cluster.get_job("default", "bad")["status"].get("phase") == "Failed")
        return found

    monkeypatch.setattr(failover.Search, "first", find_place_until_failed)
    script = tmp_path / "bad.py"
    script.write_text("raise SystemExit(7)\n")
    submitted = run("submit", str(script), "--detach", "--capacity-timeout", "60s", "--backoff-limit", "0")
    assert submitted.code == 1
    assert submitted.out == "bad\n"


@pytest.mark.parametrize("words", [("--help",), ("version",), ("template", "show")], ids=" ".join)
def test_when_nobody_reads_any_more_it_ends_without_a_word(words: tuple[str, ...], private_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "elasticctl.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), err) == (141, b"")


def test_ctrl_c_before_anything_is_imported_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, *args: Any) -> Any:
        if name == "elasticctl.cli.main":
            raise KeyboardInterrupt
        return real(name, *args)

    real = builtins.__import__
    monkeypatch.delitem(sys.modules, "elasticctl.cli.main")
    monkeypatch.setattr("builtins.__import__", interrupted)
    assert run_process() == 130
