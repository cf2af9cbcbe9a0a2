"""How much a run writes per save if little of its state is trained: a frozen model, and adapters (LoRA) with Adam.

    python -m benchmarks.adapters [--megabytes 500] [--saves 20]

Two runs alternate: one that leaves out what has not changed, and one that writes everything. Bytes are counted where
they are passed to the storage, a folder; processor time is that of the whole process while training is idle.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.checkpoint.incremental import unchanged

WIDTH, RANK = 1024, 16


class CountingStorage(LocalStorage):
    """A folder that counts the bytes that are written to it."""

    count_bytes = 0

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        self.count_bytes += sum(map(len, parts))
        return super().put(key, parts, if_absent=if_absent)


def main() -> None:
    """Measure, and print one line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="the model's size")
    parser.add_argument("--saves", type=int, default=20)
    given = parser.parse_args()
    layers = max(1, given.megabytes * 1_000_000 // (4 * WIDTH * WIDTH))
    model = {f"{layer}.weight": torch.randn(WIDTH, WIDTH) for layer in range(layers)}
    adapters = {
        f"{layer}.{name}": torch.nn.Parameter(torch.randn(WIDTH, RANK)) for layer in range(layers) for name in "ab"
    }
    optimizer = torch.optim.Adam(adapters.values())

    def train() -> dict[str, Any]:
        for adapter in adapters.values():
            adapter.grad = torch.randn_like(adapter)
        optimizer.step()
        return {"model": {**model, **adapters}, "optimizer": optimizer.state_dict()}

    compare(given.saves, train)


def compare(saves: int, train: Callable[[], dict[str, Any]]) -> None:
    """Save each state that `train` returns in both runs, and print one line for each run."""
    found: dict[str, list[tuple[int, float, float]]] = {"what has changed": [], "everything": []}
    with tempfile.TemporaryDirectory() as folder:
        storages = {way: CountingStorage(Path(folder, way)) for way in found}
        runs = {way: Checkpointer(storage) for way, storage in storages.items()}
        for step in range(1, saves + 1):
            state = train()
            for way, run in runs.items():
                unchanged.LEAST_BYTES = 1 << 20 if way == "what has changed" else 1 << 60
                found[way].append(save(run, storages[way], state, step))
    report(found)


def save(run: Checkpointer, storage: CountingStorage, state: dict[str, Any], step: int) -> tuple[int, float, float]:
    """Return bytes, seconds until the commit and its clean-up are done, and CPU seconds of one save."""
    bytes_before, started_s, cpu_s = storage.count_bytes, time.monotonic(), time.process_time()
    run.save(state, Label(step))
    if not run.settle():
        raise run.failure()
    return storage.count_bytes - bytes_before, time.monotonic() - started_s, time.process_time() - cpu_s


def report(found: dict[str, list[tuple[int, float, float]]]) -> None:
    """Print the sum of the bytes, and medians over the second half of the saves."""
    whole = sum(size for size, *_ in found["everything"])
    for way, saves in found.items():
        written = sum(size for size, *_ in saves)
        size, took_s, cpu_s = (median(one[at] for one in saves[len(saves) // 2 :]) for at in range(3))
        print(
            f"{way}: {len(saves)} saves of {written / 1e6:.0f} MB ({written / whole:.0%}); from half-way on "
            f"{size / 1e6:.1f} MB, {took_s:.2f} s, {cpu_s:.2f} CPU s each"
        )


if __name__ == "__main__":
    main()
