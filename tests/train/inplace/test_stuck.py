"""A rank that waits in a collective which never ends, and ranks that do something else."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from elasticctl_train.inplace.stuck import is_stuck
from tests.support.train import ranks
from tests.support.waiting import wait_until


def wait_for_frozen_peer(port: int) -> None:
    """Rank 0 waits for a rank that is frozen, and ends with code 3 once that is noticed."""
    dist.init_process_group("gloo")
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if os.environ["RANK"] == "1":
        store.set("frozen", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def watch() -> None:
        wait_until(is_stuck)
        os.kill(int(store.get("frozen")), signal.SIGKILL)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()
    dist.all_reduce(torch.ones(1))


def seen_meanwhile(what: str) -> bool:
    """Is the main thread taken for stuck while it does this?"""
    found: list[bool] = []
    looking = threading.Thread(target=lambda: found.append(is_stuck()))
    looking.start()
    weights = torch.ones(400, 400, requires_grad=True)
    while looking.is_alive():
        if what == "sleeps":
            time.sleep(0.01)
        elif what == "reads":
            looking.join()
        else:
            torch.linalg.matrix_power(weights / 400, 5).sum().backward()
    return found[0]


def test_who_waits_for_a_peer_that_does_nothing_is_stuck() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set_timeout(timedelta(seconds=240))
    assert ranks.run(wait_for_frozen_peer, 2, server.port) == [3, -signal.SIGKILL]


def test_who_computes_sleeps_or_reads_is_not() -> None:
    assert [seen_meanwhile(what) for what in ("computes", "sleeps", "reads")] == [False] * 3
