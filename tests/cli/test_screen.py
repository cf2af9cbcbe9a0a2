"""What a person sees: a watch that stays in its place, at any size, and questions that can be answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl.cluster.local.client import LocalCluster
from tests.support.cluster_contract import phase, running
from tests.support.jobs import shell_job
from tests.support.terminal import Terminal
from tests.support.waiting import wait_until

Open = Callable[..., Terminal]
QUESTION = "Detach and let kept keep running, or cancel it? [D]etach, [c]ancel:"


@pytest.fixture
def terminal() -> Iterator[Open]:
    """`terminal("list", "-w", columns=80)`."""
    opened: list[Terminal] = []

    def begin(*args: str, **size: Any) -> Terminal:
        opened.append(Terminal(*args, **size))
        return opened[-1]

    yield begin
    for each in opened:
        each.child.close(force=True)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Touch it, and jobs end."""
    return tmp_path / "gate"


@pytest.fixture
def begun(local_cluster: LocalCluster, gate: Path) -> Callable[..., str]:
    """`begun(name, workers)`: a job that runs until the gate is there."""

    def call(name: str, workers: int = 1) -> str:
        script = f"echo begun; until [ -e {gate} ]; do sleep 0.05; done"
        local_cluster.create_job(shell_job(name, script, workers))
        wait_until(lambda: len(running(local_cluster, name)) == workers and phase(local_cluster, name) == "Running")
        return name

    return call


@pytest.fixture
def manifest(tmp_path: Path, gate: Path) -> str:
    """The path of a manifest to submit, of a job `kept` that runs until the gate is there."""
    path = tmp_path / "kept.json"
    script = f"echo begun; until [ -e {gate} ]; do sleep 0.05; done"
    path.write_text(json.dumps(shell_job("kept", script)))
    return str(path)


def test_a_watch_stays_in_its_place_and_leaves_the_last_state_behind(
    begun: Callable[..., str], gate: Path, terminal: Open
) -> None:
    begun("digits", 2)
    seen = terminal("status", "-w", "digits", columns=80, lines=24)
    lines = seen.shows("Running  for", "its output: elasticctl logs -f digits")
    assert lines[0].split() == ["Name", "digits", "namespace", "default"]
    assert any(line.endswith("2 of 2 running (2+), CPU") for line in lines)
    assert seen.on_other_screen
    before = next(line for line in lines if "Running  for" in line)
    seen.until(lambda now: not any(line == before for line in now))  # it goes on
    gate.touch()
    assert seen.end() == 0
    left = seen.screen()
    assert not seen.on_other_screen
    assert any("Succeeded" in line for line in left)
    assert left[0].startswith("Name ")
    assert seen.scrolled == 0


def test_a_resize_is_followed(begun: Callable[..., str], terminal: Open) -> None:
    begun("digits", 2)
    seen = terminal("list", "-w", columns=120, lines=24)
    seen.shows("AGE", "Next: details: elasticctl status digits")
    seen.resize(40, 12)
    lines = seen.until(lambda now: now[0].split() == ["NAME", "PHASE", "WORKERS", "RESTARTS"])
    assert lines[1].split() == ["digits", "Running", "2/2", "(2+)", "0"]
    assert [line for line in lines[2:] if line] == ["Next: details: elasticctl status digits"]
    seen.resize(200, 50)
    lines = seen.until(lambda now: now[0].split() == ["NAME", "PHASE", "WORKERS", "RESTARTS", "AGE"])
    assert [line for line in lines[2:] if line] == ["Next: details: elasticctl status digits"]
    seen.reset_scrolled()
    drawn = len(seen.raw)
    seen.until(lambda _: len(seen.raw) > drawn)
    assert seen.scrolled == 0
    seen.interrupt()
    assert seen.end() == 130
    assert seen.screen()[1].startswith("digits")


def test_more_jobs_than_lines(local_cluster: LocalCluster, terminal: Open) -> None:
    for number in range(12):
        local_cluster.create_job(shell_job(f"job-{number:02}", "true", suspend=True))
    seen = terminal("list", "-w", columns=80, lines=10)
    lines = seen.shows("6 more jobs; Next: details: elasticctl status job-11")
    assert [line.split()[0] for line in lines[1:7]] == [f"job-{number:02}" for number in range(6, 12)]
    assert seen.scrolled == 0


def test_an_empty_list_says_how_to_begin_and_fills_itself(begun: Callable[..., str], terminal: Open) -> None:
    seen = terminal("list", "-w", columns=120)
    seen.shows("no jobs in namespace default of context local. Next: elasticctl submit train.py")
    begun("first")
    seen.shows("first  Running")


def test_ctrl_c_asks_until_it_is_answered(manifest: str, terminal: Open, local_cluster: LocalCluster) -> None:
    seen = terminal("submit", "-f", manifest)
    seen.shows("worker-0 | begun")
    seen.interrupt()
    for times, answer in ((1, "what"), (2, "c")):
        seen.until(lambda lines, times=times: sum(QUESTION in line for line in lines) == times)
        seen.type(answer)
    seen.shows("kept was cancelled after")
    assert seen.end() == 4
    assert phase(local_cluster, "kept") == "Cancelled"


def test_a_second_ctrl_c_detaches(manifest: str, terminal: Open, local_cluster: LocalCluster) -> None:
    seen = terminal("submit", "-f", manifest)
    seen.shows("worker-0 | begun")
    seen.interrupt()
    seen.shows(QUESTION)
    seen.interrupt()
    seen.shows("detached: kept keeps running.")
    assert seen.end() == 130
    assert phase(local_cluster, "kept") == "Running"


def test_pruning_shows_the_list_and_asks(
    begun: Callable[..., str], gate: Path, terminal: Open, local_cluster: LocalCluster
) -> None:
    gate.touch()
    local_cluster.create_job(shell_job("old", "true"))
    wait_until(lambda: phase(local_cluster, "old") == "Succeeded")
    for answer, said, left in (("", "nothing deleted", 1), ("y", "1 job deleted", 0)):
        seen = terminal("prune", "--older-than", "0s", columns=100)
        lines = seen.shows("Delete this job and its logs? [y/N]:")
        assert lines[1].split()[:2] == ["old", "Succeeded"]
        seen.type(answer)
        seen.shows(said)
        assert seen.end() == 0
        wait_until(lambda left=left: len(local_cluster.list_jobs("default")) == left)
