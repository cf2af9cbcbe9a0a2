"""Finds the processes on this machine that belong to workers of the local cluster, by their environment and command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from elasticctl_protocol import variables

ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def own_processes() -> Iterator[psutil.Process]:
    """The processes of this user."""
    user = os.getuid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == user:
                yield process


def variable_of(process: psutil.Process, name: str) -> str:
    """A variable of a running process; "" if it has none, may not be read or has ended."""
    try:
        return process.environ().get(name, "") if process.status() not in ENDED else ""
    except psutil.Error:
        return ""


def find_shims(pods: Path) -> dict[str, psutil.Process]:
    """The running shims of workers under the folder `pods`, by the UID of their pod."""
    found = {}
    for process in own_processes():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            # Any shim.py: that of another version, in another environment, serves as well.
            is_shim = len(words) == 4 and Path(words[2]).name == "shim.py" and Path(words[3]).parent == pods
            if is_shim and process.status() not in ENDED:
                found[Path(words[3]).name] = process
    return found


def any_left(pods: Path) -> bool:
    """True while any process of a worker under the folder `pods` runs, with or without its shim."""
    folder = f"{pods}{os.sep}"
    return bool(find_shims(pods)) or any(
        variable_of(process, variables.TERMINATION_LOG).startswith(folder) for process in own_processes()
    )
