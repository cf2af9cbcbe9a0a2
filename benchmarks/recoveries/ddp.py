"""A plain DistributedDataParallel loop, bare or in NVRx's in-process restart, as in its own basic example.

After a loss the whole function starts again, in the same process, from the newest checkpoint, with the remaining ranks.
Unlike the example, it continues where its data order was: the global batch stays, and is divided among the ranks.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.recoveries.task import GLOBAL_BATCH, SAMPLES, Lines, build_data, build_model, build_optimizer

STEPS_OF_EPOCH = SAMPLES // GLOBAL_BATCH


def train(args: argparse.Namespace, began: int, atomic: Callable[[], Any]) -> None:
    """Train for ever; `began` counts the starts in this process, `atomic()` is a context that is not interrupted."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    data = build_data()
    net = build_model()
    optimizer = build_optimizer(net)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=rank == 0, multi_tenant=True
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=10))
    model = nn.parallel.DistributedDataParallel(net)
    path, step = Path(args.storage), 0
    if path.exists():
        found = torch.load(path, weights_only=True)
        net.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    lines = Lines(args.steps)
    for epoch in range(step // STEPS_OF_EPOCH, 1_000_000):
        sampler: DistributedSampler[Any] = DistributedSampler(data)
        sampler.set_epoch(epoch)
        for number, (inputs, labels, names) in enumerate(DataLoader(data, GLOBAL_BATCH // world, sampler=sampler)):
            if epoch * STEPS_OF_EPOCH + number < step:
                continue
            time.sleep(args.step_s)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            lines.add(rank=rank, world=world, step=step, group=str(began), epoch=epoch, samples=names.tolist())
            if args.save_every_steps and step % args.save_every_steps == 0:
                dist.barrier()
                if rank == 0:
                    with atomic():
                        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", required=True, help="the checkpoint's file")
    parser.add_argument("--steps", required=True, help="the file to append steps to")
    parser.add_argument("--step-s", type=float, required=True, help="how long each step takes at least")
    parser.add_argument("--save-every-steps", type=int, required=True)
    parser.add_argument("--nvrx-store-port", type=int, help="restart in the process; where NVRx's own store listens")
    args = parser.parse_args()
    if args.nvrx_store_port is None:
        train(args, 0, nullcontext)
        return
    from nvidia_resiliency_ext import inprocess  # type: ignore[import-not-found,unused-ignore]

    def start(call_wrapper: inprocess.CallWrapper | None = None) -> None:
        assert call_wrapper is not None
        train(args, call_wrapper.iteration, call_wrapper.atomic)

    often = timedelta(seconds=0.1)
    start.__annotations__["call_wrapper"] = inprocess.CallWrapper
    inprocess.Wrapper(
        store_kwargs={"port": args.nvrx_store_port},
        monitor_thread_interval=often,
        monitor_process_interval=often,
        heartbeat_interval=often,
        progress_watchdog_interval=often,
        last_call_wait=often,
        heartbeat_timeout=timedelta(seconds=2),
    )(start)()


if __name__ == "__main__":
    main()
