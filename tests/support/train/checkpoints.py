"""Checkpoints for tests: written whole by `saved`, or share by share without ranks by `write_shares`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Commit, Retention
from elasticctl_store.checkpoints.reader import read_contents
from elasticctl_store.storage import Storage
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint import plans, rank_shares, restore
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.checkpoint.memory import buffers
from elasticctl_train.checkpoint.memory.copying import Copier
from elasticctl_train.dist import World

FOLDER = entries.save_folder(1, 1, 5, "ab12cd34")
"""Where `write_shares` writes to."""


def model_state() -> dict[str, Any]:
    """Tensors of several dtypes: tied ones, a scalar, an empty one, a large one."""
    torch.manual_seed(3)
    tied = torch.randn(7, 5)
    return {
        "embedding.weight": tied,
        "head.weight": tied,
        "half": torch.randn(3, 3).bfloat16(),
        "count": torch.tensor(12),
        "empty": torch.empty(0, 4),
        "mask": torch.rand(9) > 0.5,
        "turns": torch.randn(2, 3, dtype=torch.complex64),
        "large": torch.randn(700, 500),
    }


def saved(folder: Path, steps: int = 1) -> tuple[LocalStorage, list[Commit]]:
    """A storage with some checkpoints, newest first."""
    storage = LocalStorage(folder)
    checkpoints = Checkpointer(storage)
    for step in range(1, steps + 1):
        optimizer = {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.ones(4) * step}}, "name": "adam"}
        checkpoints.save({"model": model_state(), "optimizer": optimizer}, Label(step), local={"own": torch.ones(3)})
        assert checkpoints.settle()
    return storage, list(read_commits(storage))


def read_alone(storage: Storage, commit: Commit, rank: int = 0) -> tuple[dict[str, Any], Any]:
    """Read a checkpoint in one process; returns the state, and what was the rank's own (None: no such rank).

    Raises DamagedError or MissingError unless everything is exactly as it was written.
    """
    place = restore.RestoreSource(storage, World(), None)
    return restore.read(place, read_contents(storage, commit), {}, own_of=rank)


def damage(folder: Path, commit: Commit, suffix: str, at: int) -> Path:
    """Flip a bit of the first share's file."""
    path = next((folder / commit.folder).glob(f"*{suffix}"))
    flip(path, at)
    return path


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def make_share(
    state: Mapping[str, Any], local: dict[str, Any], rank: int, world_size: int, **options: Any
) -> rank_shares.Share:
    """One rank's share of a state, copied and ready to be written."""
    flat = plans.flatten(state, local)
    plan = plans.plan(flat, rank, world_size, **options)
    buffer = buffers.Buffer(0, torch.empty(plan.size_bytes, dtype=torch.uint8), in_tier=False)
    plan.fill(buffer, flat, Copier())
    return rank_shares.Share(plan, buffer, flat.state, flat.local)


def write_shares(storage: Storage, state: Mapping[str, Any], locals_: list[dict[str, Any]], **options: Any) -> None:
    """Write the shares of as many ranks as there are `locals_`."""
    for rank, local in enumerate(locals_):
        share = make_share(state, local, rank, len(locals_), **options)
        share.write(storage, entries.share_key(FOLDER, rank, len(locals_)))


def gather_shares(storage: Storage, world_size: int) -> Commit:
    """Return the commit of the shares that `write_shares` wrote; it is not in any journal."""
    found = rank_shares.gather(storage, FOLDER, world_size, threading.Event())
    return Commit(2, 1, 1, 5, 0, found.refs, found.size_bytes)


STEPS = (10, 20, 30, 40)


def fill(storage: Storage) -> Checkpointer:
    """Save checkpoints with losses."""
    checkpoints = Checkpointer(storage, keep=Retention(99))
    for step, loss in zip(STEPS, (0.9, 0.5, 0.25, 0.75), strict=True):
        state = {"model": {"w": torch.full((300,), float(step))}, "optimizer": {"momentum": torch.ones(2)}}
        checkpoints.save(state, Label(step, step // 20, {"loss": loss}))
        assert checkpoints.settle()
    return checkpoints


def steps(folder: Path) -> list[int]:
    return [commit.step for commit in read_commits(LocalStorage(folder))]


def damage_step(folder: Path, step: int) -> None:
    """Damage the tensors of a step."""
    damage(
        folder, next(commit for commit in read_commits(LocalStorage(folder)) if commit.step == step), ".safetensors", -1
    )
