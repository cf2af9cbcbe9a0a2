"""Stock torchrun with our rendezvous backend: no launcher of ours, no change to the script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.launcher_lab import Lab

SCRIPT = """
import datetime, os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), "of", dist.get_world_size(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
    dist.all_reduce(total)
dist.destroy_process_group()
"""


def torchrun(lab: Lab, name: str, script: Path) -> None:
    lab.run(
        name,
        [
            sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=elasticctl",
            f"--rdzv-endpoint=unix://{lab.folder}/r.sock", "--rdzv-id=job", "--nnodes=1:3", "--nproc-per-node=1",
            "--max-restarts=3", "--monitor-interval=0.1", str(script), str(lab.folder / "done"),
        ],
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip


@pytest.mark.timeout(900)
def test_torchrun_survives_the_loss_of_the_worker_that_hosts_the_store(lab: Lab) -> None:
    script = lab.folder / "script.py"
    script.write_text(SCRIPT)
    lab.add("a-0", "a-1")
    for name in ("a-0", "a-1"):
        torchrun(lab, name, script)
    lab.until(lambda: all("sum 2 of 2" in lab.output(name) for name in ("a-0", "a-1")))
    lab.kill("a-0")
    lab.until(lambda: "sum 1 of 1" in lab.output("a-1"))
    (lab.folder / "done").touch()
    assert lab.wait("a-1") == 0, lab.output("a-1")
