"""Do all ranks train the same model, on the same data?

A script may have ranks train different models, and nothing fails: checkpoints hold that of one of them. It calls the
bare model in training, or trains a second model that nothing has wrapped: then optimizers apply different gradients. Or
it counts its batches to tell when an optimizer or a scheduler is due, and a new worker, which counts from 0, has joined
ranks that train: then optimizers make different steps. Or ranks leave a loop over batches at different times.
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

from elasticctl_store.errors import TrainError
from elasticctl_train.checkpoint import dtensor
from elasticctl_train.data.sample_order import Cursor
from elasticctl_train.dist import World

log = logging.getLogger("elasticctl_train")

_STEPS = 3
"""In how many of the first steps of each group gradients are compared."""
_PARAMETERS, _ELEMENTS = 32, 64
"""How many parameters of each optimizer are compared, and how many elements of each."""
_ALIKE = 1e-2
"""What ranks compute with the same gradients, such as the norm by which they are clipped, may differ a little."""
_RATES = 16
"""How many of the parameter groups of each optimizer have their learning rates compared."""

COUNTS_DIFFER = (
    "since a new worker joined, ranks step their optimizers at different times or at different learning rates, so that "
    "each trains its own model: the script uses its own count of steps, which starts from 0 in a new process. FIX: "
    "use run.steps_done"
)


def compare_places(world: World, cursor: Cursor, digest: int) -> bool:
    """Return whether `digest`, of the steps of optimizers, is the same on all ranks, which must all call this.

    Raises TrainError, on all ranks, if some have left a loop over batches that others are still in.
    """
    here = cursor.epoch, cursor.position, digest
    last_epoch, last, highest, *lowest = world.highest(*here, *(-number for number in here))
    first_epoch, first, other = (-number for number in lowest)
    if (first_epoch, first) != (last_epoch, last):
        raise TrainError(
            f"after step {cursor.step}, the ranks are at different positions in the data: in epoch {first_epoch} and "
            f"{last_epoch}, at sample {first} and {last}. FIX: leave the loop over the batches on all ranks in the same"
            " step, by run.steps_done or a value that they share, not by a count of a rank's own batches or by its own "
            "loss"
        )
    return highest == other


class OptimizerCalls:
    """The steps of the optimizers among `parts`: whether gradients wait for one, and whether all ranks make the same.

    `digest` stands for all steps since `enter_group`, and for the learning rates in them; 0 if they are not to be
    compared.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
        self._calls = [0] * len(self._optimizers)
        self._is_called = self._is_compared = False
        self._versions: list[int] | None = None
        self.digest = 0
        try:
            for number, optimizer in enumerate(self._optimizers):
                optimizer.register_step_pre_hook(partial(self._count_step, number))
        except AttributeError:  # what wraps an optimizer may take no hooks
            self._optimizers = []
        for part in parts.values():
            if isinstance(part, torch.amp.GradScaler):
                self._count_calls_of(part)

    def enter_group(self, *, is_compared: bool) -> None:
        """A group begins. `is_compared`: some of its ranks may count the script's batches from another one."""
        self._is_compared, self.digest = is_compared, 0
        self._begin_step()

    def record_skipped(self) -> None:
        """Record that the script has stepped an optimizer in a lost step: it is done with those gradients."""
        self._is_called = True

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
            self._begin_step()

    def _begin_step(self) -> None:
        self._calls, self._is_called, self._versions = [0] * len(self._calls), False, None

    def _count_step(self, number: int, *_: Any) -> None:
        self._calls[number] += 1
        self._is_called = True
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._optimizers = []  # a CUDA graph makes the steps from now on, and calls no hook

    def _count_calls_of(self, scaler: torch.amp.GradScaler) -> None:
        """Record the scaler's calls: if a gradient is infinite, it calls no optimizer, but gradients are used up."""
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
    """Warns, once, about an optimizer among `parts` whose gradients are not averaged over the ranks."""

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        self._hooks: list[Any] = []
        self._seen: dict[str, torch.Tensor] = {}
        self._left = 0
        self._has_warned = False

    def enter_group(self) -> None:
        """A group begins."""
        self._left, self._seen = _STEPS, {}
        if self._hooks:
            return
        for name, optimizer in self._optimizers.items():
            with suppress(AttributeError):  # what wraps an optimizer may take no hooks
                # After the step, because a closure computes the gradients within it.
                self._hooks.append(optimizer.register_step_post_hook(self._sample_of(name)))

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
                "%s: ranks apply different gradients, because they are not averaged: each rank trains a model of its "
                "own. FIX: call run.model in training, not the bare model, and wrap any other model that "
                "you train in DistributedDataParallel, after Run(…)",
                ", ".join(names),
            )

    def _sample_of(self, name: str) -> Any:
        def sample(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            numbers = _sample(optimizer)
            if numbers is not None:
                self._seen[name] = numbers

        return sample


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
    """Return whether two ranks have seen the same of an optimizer. Numbers that are not finite do not count."""
    if not (name in one and name in other and len(one[name]) == len(other[name])):
        return name not in one and name not in other
    pairs = [pair for pair in zip(one[name], other[name], strict=True) if all(map(math.isfinite, pair))]
    return all(math.isclose(*pair, rel_tol=_ALIKE, abs_tol=1e-12) for pair in pairs)
