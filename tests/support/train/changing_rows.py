"""Runs that change a few rows of their tables from save to save, and everything that can happen to the patches."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from elasticctl_store.checkpoints import entries, verify
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_train.checkpoint.incremental import tables, unchanged
from elasticctl_train.checkpoint.tree import NAMES
from tests.support.train.frozen_parts import World
from tests.support.train.states import same

SHAPES = ((40, 16), (200, 3), (64, 1), (3, 30, 5), (1, 50, 2), (0, 5), (30, 0), (25, 4, 1), (90,))


SMALL: tuple[tuple[ModuleType, str, float], ...] = (
    (unchanged, "LEAST_BYTES", 0),
    (unchanged, "LEAST_SHARE", 0),
    (tables, "SAMPLE_ROWS", 4),
    (tables, "LEAST_ROW_BYTES", 1),
)
"""The thresholds at which the tables of these stories count."""


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
