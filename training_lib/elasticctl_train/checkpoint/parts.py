"""What a run saves: the model, the optimizer and other parts, by name, and their description."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from elasticctl_store.errors import StateError, TrainError
from elasticctl_train.checkpoint import optimizers, plans, tree
from elasticctl_train.dist import World

MODEL = "model"
"""The part that is trained, in DistributedDataParallel if there are several ranks."""

OWN = "run"
"""The part of the state that belongs to `Run`: counters, the position in the data, and the result of `Describer`."""

_SAMPLED = 64
"""How many elements of each parameter are compared to tell whether it has changed."""


class Stateful(Protocol):
    """Any object whose state a checkpoint can hold: a model, an optimizer, a scheduler, a GradScaler, …"""

    def state_dict(self) -> Any:
        """Return the state as a tree of dicts, lists, numbers, text and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore such a state."""


def layers(part: Any) -> Iterator[Any]:
    """Yield a part, and what DistributedDataParallel, DataParallel and torch.compile have wrapped in it, outermost
    first."""
    while True:
        yield part
        if isinstance(part, DistributedDataParallel | torch.nn.DataParallel):
            part = part.module
        elif is_compiled(part):
            part = part._orig_mod
        else:
            return


def is_parallel(model: torch.nn.Module) -> bool:
    """Return whether a model is in DistributedDataParallel."""
    return any(isinstance(layer, DistributedDataParallel) for layer in layers(model))


def is_compiled(part: object) -> bool:
    """Return whether `torch.compile` wraps this module. Does not import its implementation, which takes long."""
    home = sys.modules.get("torch._dynamo.eval_frame")
    return home is not None and isinstance(part, home.OptimizedModule)


def unwrap(**given: Stateful | None) -> dict[str, Stateful]:
    """Return the given parts, unwrapped, so that a checkpoint fits one rank and many, compiled or not."""
    if OWN in given:
        raise TrainError(f"Run(…, {OWN}=…): this name is taken. FIX: choose another")
    return {name: deque(layers(part), maxlen=1)[0] for name, part in given.items() if part is not None}


def check(parts: Mapping[str, Stateful]) -> None:
    """Raise StateError now, rather than at the first save, if a part holds what a checkpoint cannot."""
    for name, part in parts.items():
        tree.check_part_name(name)
        if why := _why_not(part):
            raise StateError(f"{name}: {why}")
        tree.Flattener().encode(part.state_dict(), name, depth=1)


def _why_not(part: Stateful) -> str:
    """Return why no checkpoint can hold this kind of part, which gathers its state in a way of its own; else ""."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(part, zero.ZeroRedundancyOptimizer):
        return (
            "a checkpoint cannot hold a ZeroRedundancyOptimizer, whose ranks each have another part of the state. FIX: "
            "shard the model with fully_shard (FSDP2), and its optimizer's state is sharded too; or use the optimizer "
            "in it alone"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    modules = part.modules() if fsdp is not None and isinstance(part, torch.nn.Module) else ()
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
        return "a checkpoint cannot hold a model in FullyShardedDataParallel. FIX: use fully_shard (FSDP2)"
    return ""


def check_alike(parts: Mapping[str, Stateful], world: World) -> None:
    """Raise StateError, on all ranks, unless their models have the same tensors with the same layouts."""
    flat = tree.Flattener()
    flat.encode(parts[MODEL].state_dict(), MODEL)
    if len(set(world.gather(plans.fingerprint(flat.tensors)))) > 1:
        raise StateError(
            f"{MODEL}: the ranks' models differ in names, shapes or shards of tensors, and a checkpoint holds one. "
            "FIX: give all ranks the same model (no stages of a pipeline), over one mesh of all ranks or slices of it "
            '(init_device_mesh, mesh["tp"])'
        )


def rank_0_only(parts: Mapping[str, Stateful]) -> set[str]:
    """Return what only rank 0 writes: everything except what is known to be equal on all ranks.

    Optimizer states and the parameters that they belong to are equal, and so are a model's other parameters, because
    DistributedDataParallel broadcasts them from rank 0. A module next to the model, typically an average of its
    weights, may differ; many scripts keep it on rank 0 only.
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
    """Return whether one of these optimizers updates each of the model's parameters that requires gradients."""
    model, stepped = parts[MODEL], _stepped(parts)
    trained = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return all(id(one) in stepped for one in trained if one.requires_grad)


def _stepped(parts: Mapping[str, Stateful]) -> set[int]:
    """Return the ids of the parameters that these optimizers update."""
    optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
    return {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}


def until_step(parts: Mapping[str, Stateful]) -> set[str]:
    """Return the parts whose tensors only change in a step of their own."""
    return {name for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}


def sample(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first elements of each parameter, as bytes, to tell whether it has changed."""
    return [one.detach().reshape(-1)[:_SAMPLED].clone().view(torch.uint8) for one in parameters]


class Frozen:
    """Which of a model's parameters have been frozen or unfrozen since this process started."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._at_first = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]

    def changed(self) -> dict[str, bool]:
        """Return, by name, whether each of them is frozen now; the others are as when the script started."""
        return {
            name: not each.requires_grad for name, each, at_first in self._at_first if each.requires_grad != at_first
        }

    def put_back(self, changed: Mapping[str, bool]) -> None:
        """Freeze and unfreeze as in another process, because scripts typically do so only once, in an epoch that is
        over."""
        for name, parameter, _ in self._at_first:
            if name in changed:
                parameter.requires_grad_(not changed[name])


def names_of_parameters(parts: Mapping[str, Stateful]) -> dict[int, str]:
    """Return id -> name, prefixed with that of its part, of all modules' parameters; of several names, the first in the
    alphabet.

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
    """Describes the parts for `compatibility` to compare: their classes, and the names of optimizers' parameters."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = parts
        self._seen: list[list[list[int]]] = []
        self._said: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return the description as JSON data.

        It is only computed for new parameters, because traversing a model takes long. The layout of states is read each
        time, because there are none before an optimizer's first step.
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
