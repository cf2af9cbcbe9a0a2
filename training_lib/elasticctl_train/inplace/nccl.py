"""What groups do on GPUs: abort it, and find out whether it has failed.

torch's own watch over NCCL ends the process when something has failed, so it is turned off for ranks that stay
(`elasticctl_train.dist.rejoin`). It still writes down what it sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = "TIMEOUT"
"""What `failure` returns where a collective has not ended within the group's own limit."""


def abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """End all that they do on GPUs. Together, as torch does it: what one does may wait for what another does."""
    backends = _backends(groups)
    if not backends:
        return
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def failure(groups: Iterable[dist.ProcessGroup]) -> str:
    """torch's name for what has failed in one of them; empty if nothing has."""
    names = (backend.get_error().name for backend in _backends(groups) if hasattr(backend, "get_error"))
    return next((str(name) for name in names if name != "SUCCESS"), "")


def _backends(groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """NCCL's part of each group, where it has one."""
    found: list[Any] = []
    for group in groups:
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # it has nothing to do with GPUs
            continue
        if backend.name() == "nccl":
            found.append(backend)
    return found
