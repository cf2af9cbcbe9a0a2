"""The training script of the recovery benchmark, the same for every contender.

A small DistributedDataParallel model on CPUs, with elasticctl_train. It appends a line for each optimizer step that
counts of each rank (see `timeline`), and on request one for each phase of its own start.
"""

# ruff: noqa: E402 - the time of the first line is one of the things measured
import time

BEGAN_AT = time.time()

import argparse
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.recoveries.task import GLOBAL_BATCH, Lines, build_data, build_model, build_optimizer
from elasticctl_train import Run, SavePolicy


class Marks:
    """Records when this process completed each phase of its start; without a path, nothing."""

    def __init__(self, path: str) -> None:
        self._lines = Lines(path) if path else None
        self.note("script", at=BEGAN_AT)

    def note(self, phase: str, **fields: object) -> None:
        """Record that `phase` is done."""
        if self._lines:
            self._lines.add(phase=phase, **fields)

    def note_inside_run(self) -> None:
        """Also record when the parts of `Run(...)` are done."""
        if not self._lines:
            return
        from elasticctl_train import dist
        from elasticctl_train.checkpoint import checkpointer as checkpoint

        library: Any = dist
        library.join = self._noting("joined", library.join)
        checkpointer: Any = checkpoint.Checkpointer
        checkpointer.restore = self._noting("restored", checkpointer.restore)

    def _noting(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.note(phase)
            return result

        return noted


def group_name() -> str:
    """Return a name that the ranks of this incarnation, and no other, have in common."""
    if "ELASTICCTL_GENERATION" in os.environ:
        return os.environ["ELASTICCTL_GENERATION"]
    number = torch.tensor([secrets.randbits(62)])
    if dist.is_initialized():
        dist.broadcast(number, 0)
    return f"{int(number):x}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--steps", required=True, help="the file to append steps to")
    parser.add_argument("--marks", default="", help="the file to append phases to")
    parser.add_argument("--step-s", type=float, required=True, help="how long each step takes at least")
    parser.add_argument("--save-every-steps", type=int, required=True)
    parser.add_argument("--collective-timeout-s", type=float, help="torch's own limit for a collective")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    marks = Marks(args.marks)
    marks.note("imported")
    marks.note_inside_run()
    torch.manual_seed(0)
    data = build_data()
    net = build_model()
    optimizer = build_optimizer(net)
    marks.note("built")
    if args.collective_timeout_s is not None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.collective_timeout_s))
    with Run(args.storage, model=net, optimizer=optimizer, save=SavePolicy(every_steps=args.save_every_steps)) as run:
        marks.note("run")
        model, group = run.model, group_name()
        marks.note("wrapped")
        lines = Lines(args.steps)
        first = run.steps_done + 1
        for epoch in run.epochs(1_000_000):
            for inputs, labels, names in run.loader(data, global_batch=GLOBAL_BATCH, shuffle=True):
                time.sleep(args.step_s)
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                run.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                step = run.steps_done + 1
                known = {"rank": run.rank, "world": run.world_size, "epoch": epoch}
                known |= {"group": os.environ.get("ELASTICCTL_GENERATION", group)}
                known |= {"samples": names.tolist()[: run.own_samples]}
                if step == first:
                    marks.note("stepped")
                run.step(loss=loss)
                if run.steps_done >= step:
                    lines.add(step=step, **known)


if __name__ == "__main__":
    main()
