"""A job that fails never ends in exit code 0: each verb that waits for a job or follows it, in a process of its own."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.objects import at
from elasticctl.cli.__main__ import run as run_process
from elasticctl.cluster.local.capacity import LocalSharing
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.submit import failover
from tests.support.cli import Run, Start
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

FAILS = "echo begun; while [ ! -e {gate} ]; do sleep 0.05; done; echo no such data >&2; exit 7"
FOLLOWERS = (("logs", "-f"), ("status", "-w"), ("events", "-w"))


def test_a_verb_that_follows_a_job_fails_with_it(
    start: Start, run: Run, local_cluster: LocalCluster, tmp_path: Path
) -> None:
    """While the job runs, and when it comes too late."""
    gate = tmp_path / "gate"
    local_cluster.set_sharing(LocalSharing(on=True, cpu_slots=1))  # a second worker never gets a place
    local_cluster.create_job(shell_job("failing", FAILS.format(gate=gate), minReplicas=1, backoffLimit=0))
    wait_until(lambda: local_cluster.get_job("default", "failing").get("status", {}).get("active") == 1)
    waiting = [start("wait", "failing"), start("scale", "failing", "--to", "2", "--wait")]
    following = [start(*words, "failing") for words in FOLLOWERS]
    begun = [process.stdout.readline() for process in following if process.stdout is not None]
    assert [line.split("\t")[0] for line in begun] == ["worker-0 | begun\n", "NAME", "AT"]
    worker = ("spec", "replicaSpecs", "Worker", "replicas")
    wait_until(lambda: at(local_cluster.get_job("default", "failing"), *worker) == 2)
    gate.touch()
    ended = [(*process.communicate(timeout=240), process.returncode) for process in (*waiting, *following)]
    assert [code for _, _, code in ended] == [1] * 5, ended
    logs, status, events = (out.splitlines() for out, _, _ in ended[2:])
    assert logs == ["worker-0 | no such data"]
    assert status[-1].split("\t")[:2] == ["failing", "Failed"]
    assert "\x1b" not in "".join(status)
    assert len(set(events)) == len(events)
    for words in (("wait",), ("wait", "--for", "running"), *FOLLOWERS):
        assert run(*words, "failing").code == 1
    assert run("logs", "failing").code == 0  # which only prints what there is


@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_submit_and_rerun_fail_with_their_job(run: Run, local_cluster: LocalCluster, tmp_path: Path) -> None:
    """Those that wait for it, and those that are attached to it."""
    script = tmp_path / "bad.py"
    script.write_text("raise SystemExit(7)\n")
    words = ("--workers", "1", "--backoff-limit", "0")
    for done, name in (
        (run("submit", str(script), *words, "--wait"), "bad"),
        (run("rerun", "bad"), "bad-2"),
        (run("submit", str(script), *words, "--name", "worse"), "worse"),
        (run("rerun", "bad", "--wait"), "bad-3"),
    ):
        assert done.code == 1, done
        assert f"{name} failed" in done.err


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
    submitted = run("submit", str(script), "--detach", "--capacity-timeout", "600s", "--backoff-limit", "0")
    assert submitted.code == 1
    assert submitted.out == "bad\n"


@pytest.mark.parametrize("words", [("--help",), ("template", "show")], ids=" ".join)
def test_when_the_reader_has_gone_it_ends_silently(words: tuple[str, ...], private_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "elasticctl.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (141, b"")


def test_ctrl_c_before_anything_is_imported_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, *args: Any) -> Any:
        if name == "elasticctl.cli.main":
            raise KeyboardInterrupt
        return real(name, *args)

    real = builtins.__import__
    monkeypatch.delitem(sys.modules, "elasticctl.cli.main")
    monkeypatch.setattr("builtins.__import__", interrupted)
    assert run_process() == 130
