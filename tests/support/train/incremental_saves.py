"""Runs that save states of which little changes, and everything that can happen to their base files and patches."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
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
from elasticctl_train.checkpoint.incremental import tables, unchanged
from elasticctl_train.checkpoint.tree import NAMES
from tests.support.train.checkpoints import flip, read_alone
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
            raise StorageError("this put is to fail")
        self.left = None if self.left is None else self.left - 1
        self.put_bytes[key] = sum(map(len, parts))
        return super().put(key, parts, if_absent=if_absent)


def save(checkpoints: Checkpointer, state: dict[str, Any], step: int) -> bool:
    checkpoints.save(state, Label(step))
    return checkpoints.settle()


def base_files(storage: Storage) -> list[str]:
    return list(all_keys(storage, entries.BASE))


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
            self.state[name].numpy()[:] = torch.randn(self.state[name].shape)  # unnoticed by autograd

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
        deleted = list(read_commits(self.storage))[1:2]
        for commit in deleted:
            delete_commit(self.storage, commit)
        delete_unneeded_bases(self.storage, deleted)
        self.restart()

    def lose_entry(self) -> None:
        newest = next(read_commits(self.storage), None)
        if newest is not None:
            flip(self.folder / entries.key_of(newest.position), 30)
        self.restart()

    def freeze(self) -> None:
        for _ in range(3):
            self.save_state()

    def check(self) -> None:
        found = list(read_commits(self.storage))
        for commit in found:
            verify.verify(self.storage, commit, lambda count: None)
            assert same(read_alone(self.storage, commit)[0], self.states[commit.step])
        if self.is_clean:
            needed = {base for commit in found for base in commit.bases}
            assert {entries.folder_of(key) for key in base_files(self.storage)} == needed


W = TypeVar("W", bound=World)


def run_events(folder: Path, seed: int, events: int, kind: type[W] = World) -> W:  # type: ignore[assignment]
    """Let so many random things happen, and check everything after each of them."""
    torch.manual_seed(seed)
    world = kind(folder, random.Random(seed))
    rare = (world.fail, world.be_killed, world.restart, world.delete_by_hand, world.lose_entry)
    for _ in range(events):
        world.rng.choice((*[world.save] * 5, *[world.freeze] * 2, *rare))()
        world.check()
    return world


SHAPES = ((40, 16), (200, 3), (64, 1), (3, 30, 5), (1, 50, 2), (0, 5), (30, 0), (25, 4, 1), (90,))


SMALL: tuple[tuple[ModuleType, str, float], ...] = (
    (unchanged, "LEAST_BYTES", 0),
    (unchanged, "LEAST_SHARE", 0),
    (tables, "SAMPLE_ROWS", 4),
    (tables, "LEAST_ROW_BYTES", 1),
)
"""The thresholds at which the tables of these tests count."""


class RowsWorld(World):
    """Tables of every dtype, some of them transposed or strided, of which rows change in every way."""

    patches = 0

    def first_state(self) -> dict[str, torch.Tensor]:
        found = {}
        for index in range(7):
            dtype, shape = self.rng.choice(sorted(NAMES, key=str)), self.rng.choice(SHAPES)
            tensor = torch.zeros(shape, dtype=dtype)
            layout = self.rng.randrange(4)
            if layout == 1 and len(shape) > 1:
                tensor = torch.zeros(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
            elif layout == 2:
                tensor = torch.zeros((*shape, 2), dtype=dtype)[..., 0]
            found[f"t{index}"] = tensor
        return found

    def change(self) -> None:
        for name in self.rng.sample(sorted(self.state), self.rng.choice((0, 1, 2, 3, 7))):
            table = self.state[name]
            if not table.numel():
                continue
            plain = torch.empty(table.shape, dtype=table.dtype).copy_(table)
            data = plain.view(-1).view(torch.uint8).view(-1, table.shape[-1] * table.itemsize)
            for _ in range(self.rng.choice((1, 1, 2, 4, len(data)))):
                self._change_row(data)
            if table.dtype == torch.bool:
                data &= 1
            table.copy_(plain)

    def freeze(self) -> None:
        """Some saves between which each table changes in one row, so that they are found to be tables."""
        for _ in range(4):
            for table in self.state.values():
                if table.numel():
                    table[(0,) * (table.dim() - 1)].copy_(self.step % 2)
            self.save_state()

    def restart(self) -> None:
        super().restart()
        self.freeze()

    def _change_row(self, data: torch.Tensor) -> None:
        """Bits of a row, so that there are NaNs and negative zeros; or it changes places with another row, or in it two
        halves do; or it is as another row, or as at first."""
        row, other = self.rng.randrange(len(data)), self.rng.randrange(len(data))
        match self.rng.randrange(6):
            case 0:
                data[row] = torch.randint(256, data[row].shape, dtype=torch.uint8)
            case 1:
                data[row, self.rng.randrange(data.shape[1])] ^= 1 << self.rng.randrange(8)
            case 2:
                data[[row, other]] = data[[other, row]].clone()
            case 3:
                data[row] = data[row].roll(data.shape[1] // 2)
            case 4:
                data[row] = data[other].clone()
            case 5:
                data[row] = 0

    def check(self) -> None:
        super().check()
        for commit in list(read_commits(self.storage))[:1]:
            self.patches += sum(entries.is_patch(f"{base}share-00000-of-00001.safetensors") for base in commit.bases)
            with tempfile.TemporaryDirectory() as folder:
                verify.pull(self.storage, commit, "model", Path(folder, "pulled"), lambda count: None)
                pulled = load(Path(folder, "pulled"))
            for name, tensor in self.states[commit.step]["model"].items():
                data = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0).byte()
                assert same(pulled[name], data)


def load(path: Path) -> dict[str, torch.Tensor]:
    """The bytes of the tensors in a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, said in json.loads(data[8 : 8 + length]).items():
        start, end = said["data_offsets"]
        raw = bytearray(data[8 + length + start : 8 + length + end])
        found[name] = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0).byte()
    return found
