"""Real ranks for tests: forked from a server that has imported torch already, so that they start in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from elasticctl_protocol import variables
from tests.support.ports import free_port

CONTEXT = multiprocessing.get_context("forkserver")
CLOUDS = ["elasticctl_store.storage.s3", "elasticctl_store.storage.gcs"]  # a second of imports each, else in every rank
FORKED = [  # for tests/support/forked
    "tests.support.forked.processes",
    "elasticctl_launcher.main",
    "elasticctl_launcher.restart_ranks",
    "elasticctl_controller.local.supervisor",
]
CONTEXT.set_forkserver_preload(["tests.support.train.programs", "tests.support.train.sharded", *CLOUDS, *FORKED])
ROOM, ROOM_BYTES = "ROOM_FOR_THE_ENVIRONMENT", 1 << 16


def start_server() -> None:
    """Start the server, if it does not run yet, with room for the environment of the programs that its forks become.

    To be called before $TMPDIR is changed, too: its socket, and what it imports, would be in a folder that goes. It
    belongs to no test's local cluster.
    """
    home = os.environ.pop(variables.HOME, "")
    os.environ[ROOM] = " " * ROOM_BYTES
    try:
        ensure_running()
    finally:
        del os.environ[ROOM]
        if home:
            os.environ[variables.HOME] = home


def start(program: Callable[..., None], world_size: int, *arguments: Any) -> list[BaseProcess]:
    """Start `program(*arguments)` on each rank, with the environment torchrun would give it."""
    port = free_port()
    start_server()
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
    start_server()
    process: BaseProcess = CONTEXT.Process(target=_alone, args=(program, arguments))
    process.start()
    return process


def run_script(
    path: Path, arguments: Sequence[str], environ: Mapping[str, str], action: Literal["error", "ignore"] = "error"
) -> None:
    """Do what `python -W ACTION PATH ARGUMENTS...` does; for `alone`."""
    warnings.simplefilter(action)
    os.environ.update(environ)
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def _alone(program: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    del os.environ[ROOM]
    program(*arguments)


def _rank(program: Callable[..., None], rank: int, world_size: int, port: int, arguments: tuple[Any, ...]) -> None:
    del os.environ[ROOM]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    program(*arguments)
