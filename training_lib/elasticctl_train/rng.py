"""The random number generators of one rank: Python's, NumPy's and torch's, the current CUDA device's included."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of every generator, as a state tree."""
    numpy_state: Any = np.random.get_state(legacy=False)
    words = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    state = {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {"key": words, "pos": int(numpy_state["state"]["pos"])}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put every generator back to a captured state; CUDA's only where both sides have one."""
    random.setstate(state["python"])
    words = state["numpy"]["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**state["numpy"], "state": {"key": words, "pos": state["numpy"]["state"]["pos"]}})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(*parts: int) -> None:
    """Seed every generator from numbers: equal numbers give equal streams, different ones unrelated streams."""
    seed = mix(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mix(*parts: int) -> int:
    """One 63-bit seed out of several numbers, such that no two lists of numbers share one by accident."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
