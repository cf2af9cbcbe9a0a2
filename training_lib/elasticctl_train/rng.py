"""The random number generators of one rank: Python's, NumPy's and torch's, including the current CUDA device's."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
from typing import Any

import numpy as np
import torch

_MT19937_BYTES = 624 * 4 + 4
"""The state of the generator: its words, and the position in them."""


def capture() -> dict[str, Any]:
    """Return the state of every generator, as a state tree."""
    return Capture().capture()


class Capture:
    """Like `capture`, repeatedly. Reading NumPy's state is slow, so it is only read if it has changed."""

    def __init__(self) -> None:
        self._numpy: dict[str, Any] | None = None
        self._numpy_words = b""

    def capture(self) -> dict[str, Any]:
        """Return the state of every generator, as a state tree."""
        words = _words_of_numpy()
        if self._numpy is None or not words or words != self._numpy_words or self._numpy["has_gauss"]:
            self._numpy, self._numpy_words = _state_of_numpy(), words
        state = {"python": random.getstate(), "numpy": self._numpy, "torch": torch.get_rng_state()}
        if _has_gpu():
            state["cuda"] = torch.cuda.get_rng_state()
        return state


def _state_of_numpy() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    words = torch.from_numpy(state["state"]["key"].astype(np.int64))
    return {**state, "state": {"key": words, "pos": int(state["state"]["pos"])}}


def _words_of_numpy() -> bytes:
    """Return the part of the state that every drawn number changes (which excludes `has_gauss`); empty if unknown."""
    module: Any = np.random  # its annotations lack the function
    bits = module.get_bit_generator()
    if type(bits) is not np.random.MT19937:
        return b""
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def restore(state: dict[str, Any]) -> None:
    """Restore every generator to a captured state; CUDA's only if both sides have one."""
    random.setstate(state["python"])
    words = state["numpy"]["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**state["numpy"], "state": {"key": words, "pos": state["numpy"]["state"]["pos"]}})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and _has_gpu():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(*parts: int) -> None:
    """Seed every generator from numbers: equal numbers give equal streams, different ones unrelated streams."""
    seed = mix(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mix(*parts: int) -> int:
    """Return a 63-bit seed that is derived from several numbers, practically without collisions."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
