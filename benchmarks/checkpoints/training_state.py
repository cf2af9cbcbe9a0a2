"""The state that is checkpointed, and the training during saves: a loop of small steps.

The loop does not depend on the state, because the size of a state does not determine how long a step takes.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_LEAST_LAYERS = 20
_BYTES_PER_WEIGHT = 12  # float32, and Adam's two moments
_STEP_WIDTH = 256
_REDUCED = 16_384


class Trainee:
    """A model of square layers and its Adam: some 300 tensors, with nearly all bytes in a third of them."""

    def __init__(self, size_bytes: int, seed: int) -> None:
        """Create the state before training: the optimizer has no state yet. The size is exact to within one layer."""
        width, layers = shape_for(size_bytes)
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def train_once(self) -> None:
        """Give the optimizer its state, like a step."""
        for parameter in self.model.parameters():
            moments = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}

    def mark(self, number: int) -> None:
        """Change a little of the state, so that each save can be recognized."""
        with torch.no_grad():
            next(self.model.parameters()).view(-1)[0] = float(number)
        for state in self.optimizer.state.values():
            state["step"].fill_(float(number))

    def state(self) -> dict[str, Any]:
        """Return what a script saves; the tensors are the ones that training changes."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the state, always in the same order."""
        own = [tensor for _, tensor in sorted(self.model.state_dict().items())]
        states = self.optimizer.state_dict()["state"]
        return own + [tensor for _, entry in sorted(states.items()) for _, tensor in sorted(entry.items())]

    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def digest(self) -> int:
        """Return a digest that is equal for identical states only, up to collisions of CRC-32."""
        crc = 0
        for tensor in self.tensors():
            crc = zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy().data, crc)
        return crc


def shape_for(size_bytes: int) -> tuple[int, int]:
    """Return width and number of layers of a model whose state has about that size."""
    width = 16
    while _BYTES_PER_WEIGHT * _LEAST_LAYERS * (2 * width) ** 2 <= size_bytes:
        width *= 2
    return width, max(1, round(size_bytes / (_BYTES_PER_WEIGHT * width * (width + 1))))


class Yardstick:
    """A memcpy of a rank's share of the state into warm memory: the time of a save that only copies."""

    def __init__(self, trainee: Trainee, world_size: int) -> None:
        share = trainee.tensors()[::world_size]
        self._pairs = [(tensor.detach(), torch.zeros_like(tensor)) for tensor in share]
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in share)
        self._scale = trainee.size_bytes() / world_size / size_bytes

    def copy_s(self) -> float:
        """Return the seconds for one copy, on one thread."""
        began_s = time.perf_counter()
        for source, target in self._pairs:
            target.copy_(source)
        return (time.perf_counter() - began_s) * self._scale


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of the loop, and their duration in seconds."""

    steps: int
    seconds: float


class Loop:
    """Steps of a few milliseconds that keep one core busy, each with an all-reduce if there are several ranks."""

    def __init__(self, world_size: int) -> None:
        layers = [nn.Linear(_STEP_WIDTH, _STEP_WIDTH) for _ in range(3)]
        self._model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._inputs = torch.randn(256, _STEP_WIDTH)
        self._gradients = torch.zeros(_REDUCED)
        self._world_size = world_size

    def step(self, flag: bool = False) -> bool:
        """Make a step; return whether any rank raised its flag."""
        loss = self._model(self._inputs).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        if self._world_size == 1:
            return flag
        self._gradients[0] = float(flag)
        dist.all_reduce(self._gradients, op=dist.ReduceOp.MAX)
        return bool(self._gradients[0])

    def run(self, over: Callable[[], bool]) -> Stretch:
        """Make steps until `over` is true on any rank; at least one. All ranks must call."""
        began_s, steps = time.perf_counter(), 0
        while True:
            steps += 1
            if self.step(over()):
                return Stretch(steps, time.perf_counter() - began_s)

    def run_for(self, seconds: float) -> Stretch:
        """Make steps for about that long."""
        until_s = time.perf_counter() + seconds
        return self.run(lambda: time.perf_counter() >= until_s)
