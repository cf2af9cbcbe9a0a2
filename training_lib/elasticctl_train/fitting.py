"""Does a checkpoint fit the live objects? Found out from names and shapes alone, before anything is read or changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elasticctl_train import shards

_SHOWN = 4
_EXTRA = "_extra_state"
"""How the keys end under which `state_dict` has what `get_extra_state` returns: of any kind, another one each time."""


def of_module(module: torch.nn.Module, state: Any) -> str:
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


def of_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> str:
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


def spread_of(optimizer: torch.optim.Optimizer, state: Any) -> dict[str, Any]:
    """The optimizer's state as far as it is to be spread like the parameters: a sharded one in each tensor's place.

    An optimizer has no state before its first step, so this cannot be seen in the live one. States of another shape
    than their parameter (steps, factored moments) are whole on every rank.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    spread: dict[Any, dict[str, torch.Tensor]] = {}
    for index, entry in state["state"].items():
        parameter = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        if parameter is not None and shards.is_sharded(parameter) and isinstance(entry, Mapping):
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
