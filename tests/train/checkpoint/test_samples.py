"""Checkpoints of earlier versions are read exactly, and verify accepts them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from elasticctl_store.checkpoints import verify
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from tests.support.train.checkpoints import read_alone
from tests.support.train.samples import NAMES, SAMPLES, described, expected


@pytest.mark.parametrize("name", NAMES)
def test_sample_checkpoints_are_read_exactly(name: str) -> None:
    storage = LocalStorage(SAMPLES / name)
    read = {}
    for commit in read_commits(storage):
        for rank in range(len(commit.shares)):
            state, local = read_alone(storage, commit, rank)
            found = dict(described({"state": state, "local": local}))
            read[f"{name}, step {commit.step}, rank {rank}"] = found
    assert read == {key: value for key, value in expected().items() if key.startswith(f"{name},")}


@pytest.mark.parametrize("name", NAMES)
def test_verify_accepts_sample_checkpoints(name: str, tmp_path: Path) -> None:
    storage = LocalStorage(SAMPLES / name)
    found = list(verify.findings(storage))
    assert found
    for finding in found:
        assert finding.commit is not None
        assert not finding.damage
        verify.verify(storage, finding.commit, lambda count: None)
        assert verify.pull(storage, finding.commit, "model", tmp_path / "model.safetensors", lambda count: None) > 1


@pytest.mark.parametrize(("name", "step"), [("one-rank", 3), ("two-ranks", 7), ("grid", 1), ("tables", 6)])
def test_a_run_resumes_from_sample_checkpoints(name: str, step: int, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / name, tmp_path, dirs_exist_ok=True)
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpointer(storage)
    restored = checkpoints.restore()
    assert restored is not None
    assert restored.commit.step == step
    checkpoints.save(restored.state, Label(step + 1))
    assert checkpoints.settle()
    assert [commit.step for commit in read_commits(storage)][:2] == [step + 1, step]
