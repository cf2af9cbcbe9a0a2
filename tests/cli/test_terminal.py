"""On a real terminal: colours, hints, redrawing, questions."""

from __future__ import annotations

from pathlib import Path

import pexpect
import pytest

from elasticctl.cluster.local.client import LocalCluster
from tests.support.cli import Spawn
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until


@pytest.fixture
def waiting(local_cluster: LocalCluster, tmp_path: Path) -> Path:
    """A running job `digits` of two workers; touch the returned file to end it."""
    gate = tmp_path / "gate"
    script = f"echo begun; until [ -e {gate} ]; do sleep 0.05; done"
    local_cluster.create_job(shell_job("digits", script, 2))
    wait_until(lambda: local_cluster.get_job("default", "digits").get("status", {}).get("phase") == "Running")
    return gate


def test_a_list_is_aligned_and_says_what_to_type_next(waiting: Path, terminal: Spawn) -> None:
    child = terminal("list", width=80)
    child.expect("NAME.*PHASE.*WORKERS.*AGE")
    child.expect("digits .*Running.*2/2")
    child.expect("Next: details: elasticctl status digits")
    child.expect(pexpect.EOF)
    assert all(len(line) < 120 for line in (child.before or "").splitlines())


def test_watching_redraws_until_the_end(waiting: Path, terminal: Spawn) -> None:
    child = terminal("status", "-w", "digits")
    child.expect("Running")
    waiting.touch()
    child.expect("Succeeded")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


def test_ctrl_c_ends_watching_without_a_word(waiting: Path, terminal: Spawn) -> None:
    child = terminal("list", "-w")
    child.expect("digits")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 130
    assert "Traceback" not in (child.before or "")


def test_each_worker_has_a_colour(waiting: Path, terminal: Spawn) -> None:
    waiting.touch()
    child = terminal("logs", "-f", "digits")
    child.expect_exact("\x1b[36mworker-")
    child.expect_exact("\x1b[33mworker-")
    child.expect(pexpect.EOF)


def test_no_color_is_respected(waiting: Path, terminal: Spawn) -> None:
    waiting.touch()
    for verb in (["logs", "-f", "digits"], ["list"]):
        child = terminal(*verb, NO_COLOR="1")
        child.expect(pexpect.EOF)
        text = child.before or ""
        assert "worker-0 | begun" in text or "digits" in text
        assert not any(f"\x1b[{code}" in text for code in ("3", "9"))


def test_deleting_a_running_job_asks_first(waiting: Path, terminal: Spawn, local_cluster: LocalCluster) -> None:
    child = terminal("delete", "digits")
    child.expect_exact("digits is still Running. Delete it? [y/N]:")
    child.sendline("n")
    child.expect("digits: not deleted")
    child.expect(pexpect.EOF)
    child = terminal("delete", "digits")
    child.expect_exact("[y/N]:")
    child.sendline("y")
    child.expect("digits: deleted")
    child.expect(pexpect.EOF)
    wait_until(lambda: not local_cluster.list_jobs("default"))


def test_following_is_left_with_ctrl_c(waiting: Path, terminal: Spawn, local_cluster: LocalCluster) -> None:
    child = terminal("logs", "-f", "digits")
    child.expect("begun")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 130
    assert local_cluster.get_job("default", "digits")["status"]["active"] == 2
