"""Aborts what process groups do on GPUs, and finds out whether it has failed.

torch's own watchdog for NCCL ends the process after a failure, so it is turned off for ranks that stay
(`elasticctl_train.dist.rejoin`). It still records what it sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = "TIMEOUT"
"""The value of `failure` if a collective has not ended within the group's own limit."""


def abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort everything that the groups do on GPUs, together as torch does, because they may wait for each other."""
    backends = _backends(groups)
    if not backends:
        return
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def failure(groups: Iterable[dist.ProcessGroup]) -> str:
    """Return torch's name for a failure in one of the groups; empty if there is none."""
    names = (backend.get_error().name for backend in _backends(groups) if hasattr(backend, "get_error"))
    return next((str(name) for name in names if name != "SUCCESS"), "")


def _backends(groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """The NCCL backend of each group that has one."""
    found: list[Any] = []
    for group in groups:
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # the group does not use GPUs
            continue
        if backend.name() == "nccl":
            found.append(backend)
    return found
