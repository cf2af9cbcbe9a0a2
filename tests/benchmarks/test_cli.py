"""The command line's benchmark: its reckoning, and a short run of the whole of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.cli import Followed, Timed, reckon, tables
from benchmarks.commandline import installed_environment
from benchmarks.commands.places import Talk

ROOT = Path(__file__).parents[2]
TALK = Talk(workers=2, lines=3, every_s=0.1, settle_s=0.0)
ALL = [f"worker-{worker} | line {number}" for number in range(3) for worker in range(2)]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (ALL, (0, 0, 0)),
        ([*reversed(ALL)], (0, 0, 4)),
        (ALL[:-1], (1, 0, 0)),
        ([*ALL, ALL[-1]], (0, 1, 0)),
        ([*ALL, ALL[0]], (0, 1, 1)),
        ([], (6, 0, 0)),
        ([line.replace("worker-1 |", "[pod/talks-worker-1/elasticjob-worker]") for line in ALL], (0, 0, 0)),
    ],
)
def test_lines_are_counted_by_worker(said: list[str], found: tuple[int, int, int]) -> None:
    assert reckon("\n".join(said).encode(), TALK) == found


def test_twice_the_rivals_time_is_the_aim() -> None:
    timed = [
        Timed("fake", 1, "elasticctl list", 90.0, 80.0),
        Timed("fake", 1, "kubectl get", 50.0, 40.0),
        Timed("fake", 1000, "elasticctl list", 900.0, 700.0),
        Timed("local", 1, "elasticctl status job-0000", 90.0, 80.0),
    ]
    times, logs = tables(timed, [Followed("fake", "elasticctl logs -f", 64, 6400, 1999.6, 0, 0, 0, 0.314)])
    assert list(times.columns[-1].cells) == ["100", "", "1000", ""]
    assert [next(iter(column.cells)) for column in logs.columns][-5:] == ["2,000", "0", "0", "0", "0.31"]
    Console(file=sys.stderr, width=120).print(times, logs)


def test_the_command_line_is_timed_as_it_is_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("ELASTICCTL_CONTEXT", "prod")
    assert "PYTHONDONTWRITEBYTECODE" not in installed_environment()
    assert installed_environment()["ELASTICCTL_CONTEXT"] == "prod"


@pytest.mark.parametrize("place", ["fake", "local"])
def test_a_short_run(place: str, tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "benchmarks/cli.py"), "--place", place, "--runs", "1", "--jobs", "3"]
    argv += ["--workers", "3", "--lines-per-s", "60", "--seconds", "1", "--settle-s", "3"]
    done = subprocess.run(
        [*argv, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    (logs,) = found["logs"]
    assert (logs["lines"], logs["lost"], logs["doubled"], logs["disordered"]) == (60, 0, 0, 0)
    commands = {item["command"] for item in found["commands"]}
    assert {"elasticctl --help", "elasticctl list", "elasticctl status job-0000"} <= commands
    assert {item["jobs"] for item in found["commands"]} == {1, 3}
    assert "Commands" in done.stdout
