"""The training script of `chaos` and `interruptions`: records in a file what it resumed from and what it trained on.

Each rank appends a line when it has resumed, one for each batch before its gradients can count, and one for each
optimizer step before the step can be committed; rank 0 appends the weights at the end. It trains until the epoch in
the file of --end; without that file, it does not end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from elasticctl_train import Run, SavePolicy
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Like, Restored

PIXELS, HIDDEN, CLASSES = 64, 32, 10
NO_END = 1_000_000
KEEP_ALL = 1_000_000
"""Keep every commit: the proof needs the whole journal."""


class Digits(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Synthetic scans of 8 x 8 pixels with their labels, the same for every rank and run."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self._images = torch.rand(length, PIXELS, generator=generator, dtype=torch.float64)
        teacher = torch.randn(PIXELS, CLASSES, generator=generator, dtype=torch.float64)
        self._labels = (self._images @ teacher).argmax(dim=1)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self._images[index], self._labels[index]


class Record:
    """Appends JSON lines to a file that other processes append to as well: one write() each."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._generation = 0  # of the journal

    def add(self, kind: str, **fields: object) -> None:
        """Append one object with the identity of this rank."""
        who = {"rank": int(os.environ.get("RANK", "0")), "world": int(os.environ.get("WORLD_SIZE", "1"))}
        where = {"pid": os.getpid(), "worker": os.environ.get("ELASTICCTL_WORKER", ""), "generation": self._generation}
        line = {"kind": kind, "at": time.time(), **who, **where, **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def listen(self) -> None:
        """Record what every restore finds; the generation is that of the storage's journal."""
        restore = Checkpointer.restore

        def restore_and_note(checkpoints: Checkpointer, like: Like | None = None, *more: Any) -> Restored | None:
            restored = restore(checkpoints, like, *more)
            self._generation = checkpoints.generation
            self.add("resumed", step=restored.commit.step if restored else 0)
            return restored

        Checkpointer.restore = restore_and_note  # type: ignore[method-assign, assignment]


def end_of(run: Run, path: Path, stay: bool) -> int:
    """Return the epoch to stop before, as rank 0 reads it; if ranks stay in their processes, as each rank reads it."""
    end = torch.tensor([int(path.read_text()) if (run.is_main or stay) and path.exists() else NO_END])
    if run.world_size > 1 and not stay:
        dist.broadcast(end, 0)
    return int(end)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", required=True, help="the file to append lines to")
    parser.add_argument("--end", type=Path, required=True, help="the file that will name the last epoch")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--save-every-steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True, help="how long each step takes at least, before the end")
    parser.add_argument("--workers", type=int, default=0, help="that is so with as many workers; more with fewer")
    parser.add_argument("--stay", action="store_true", help="no collectives but those of Run, so that ranks can stay")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    record = Record(args.record)
    record.listen()
    net = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    data = Digits(args.samples)
    save = SavePolicy(every_steps=args.save_every_steps, keep_last=KEEP_ALL)
    with Run(model=net, optimizer=optimizer, save=save) as run:
        for epoch in run.epochs(NO_END):
            end = end_of(run, args.end, args.stay)
            if epoch >= end:
                break
            for numbers, images, labels in run.loader(
                data, global_batch=args.global_batch, shuffle=True, seed=args.seed
            ):
                samples = numbers[: run.own_samples].tolist()
                group = int(os.environ.get("ELASTICCTL_GENERATION", "0"))
                about = {"generation": group, "step": run.steps_done + 1, "epoch": epoch, "samples": samples}
                record.add("batch", **about)
                loss = nn.functional.cross_entropy(run.model(images), labels)
                optimizer.zero_grad()
                run.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                record.add("step", **about)
                share = args.workers / run.world_size if args.workers else 1.0
                time.sleep(args.step_s * share if end == NO_END else 0.0)
                run.step(loss=loss)
        if run.is_main:
            record.add("weights", values=[number for part in net.parameters() for number in part.flatten().tolist()])


if __name__ == "__main__":
    main()
