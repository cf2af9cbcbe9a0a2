"""A saving process is killed: the resumed state is exact and not older than the last acknowledged commit."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import BASE, DATA, folder_of
from elasticctl_store.storage import Storage, all_keys
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from tests.support import servers
from tests.support.clouds import Cloud
from tests.support.gate import Fault, Seen
from tests.support.train import programs, ranks
from tests.support.train.checkpoints import read_alone
from tests.support.train.states import same
from tests.support.waiting import wait_until

_NUMBERS = itertools.count()
SHORT_S, LONG_S, LONG_EVERY = 0.06, 2.0, 10
"""After a commit a process lives on for up to `SHORT_S`; one of so many longer, or no process would ever clean up."""


@dataclass(frozen=True, slots=True)
class Bed:
    """A URL to save to, the file in which acknowledged steps are noted, and a client to look at what is there."""

    url: str
    acknowledged: Path
    storage: Storage

    @classmethod
    def at(cls, url: str, folder: Path) -> Bed:
        return cls(url, folder / f"acknowledged-{next(_NUMBERS)}", storages.open(url))

    def noted(self) -> list[int]:
        return [int(step) for step in self.acknowledged.read_text().split()] if self.acknowledged.exists() else []

    def check(self) -> int:
        """Look at all commits, then resume as a new run would: whole, to the bit, not too old; returns the step."""
        noted = self.noted()
        for commit in read_commits(self.storage):
            assert same(read_alone(self.storage, commit)[0], programs.state_of(commit.step))
        restored = Checkpointer(self.storage).restore()
        step = restored.commit.step if restored else 0
        assert step >= max(noted, default=0)
        assert restored is None or same(restored.state, programs.state_of(step))
        return step

    def check_swept(self) -> None:
        """One more save leaves nothing but its own data."""
        step = self.check()
        process = ranks.alone(programs.save_to, self.url, str(self.acknowledged), 1, servers.KEYS)
        process.join()
        assert process.exitcode == 0
        assert self.check() == step + 1
        (kept,) = read_commits(self.storage)
        assert {folder_of(key) for key in all_keys(self.storage, DATA)} == {kept.folder}
        assert {folder_of(key) for key in all_keys(self.storage, BASE)} == set(kept.bases)


def soak(bed: Bed, kills: int, seed: int) -> Iterator[int]:
    """Kill a process that saves for ever, so many times, soon after a commit; yields the step found after each."""
    chance = random.Random(seed)
    for _ in range(kills):
        before = len(bed.noted())
        process = ranks.alone(programs.save_to, bed.url, str(bed.acknowledged), 1_000_000, servers.KEYS)
        try:
            wait_until(lambda: not process.is_alive() or len(bed.noted()) > before, 60, every_s=0.001)  # noqa: B023
            time.sleep(chance.random() * (SHORT_S if chance.randrange(LONG_EVERY) else LONG_S))
            assert process.is_alive()
        finally:
            process.kill()
            process.join()
        yield bed.check()


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


@pytest.mark.timeout(900)
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
