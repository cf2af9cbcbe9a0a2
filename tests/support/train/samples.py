"""Checkpoints that earlier versions have written, in tests/train/checkpoint/samples: the format has to stay readable.

    one-rank     three steps of a model with every dtype, tied and empty tensors, an optimizer and a scheduler
    two-ranks    tensors that two ranks have cut up between them, and one that rank 0 has written alone
    frozen       three steps of a model of which little changes: they share a base file
    tables       three steps of a model with tables of which few rows change: they share base files, and have patches
    rows, grid   tensors (DTensor) that are sharded over two ranks by columns, and over a mesh of four

`expected.json` has what the version that wrote them read back: of tensors dtype, shape and a digest of all bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SAMPLES = Path(__file__).parents[2] / "train" / "checkpoint" / "samples"
NAMES = ("one-rank", "two-ranks", "rows", "grid", "frozen", "tables")


def expected() -> dict[str, dict[str, Any]]:
    """What each rank read, by sample, step and rank, as `described` gives it."""
    found: dict[str, dict[str, Any]] = json.loads((SAMPLES / "expected.json").read_text())
    return found


def objects(name: str) -> dict[str, bytes]:
    """The objects of a sample by key."""
    root = SAMPLES / name
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def described(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A state tree as (path, what lies there), each bit of it."""
    if isinstance(value, torch.Tensor):
        raw = value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        yield path, [str(value.dtype), list(value.shape), hashlib.sha256(raw).hexdigest()]
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from described(item, f"{path}/{key}")
        if not value:
            yield path, "{}"
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from described(item, f"{path}/{type(value).__name__}{index}")
    else:
        yield path, repr(value)
