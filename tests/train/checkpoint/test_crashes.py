"""A saving process is killed: the resumed state is exact and not older than the last acknowledged commit."""

from __future__ import annotations

import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.clouds import Cloud
from tests.support.crash_soak import Bed, soak
from tests.support.gate import Fault, Seen
from tests.support.train import programs, ranks


@pytest.mark.timeout(900)  # a process for each change
def test_a_kill_before_any_change_of_the_disk_loses_nothing(tmp_path: Path) -> None:
    die_at, ended = 0, -signal.SIGKILL
    while ended == -signal.SIGKILL:
        die_at += 1
        bed = Bed.at(str(tmp_path / str(die_at)), tmp_path)
        process = ranks.alone(programs.save_and_die, str(tmp_path / str(die_at)), str(bed.acknowledged), die_at)
        process.join()
        ended = process.exitcode
        bed.check()
        if die_at % 10 == 0:
            bed.check_swept()
    assert ended == 0
    assert die_at > 25


def test_a_kill_before_any_request_loses_nothing(cloud: Cloud, tmp_path: Path) -> None:
    running: list[BaseProcess] = []
    turn = 0

    def plan(seen: Seen) -> Fault | None:
        return Fault(call=running[0].kill, lose="before") if seen.number >= turn else None

    die_at = -1 if cloud.gate.scheme == "s3" else 0  # both get the same requests: each of them matters on one
    ended: int | None = -signal.SIGKILL
    while ended == -signal.SIGKILL:
        die_at += 2
        bed = Bed.at(cloud.gate.url(f"crashes/{tmp_path.name}/{die_at}"), tmp_path)
        turn = len(cloud.gate.seen) + die_at
        cloud.gate.faults = plan
        running[:] = [ranks.alone(programs.save_to, bed.url, str(bed.acknowledged), 2, servers.KEYS)]
        running[0].join()
        ended = running[0].exitcode
        cloud.gate.faults = lambda seen: None
        bed.check()
        if die_at % 10 in (0, 1):
            bed.check_swept()
    assert ended == 0
    assert die_at > 30


@pytest.mark.seeds(1)
def test_kills_at_random_times_lose_nothing(tmp_path: Path, seed: int) -> None:
    steps = list(soak(Bed.at(str(tmp_path / "state"), tmp_path), kills=5, seed=seed))
    assert steps == sorted(set(steps))


@pytest.mark.seeds(1)
def test_kills_at_random_times_lose_nothing_on_a_cloud(cloud: Cloud, tmp_path: Path, seed: int) -> None:
    steps = list(soak(Bed(cloud.url, tmp_path / "acknowledged", cloud.open()), kills=2, seed=seed))
    assert steps == sorted(set(steps))
