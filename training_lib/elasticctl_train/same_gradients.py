"""Do all ranks apply the same gradients, at the same times?

A script that calls the bare model in training, or trains a second model that nobody has wrapped, trains another model
on each rank, without a word: checkpoints hold that of one of them. The gradients that optimizers apply tell. So does a
script that counts its batches to tell when an optimizer or a scheduler is due, once a new worker, which counts from 0,
has joined ranks that train.
"""

from __future__ import annotations

import functools
import logging
import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from elasticctl_train.checkpoint import dtensor
from elasticctl_train.dist import World

log = logging.getLogger("elasticctl_train")

_STEPS = 3
"""In so many steps of each group it is looked."""
_PARAMETERS, _ELEMENTS = 32, 64
"""Of each optimizer so many parameters are looked at, and so many elements of each."""
_ALIKE = 1e-2
"""What ranks compute with the same gradients, such as the norm by which they are clipped, may differ a little."""

_RATES = 16
"""Of each optimizer the learning rates of so many parameter groups are compared."""


class OptimizerCalls:
    """The steps of the optimizers among `parts`: whether gradients wait for one, and whether all ranks make the same.

    `digest` stands for all steps since `begin`, and for the learning rates in them; 0 if they are not to be compared.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
        self._calls = [0] * len(self._optimizers)
        self._is_called = self._is_compared = False
        self._versions: list[int] | None = None
        self.digest = 0
        try:
            for number, optimizer in enumerate(self._optimizers):
                optimizer.register_step_pre_hook(partial(self._note, number))
        except AttributeError:  # what wraps an optimizer may take no hooks
            self._optimizers = []
        for part in parts.values():
            if isinstance(part, torch.amp.GradScaler):
                self._note_calls_of(part)

    def begin(self, *, is_compared: bool) -> None:
        """A group begins. `is_compared`: some of its ranks may count the script's batches from another one."""
        self._is_compared, self.digest = is_compared, 0
        self._forget()

    def are_awaited(self) -> bool:
        """Return whether there are gradients, and no optimizer was called since the end of the last step.

        The script then accumulates gradients. Return False if parameters change without these optimizers.
        """
        if self._is_called:
            return False
        parameters = [one for each in self._optimizers for group in each.param_groups for one in group["params"]]
        before, self._versions = self._versions, [parameter._version for parameter in parameters]
        is_changed = before is not None and before != self._versions
        return not is_changed and any(parameter.grad is not None for parameter in parameters)

    def end_step(self) -> None:
        """Record that the step has been made."""
        if self._is_compared:
            rates = [_rates(optimizer) for optimizer in self._optimizers]
            self.digest = zlib.crc32(repr((self._calls, rates)).encode(), self.digest)
        if self._is_called:
            self._forget()

    def _forget(self) -> None:
        self._calls, self._is_called, self._versions = [0] * len(self._calls), False, None

    def _note(self, number: int, *_: Any) -> None:
        self._calls[number] += 1
        self._is_called = True
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._optimizers = []  # a CUDA graph makes the steps from now on, and calls nobody

    def _note_calls_of(self, scaler: torch.amp.GradScaler) -> None:
        """It calls no optimizer if a gradient is infinite; the script is done with those gradients all the same."""
        make_step = scaler.step

        @functools.wraps(make_step)
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._is_called = True
            return make_step(optimizer, *args, **kwargs)

        scaler.step = step  # type: ignore[method-assign]


def _rates(optimizer: torch.optim.Optimizer) -> list[str]:
    """The learning rates, without the digits in which machines may differ. Those in tensors are not read."""
    found = [group.get("lr") for group in optimizer.param_groups[:_RATES]]
    return [f"{rate:.6g}" if isinstance(rate, int | float) else "" for rate in found]


class AppliedGradients:
    """Warns, once, about an optimizer among `parts` whose gradients nobody has averaged."""

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        self._hooks: list[Any] = []
        self._seen: dict[str, torch.Tensor] = {}
        self._left = 0
        self._has_warned = False

    def begin(self) -> None:
        """A group begins."""
        self._left, self._seen = _STEPS, {}
        if self._hooks:
            return
        for name, optimizer in self._optimizers.items():
            with suppress(AttributeError):  # what wraps an optimizer may take no hooks
                # After the step, because a closure computes the gradients within it.
                self._hooks.append(optimizer.register_step_post_hook(self._look(name)))

    def compare(self, world: World) -> None:
        """A step has been made. All ranks must call. Raises RuntimeError if a peer is lost."""
        if not self._left:
            return
        self._left -= 1
        seen, self._seen = {name: numbers.tolist() for name, numbers in self._seen.items()}, {}
        if not self._left:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        found = world.gather(seen)
        names = [name for name in self._optimizers if not all(_alike(found[0], each, name) for each in found)]
        if names and world.rank == 0 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: the gradients that it applies differ between ranks, for nobody averages them: each rank trains a "
                "model of its own. FIX: call run.model in training, not the bare model, and wrap any other model that "
                "you train in DistributedDataParallel, behind Run(…)",
                ", ".join(names),
            )

    def _look(self, name: str) -> Any:
        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            numbers = _sample(optimizer)
            if numbers is not None:
                self._seen[name] = numbers

        return look


def _sample(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """A number of each of some parameters, which says how large their gradients are; None where there are none."""
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    dense = [each.detach() for each in gradients if each is not None and not each.is_sparse]
    whole = [each for each in dense if each.numel() and not dtensor.is_sharded(each)]
    if not whole:
        return None
    return torch.stack([_first(each).abs().sum(dtype=torch.float32).cpu() for each in _spread(whole)])


def _spread(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return gradients[:: math.ceil(len(gradients) / _PARAMETERS)]


def _first(gradient: torch.Tensor) -> torch.Tensor:
    """Some elements, without a copy of the others."""
    while gradient.dim() > 1:
        gradient = gradient[0]
    return gradient.reshape(-1)[:_ELEMENTS]


def _alike(one: Mapping[str, list[float]], other: Mapping[str, list[float]], name: str) -> bool:
    """Have two ranks seen the same of an optimizer? Numbers that are not finite tell nothing."""
    if not (name in one and name in other and len(one[name]) == len(other[name])):
        return name not in one and name not in other
    pairs = [pair for pair in zip(one[name], other[name], strict=True) if all(map(math.isfinite, pair))]
    return all(math.isclose(*pair, rel_tol=_ALIKE, abs_tol=1e-12) for pair in pairs)
