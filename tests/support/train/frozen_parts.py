"""Runs of which little changes from save to save, and everything that can happen to their base files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from elasticctl_store.checkpoints import entries, verify
from elasticctl_store.checkpoints.commits import delete_commit, read_commits
from elasticctl_store.checkpoints.entries import Retention
from elasticctl_store.checkpoints.retention import delete_unneeded_bases
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from tests.support.train.checkpoints import read_alone
from tests.support.train.states import same


class Counting(LocalStorage):
    """Counts the bytes that are put, by key; puts that are to fail fail, and all after so many."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.put_bytes: dict[str, int] = {}
        self.fails = ""
        self.left: int | None = None

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        if (self.fails and key.endswith(self.fails)) or self.left == 0:
            raise StorageError("told to fail")
        self.left = None if self.left is None else self.left - 1
        self.put_bytes[key] = sum(map(len, parts))
        return super().put(key, parts, if_absent=if_absent)


def save(checkpoints: Checkpointer, state: dict[str, Any], step: int) -> bool:
    checkpoints.save(state, Label(step))
    return checkpoints.settle()


def base_files(storage: Storage) -> list[str]:
    return list(all_keys(storage, entries.BASE))


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@dataclass
class World:
    """A URL, the run that saves there, and what was saved at each step."""

    folder: Path
    rng: random.Random
    step: int = 0
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.storage = Counting(self.folder)
        self.state = self.first_state()
        self.run = Checkpointer(self.storage, keep=Retention(2))
        self.is_clean = True

    def first_state(self) -> dict[str, torch.Tensor]:
        return {f"t{index}": torch.randn(self.rng.randrange(1, 200)) for index in range(6)}

    def change(self) -> None:
        for name in self.rng.sample(sorted(self.state), self.rng.choice((0, 1, 1, 1, 2, 6))):
            self.state[name].numpy()[:] = torch.randn(self.state[name].shape)  # behind autograd's back

    def save(self) -> None:
        self.change()
        self.save_state()

    def save_state(self) -> None:
        self.step += 1
        self.states[self.step] = {"model": {name: tensor.clone() for name, tensor in self.state.items()}}
        self.is_clean = save(self.run, {"model": self.state}, self.step)

    def fail(self) -> None:
        self.storage.fails = self.rng.choice((".safetensors", ".json"))
        self.save()
        self.storage.fails = ""
        self.is_clean = False

    def be_killed(self) -> None:
        """In the middle of a save, or before its entry."""
        self.storage.left = self.rng.randrange(4)
        self.save()
        self.storage.left = None
        self.restart()

    def restart(self) -> None:
        self.run = Checkpointer(self.storage, keep=Retention(self.rng.choice((1, 2, 4))))
        if self.rng.random() < 0.7:
            restored = self.run.restore()
            if restored is not None and self.rng.random() < 0.7:  # else it goes on with another state
                assert same(restored.state, self.states[restored.commit.step])
                self.state = restored.state["model"]
        self.is_clean = False

    def delete_by_hand(self) -> None:
        doomed = list(read_commits(self.storage))[1:2]
        for commit in doomed:
            delete_commit(self.storage, commit)
        delete_unneeded_bases(self.storage, doomed)
        self.restart()

    def lose_entry(self) -> None:
        newest = next(read_commits(self.storage), None)
        if newest is not None:
            flip(self.folder / entries.key_of(newest.position), 30)
        self.restart()

    def freeze(self) -> None:
        for _ in range(3):
            self.step += 1
            self.states[self.step] = {"model": {name: tensor.clone() for name, tensor in self.state.items()}}
            self.is_clean = save(self.run, {"model": self.state}, self.step)

    def check(self) -> None:
        found = list(read_commits(self.storage))
        for commit in found:
            verify.verify(self.storage, commit, lambda count: None)
            assert same(read_alone(self.storage, commit)[0], self.states[commit.step])
        if self.is_clean:
            needed = {base for commit in found for base in commit.bases}
            assert {entries.folder_of(key) for key in base_files(self.storage)} == needed


W = TypeVar("W", bound=World)


def tell(folder: Path, seed: int, events: int, kind: type[W] = World) -> W:  # type: ignore[assignment]
    """One story: so many things happen, and after each of them all is as it should be."""
    torch.manual_seed(seed)
    world = kind(folder, random.Random(seed))
    rare = (world.fail, world.be_killed, world.restart, world.delete_by_hand, world.lose_entry)
    for _ in range(events):
        world.rng.choice((*[world.save] * 5, *[world.freeze] * 2, *rare))()
        world.check()
    return world
