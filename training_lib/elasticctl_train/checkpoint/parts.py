"""What a run saves: the model, the optimizer and the others, by name, and how ranks share the writing of them."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from elasticctl_store.errors import RestoreError, TrainError
from elasticctl_train.checkpoint import dtensor, tree

_SHOWN = 4
_EXTRA = "_extra_state"
"""How the keys end under which `state_dict` has what `get_extra_state` returns: of any kind, another one each time."""


def module_mismatch(module: torch.nn.Module, state: Any) -> str:
    """What keeps `state` from being loaded into this module; empty: nothing.

    Tensors may be without data (on the meta device). A module that loads its state in a way of its own is not judged.
    """
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        return ""
    if not isinstance(state, Mapping):
        return f"it holds a {type(state).__name__} in its place"
    live = module.state_dict()
    differing = [
        f"{name} ({_shape(state[name])} in the checkpoint, {_shape(here)} here)"
        for name, here in live.items()
        if name in state and not name.endswith(_EXTRA) and _shape(state[name]) != _shape(here)
    ]
    found = [
        _counted("missing in it", [name for name in live if name not in state]),
        _counted("unexpected", [name for name in state if name not in live]),
        _counted("of another shape", differing),
    ]
    return "; ".join(text for text in found if text)


def optimizer_mismatch(optimizer: torch.optim.Optimizer, state: Any) -> str:
    """What keeps `state` from being loaded into this optimizer: other groups or parameters; empty: nothing."""
    try:
        there = [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError):
        return "what it holds in its place is no optimizer's state"
    here = [len(group["params"]) for group in optimizer.param_groups]
    if len(there) != len(here):
        return f"it has {len(there)} groups of parameters, this optimizer {len(here)}"
    differing = [
        f"group {index}: {a} in the checkpoint, {b} here"
        for index, (a, b) in enumerate(zip(there, here, strict=True))
        if a != b
    ]
    return f"numbers of parameters differ ({_listed(differing)})" if differing else ""


def optimizer_sharding(optimizer: torch.optim.Optimizer, state: Any) -> dict[str, Any]:
    """The optimizer's state as far as it is to be spread like the parameters: a sharded one in each tensor's place.

    An optimizer has no state before its first step, so this cannot be seen in the live one. States of another shape
    than their parameter (steps, factored moments) are whole on every rank.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    spread: dict[Any, dict[str, torch.Tensor]] = {}
    for index, entry in state["state"].items():
        parameter = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        if parameter is not None and dtensor.is_sharded(parameter) and isinstance(entry, Mapping):
            spread[index] = {key: parameter for key, value in entry.items() if _shape(value) == _shape(parameter)}
    return {"state": spread}


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _counted(what: str, names: list[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    return f"{len(names)} {verb} {what}: {_listed(names)}" if names else ""


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, …"


log = logging.getLogger("elasticctl_train")

MODEL = "model"
"""The part that training steps, in DistributedDataParallel where there are several ranks."""

OWN = "run"
"""The part of the state that is `Run`'s own: counters and the position in the data."""


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
        tree.Flattener().encode(part.state_dict(), name)


def rank_0_only(parts: Mapping[str, Stateful]) -> set[str]:
    """What rank 0 writes alone: all but what is equal on all ranks, optimizer states and the parameters they are of.

    A model's other parameters are equal too: DistributedDataParallel begins with rank 0's. Of a module beside it, an
    average of the weights mostly, nobody knows; many scripts keep that on rank 0 alone.
    """
    alone = {OWN}
    optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
    stepped = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            alone |= {f"{name}/{buffer}" for buffer, _ in part.named_buffers()}
            if name != MODEL:
                alone |= {f"{name}/{key}" for key, one in part.named_parameters() if id(one) not in stepped}
        elif not isinstance(part, torch.optim.Optimizer):
            alone.add(name)
    return alone


def check_fit(parts: Mapping[str, Stateful], state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check that a checkpoint's state can be loaded into the parts, before anything is changed.

    Tensors may be without data (on the meta device). `where` names the checkpoint; RestoreError, with what is missing,
    unexpected or of another shape, when it does not fit. Returns the live state as far as it is sharded.
    """
    live: dict[str, Any] = {}
    for name, part in parts.items():
        if name not in state:
            has = ", ".join(sorted(state.keys() - {OWN}))
            raise RestoreError(f"{where}: the checkpoint has no {name!r}, only {has}. FIX: use another storage URL")
        misfit = ""
        if isinstance(part, torch.nn.Module):
            misfit = module_mismatch(part, state[name])
            live[name] = part.state_dict() if dtensor.has_sharded(part) else {}
        elif isinstance(part, torch.optim.Optimizer):
            misfit = optimizer_mismatch(part, state[name])
            live[name] = {} if misfit else optimizer_sharding(part, state[name])
        if misfit:
            fix = "use another storage URL, or restore the code"
            raise RestoreError(f"{where}: the checkpoint does not fit this {name}: {misfit}. FIX: {fix}")
    return live


def load(parts: Mapping[str, Stateful], state: Mapping[str, Any], where: str) -> None:
    """Load a checkpoint's state into the parts; raises the errors of `check_fit`, before anything is changed."""
    check_fit(parts, state, where)
    for name, part in parts.items():
        try:
            part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise RestoreError(f"{where}: the checkpoint does not fit this {name}: {e}") from e
        if isinstance(part, torch.optim.Optimizer):
            # What a step sets. At the end of an epoch the next call is the scheduler's, and torch would warn, wrongly,
            # that the optimizer has made no step yet.
            part._opt_called = True  # type: ignore[attr-defined]
    for name in sorted(state.keys() - parts.keys() - {OWN}):
        log.warning("%s: the checkpoint also holds %r, which this run does not use and will not save", where, name)
