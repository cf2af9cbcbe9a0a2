"""What a run saves: the model, the optimizer and the others, by name, and what is said of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from elasticctl_store.errors import TrainError
from elasticctl_train.checkpoint import optimizers, tree

MODEL = "model"
"""The part that training steps, in DistributedDataParallel where there are several ranks."""

OWN = "run"
"""The part of the state that is `Run`'s own: counters, the position in the data, and what `describe` says."""


class Stateful(Protocol):
    """Anything whose state a checkpoint can hold: a model, an optimizer, a scheduler, a GradScaler, …"""

    def state_dict(self) -> Any:
        """Return the state as a tree of dicts, lists, numbers, text and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over such a state."""


def layers(part: Any) -> Iterator[Any]:
    """A part, and what DistributedDataParallel, DataParallel and torch.compile have wrapped in it, outermost first."""
    while True:
        yield part
        if isinstance(part, DistributedDataParallel | torch.nn.DataParallel):
            part = part.module
        elif is_compiled(part):
            part = part._orig_mod
        else:
            return


def is_compiled(part: object) -> bool:
    """Has `torch.compile` made this of a module? It lies in a part of torch that takes long to import."""
    home = sys.modules.get("torch._dynamo.eval_frame")
    return home is not None and isinstance(part, home.OptimizedModule)


def unwrap(**given: Stateful | None) -> dict[str, Stateful]:
    """The parts that were given, unwrapped: so a checkpoint fits one rank and many, compiled or not."""
    if OWN in given:
        raise TrainError(f"Run(…, {OWN}=…): this name is taken. FIX: choose another")
    return {name: deque(layers(part), maxlen=1)[0] for name, part in given.items() if part is not None}


def check(parts: Mapping[str, Stateful]) -> None:
    """Raise StateError now rather than at the first save when a part holds what a checkpoint cannot."""
    for name, part in parts.items():
        tree.check_part_name(name)
        tree.Flattener().encode(part.state_dict(), name, depth=1)


def rank_0_only(parts: Mapping[str, Stateful]) -> set[str]:
    """What rank 0 writes alone: all but what is equal on all ranks, optimizer states and the parameters they are of.

    A model's other parameters are equal too: DistributedDataParallel begins with rank 0's. Of a module beside it, an
    average of the weights mostly, nobody knows; many scripts keep that on rank 0 alone.
    """
    alone = {OWN}
    stepped = _stepped(parts)
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            alone |= {f"{name}/{buffer}" for buffer, _ in part.named_buffers()}
            if name != MODEL:
                alone |= {f"{name}/{key}" for key, one in part.named_parameters() if id(one) not in stepped}
        elif not isinstance(part, torch.optim.Optimizer):
            alone.add(name)
    return alone


def all_stepped(parts: Mapping[str, Stateful]) -> bool:
    """Is each parameter of the model that has gradients stepped by one of these optimizers?"""
    model, stepped = parts[MODEL], _stepped(parts)
    trained = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return all(id(one) in stepped for one in trained if one.requires_grad)


def _stepped(parts: Mapping[str, Stateful]) -> set[int]:
    """The ids of the parameters that these optimizers step."""
    optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
    return {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}


def until_step(parts: Mapping[str, Stateful]) -> set[str]:
    """The parts whose tensors nothing but a step of theirs writes to."""
    return {name for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}


class Frozen:
    """Which of a model's parameters have been frozen, or thawed, since this process has begun."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._at_first = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]

    def changed(self) -> dict[str, bool]:
        """Whether each of them is frozen now, by name; the others are as the script begins with them."""
        return {
            name: not each.requires_grad for name, each, at_first in self._at_first if each.requires_grad != at_first
        }

    def put_back(self, changed: Mapping[str, bool]) -> None:
        """Freeze and thaw as in another process: a script mostly does so once, in an epoch that is over by now."""
        for name, parameter, _ in self._at_first:
            if name in changed:
                parameter.requires_grad_(not changed[name])


def names_of_parameters(parts: Mapping[str, Stateful]) -> dict[int, str]:
    """The names, with that of their part, of all modules' parameters by id; of several names the first in the alphabet.

    So it does not matter which of two layers that share a parameter comes first.
    """
    known: dict[int, str] = {}
    for part, module in parts.items():
        if isinstance(module, torch.nn.Module):
            for key, parameter in module.named_parameters(remove_duplicate=False):
                name = f"{part}/{key}"
                known[id(parameter)] = min(name, known.get(id(parameter), name))
    return known


class Describer:
    """Says what the parts are, for `fitting` to compare: their classes, and the names of optimizers' parameters."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = parts
        self._seen: list[list[list[int]]] = []
        self._said: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """The description, as JSON data; made anew for new parameters only, for to walk through a model takes long.

        How states are spread is looked at each time: there are none before an optimizer's first step.
        """
        stepping = [part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer)]
        seen = [[[id(one) for one in group["params"]] for group in each.param_groups] for each in stepping]
        if seen != self._seen or not self._said:
            known = names_of_parameters(self._parts)
            self._seen, self._said = seen, {name: _describe(part, known) for name, part in self._parts.items()}
        known_states = {
            name: {**self._said[name], "spreads": spread}
            for name, part in self._parts.items()
            if isinstance(part, torch.optim.Optimizer) and (spread := optimizers.spreads(part))
        }
        return self._said | known_states if known_states else self._said


def _describe(part: Stateful, known: Mapping[int, str]) -> dict[str, Any]:
    said: dict[str, Any] = {"class": type(part).__qualname__}
    if isinstance(part, torch.optim.Optimizer):
        said["names"] = optimizers.names(part, known)
    return said
