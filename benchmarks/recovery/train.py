"""The training script of the recovery benchmark, the same for every contender.

A small DistributedDataParallel model on CPUs, with elasticctl_train. It appends a line for each optimizer step that
counts of each rank (see `timeline`).
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.recovery.task import GLOBAL_BATCH, Lines, build_data, build_model, build_optimizer
from elasticctl_train import Run, SavePolicy


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
    parser.add_argument("--step-s", type=float, required=True, help="how long each step takes at least")
    parser.add_argument("--save-every-steps", type=int, required=True)
    parser.add_argument("--collective-timeout-s", type=float, help="torch's own limit for a collective")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    data = build_data()
    net = build_model()
    optimizer = build_optimizer(net)
    if args.collective_timeout_s is not None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.collective_timeout_s))
    with Run(args.storage, model=net, optimizer=optimizer, save=SavePolicy(every_steps=args.save_every_steps)) as run:
        model, group = run.model, group_name()
        lines = Lines(args.steps)
        for epoch in run.epochs(1_000_000):
            for inputs, labels, names in run.loader(data, global_batch=GLOBAL_BATCH, shuffle=True):
                time.sleep(args.step_s)
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                run.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                step = run.steps_done + 1
                generation = os.environ.get("ELASTICCTL_GENERATION", group)
                samples = names.tolist()[: run.own_samples]
                rank, world = run.rank, run.world_size
                run.step(loss=loss)
                if run.steps_done >= step:
                    lines.add(step=step, rank=rank, world=world, epoch=epoch, group=generation, samples=samples)


if __name__ == "__main__":
    main()
