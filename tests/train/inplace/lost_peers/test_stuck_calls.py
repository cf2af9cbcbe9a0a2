"""A rank that waits in a collective which never ends, and ranks that do something else."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from elasticctl_train.inplace.lost_peers.stuck_calls import is_stuck
from tests.support.train import ranks
from tests.support.waiting import wait_until


def wait_for_frozen_peer(port: int, in_main: bool) -> None:
    """Rank 0 waits for a rank that is frozen, in its main thread or another; it ends with 3 once that is noticed."""
    dist.init_process_group("gloo")
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if os.environ["RANK"] == "1":
        store.set("frozen", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def watch(thread: int) -> None:
        wait_until(partial(is_stuck, thread))
        os.kill(int(store.get("frozen")), signal.SIGKILL)
        os._exit(3)

    def train() -> None:
        threading.Thread(target=watch, args=(threading.get_ident(),), daemon=True).start()
        dist.all_reduce(torch.ones(1))

    if in_main:
        train()
    else:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()


def seen_meanwhile(what: str) -> bool:
    """Is the main thread taken for stuck while it does this?"""
    found: list[bool] = []
    here = threading.get_ident()
    looking = threading.Thread(target=lambda: found.append(is_stuck(here)))
    looking.start()
    weights = torch.ones(200, 200, requires_grad=True)
    while looking.is_alive():
        if what == "sleeps":
            time.sleep(0.01)
        elif what == "reads":
            looking.join()
        else:
            torch.linalg.matrix_power(weights / 200, 5).sum().backward()
    return found[0]


@pytest.mark.parametrize("in_main", [True, False])
def test_who_waits_for_a_peer_that_does_nothing_is_stuck(in_main: bool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set_timeout(timedelta(seconds=240))
    assert ranks.run(wait_for_frozen_peer, 2, server.port, in_main) == [3, -signal.SIGKILL]


def test_who_computes_sleeps_or_reads_is_not() -> None:
    assert [seen_meanwhile(what) for what in ("computes", "sleeps", "reads")] == [False] * 3
