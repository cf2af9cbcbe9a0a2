"""The training loop of torchft's own DDP example, with the recovery benchmark's model and data.

As there, each process is a replica group with a fixed part of the samples, and a newcomer does not resume at its place
in them.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch
import torchft
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.recovery.task import GLOBAL_BATCH, Lines, build_data, build_model, build_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", required=True, help="the file to append steps to")
    parser.add_argument("--step-s", type=float, required=True, help="how long each step takes at least")
    parser.add_argument("--wrapper", choices=("DistributedDataParallel", "PureDistributedDataParallel"), required=True)
    args = parser.parse_args()
    number, workers = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    torch.manual_seed(0)
    data = build_data()
    sampler = torchft.DistributedSampler(
        data, replica_rank=number, num_replica_groups=workers, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // workers, sampler=sampler)
    net = build_model()

    def state() -> dict[str, object]:
        return {"model": net.state_dict(), "optim": optimizer.state_dict()}

    def load(found: dict[str, dict[str, object]]) -> None:
        net.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optim"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"train_ddp_{number}",
        timeout=timedelta(seconds=10),
        hostname="127.0.0.1",
    )
    from torchft import ddp

    model: nn.Module = getattr(ddp, args.wrapper)(manager, net)
    optimizer = torchft.Optimizer(manager, build_optimizer(net))
    lines = Lines(args.steps)
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for inputs, labels, names in loader:
            time.sleep(args.step_s)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            before = manager.batches_committed()
            takes_part = manager.is_participating()
            optimizer.step()
            if manager.batches_committed() == before or not takes_part:
                continue
            lines.add(
                rank=manager.participating_rank(),
                world=manager.num_participants(),
                step=manager.current_step(),
                group=f"{manager._quorum_id}-{manager.num_participants()}",
                epoch=epoch,
                samples=names.tolist(),
            )


if __name__ == "__main__":
    main()
