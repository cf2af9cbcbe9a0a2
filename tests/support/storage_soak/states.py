"""States that say whose they are: every bit of one follows from its step, the run that saved it, and its era.

An era is as long as the part of the state lasts that does not change, and lies in a base file.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.train.states import same


def state_of(step: int, run: int, era: int) -> dict[str, Any]:
    """Return the state at a step of a run, given by its number in the scenario."""
    chance = torch.Generator().manual_seed(step * 10_000 + run)
    tensors = {
        "w": torch.randn(40, 7, generator=chance),
        "half": torch.randn(3, generator=chance).bfloat16(),
        "frozen": torch.arange(2000.0) + era,
        "empty": torch.empty(0, 2),
    }
    return {"model": tensors, "made": {"step": step, "run": run, "era": era, "odd": [1, 2.5, None, (1, "ä")]}}


def local_of(step: int, rank: int) -> dict[str, Any]:
    """Return the part of the state that is the rank's own."""
    return {"own": torch.tensor([step, rank])}


def is_right(state: dict[str, Any], local: dict[str, Any] | None, rank: int) -> bool:
    """Whether it is, to the bit, a state that was saved, with the rank's own part."""
    made = state["made"]
    step = made["step"]
    return same(state, state_of(step, made["run"], made["era"])) and same(local, local_of(step, rank))
