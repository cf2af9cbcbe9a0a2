"""Checkpoints with losses, for the commands that list, compare and remove them."""

from __future__ import annotations

from pathlib import Path

import torch

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Commit, Retention
from elasticctl_store.storage import Storage
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label

STEPS = (10, 20, 30, 40)


def fill(storage: Storage) -> Checkpointer:
    checkpoints = Checkpointer(storage, keep=Retention(99))
    for step, loss in zip(STEPS, (0.9, 0.5, 0.25, 0.75), strict=True):
        state = {"model": {"w": torch.full((300,), float(step))}, "optimizer": {"momentum": torch.ones(2)}}
        checkpoints.save(state, Label(step, step // 20, {"loss": loss}))
        assert checkpoints.settle()
    return checkpoints


def steps(folder: Path) -> list[int]:
    return [commit.step for commit in read_commits(LocalStorage(folder))]


def damage(folder: Path, step: int) -> None:
    commit: Commit = next(c for c in read_commits(LocalStorage(folder)) if c.step == step)
    path = next((folder / commit.folder).glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
