"""A saving process is killed: what is resumed is whole, bit-exact and not older than the last acknowledged commit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from elasticctl_train import shares
from elasticctl_train.checkpoint import Checkpointer
from elasticctl_train.commits import DATA, folder_of
from elasticctl_train.journal import read_commits
from elasticctl_train.storage import all_keys
from elasticctl_train.storage.local import LocalStorage
from tests.train import programs, ranks
from tests.train.states import same


def check(root: Path, acknowledged: Path) -> int:
    """Look at all commits, then resume as a new run would; returns the step."""
    noted = acknowledged.read_text().split() if acknowledged.exists() else []
    storage = LocalStorage(root)
    for commit in read_commits(storage):
        assert same(shares.read(storage, commit, rank=0)[0], programs.state_of(commit.step))
    restored = Checkpointer(storage).restore()
    step = restored.commit.step if restored else 0
    assert step >= max((int(number) for number in noted), default=0)
    assert restored is None or same(restored.state, programs.state_of(step))
    return step


def test_a_kill_before_any_change_of_the_disk_loses_nothing(tmp_path: Path) -> None:
    die_at, ended = 0, -signal.SIGKILL
    while ended == -signal.SIGKILL:
        die_at += 1
        root, acknowledged = tmp_path / str(die_at), tmp_path / f"{die_at}.acknowledged"
        process = ranks.alone(programs.save_and_die, str(root), str(acknowledged), die_at)
        process.join()
        ended = process.exitcode
        step = check(root, acknowledged)
        if die_at % 10 == 0:
            again = ranks.alone(programs.save_and_die, str(root), str(acknowledged), 0)
            again.join()
            assert again.exitcode == 0
            assert check(root, acknowledged) == step + 3
            storage = LocalStorage(root)
            kept = {commit.folder for commit in read_commits(storage)}
            assert {folder_of(key) for key in all_keys(storage, DATA)} == kept
            assert len(kept) == 1
    assert ended == 0
    assert die_at > 40


def test_kills_at_random_times_lose_nothing(tmp_path: Path) -> None:
    root, acknowledged = tmp_path / "state", tmp_path / "acknowledged"
    chance, steps = random.Random(0), [0]
    for _ in range(25):
        process = ranks.alone(programs.save_for_ever, str(root), str(acknowledged))
        before = acknowledged.stat().st_size if acknowledged.exists() else 0
        while not (acknowledged.exists() and acknowledged.stat().st_size > before):
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        steps.append(check(root, acknowledged))
    assert steps == sorted(set(steps))
