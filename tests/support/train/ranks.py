"""Real ranks for tests: forked from a server that has imported torch already, so that they start in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from typing import Any

from tests.support.ports import free_port

CONTEXT = multiprocessing.get_context("forkserver")
CLOUDS = ["elasticctl_store.storage.s3", "elasticctl_store.storage.gcs"]  # a second of imports each, else in every rank
LAUNCHER = ["elasticctl_launcher.main", "elasticctl_launcher.restart_ranks"]  # for tests/support/forked_launcher.py
CONTEXT.set_forkserver_preload(["tests.support.train.programs", "tests.support.train.sharded", *CLOUDS, *LAUNCHER])


def start_server() -> None:
    """Start the server before $TMPDIR is changed: its socket, and what it imports, would be in a folder that goes."""
    ensure_running()


def start(program: Callable[..., None], world_size: int, *arguments: Any) -> list[BaseProcess]:
    """Start `program(*arguments)` on each rank, with the environment torchrun would give it."""
    port = free_port()
    processes: list[BaseProcess] = [
        CONTEXT.Process(target=_rank, args=(program, rank, world_size, port, arguments)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def run(program: Callable[..., None], world_size: int, *arguments: Any, timeout_s: float = 240) -> list[int | None]:
    """Start, wait, and return the exit codes in order of rank; kills what is not done in time (code None)."""
    processes = start(program, world_size, *arguments)
    codes = []
    for process in processes:
        process.join(timeout_s)
        codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


def alone(program: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start `program(*arguments)` in a process that is no rank of any group."""
    process: BaseProcess = CONTEXT.Process(target=program, args=arguments)
    process.start()
    return process


def _rank(program: Callable[..., None], rank: int, world_size: int, port: int, arguments: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    program(*arguments)
