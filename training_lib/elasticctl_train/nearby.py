"""Memory that the ranks of one node read from one another: nameless files in memory, and those of the local tier.

A rank tells the others the path at which a file of its own can be opened, and what the kernel knows it by. Who sees the
very same file there is on its node, and maps it; who does not, is sent what is in it.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a file can be opened, and what it is known by: its number on its device under that boot of a kernel."""

    path: str
    boot: str
    device: int
    inode: int


def reserve(size_bytes: int) -> tuple[torch.Tensor, BinaryIO] | None:
    """Untouched memory (uint8) that others can map, and its file, to be closed once they have; None: not here."""
    if size_bytes == 0 or not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.fdopen(os.memfd_create("elasticctl-restore"), "r+b", buffering=0)
    except OSError:
        return None
    try:
        os.truncate(file.fileno(), size_bytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), size_bytes), dtype=torch.uint8), file
    except OSError:
        file.close()
        return None


def mapped(file: BinaryIO) -> torch.Tensor:
    """What is in a file (uint8), not to be written to. Raises OSError; ValueError for an empty one."""
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants it writable
    return torch.frombuffer(memory, dtype=torch.uint8)


def spot_of(file: BinaryIO) -> Spot | None:
    """Where other processes find an open file for as long as it is open; None where they cannot."""
    with suppress(OSError):
        found = os.fstat(file.fileno())
        return Spot(f"/proc/{os.getpid()}/fd/{file.fileno()}", _BOOT_ID.read_text(), found.st_dev, found.st_ino)
    return None


def find(spot: Spot) -> torch.Tensor | None:
    """What is in another's file (uint8), not to be written to; None where it is not to be seen from here."""
    with suppress(OSError, ValueError):
        if _BOOT_ID.read_text() != spot.boot:
            return None
        found = os.stat(spot.path)  # first: to open what is no such file could block
        if (found.st_dev, found.st_ino) == (spot.device, spot.inode):
            with open(spot.path, "rb") as file:
                return mapped(file)
    return None
