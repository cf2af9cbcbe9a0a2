"""A script as people wrote them for TorchElastic: torch.distributed, a checkpoint of its own, nothing of elasticctl.

    python -m torch.distributed.run … tests/on_cluster/torchelastic_train.py FOLDER

In each step all ranks add up their ones. Rank 0 keeps the step's number in FOLDER/step, and writes `step world` into
FOLDER/steps. It ends once FOLDER/enough is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_S = 0.05


def main(folder: Path) -> None:
    """Train until it is enough."""
    dist.init_process_group("gloo")
    is_main, state = dist.get_rank() == 0, folder / "step"
    start = torch.tensor([int(state.read_text()) if is_main and state.exists() else 0])
    dist.broadcast(start, src=0)
    step, enough = int(start), False
    while not enough:
        ones = torch.tensor([1, int(is_main and (folder / "enough").exists())])
        dist.all_reduce(ones)
        step, enough = step + 1, bool(ones[1])
        if is_main:
            keep(folder, step, int(ones[0]))
        time.sleep(STEP_S)
    dist.destroy_process_group()


def keep(folder: Path, step: int, world: int) -> None:
    """Write the step down."""
    with (folder / "steps").open("a") as file:
        file.write(f"{step} {world}\n")
    part = folder / "step.part"
    part.write_text(str(step))
    os.replace(part, folder / "step")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
