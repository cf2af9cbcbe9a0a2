"""Decide whether a checkpoint fits the script's objects, and load it into them.

All differences are found, and reported in one message, before anything is changed. The user chooses what happens then:

    strict        refuse
    ignore        load what fits, by name; leave the rest as the script has created it
    model-only    load the model's weights, and nothing else of the objects

If nothing differs, all three mean the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, get_args

import torch

from elasticctl_protocol import variables
from elasticctl_store.errors import RestoreError, TrainError
from elasticctl_train.checkpoint import dtensor
from elasticctl_train.checkpoint.optimizers import Pairs, counted, names
from elasticctl_train.checkpoint.parts import MODEL, OWN, Stateful, names_of_parameters

Choice = Literal["strict", "ignore", "model-only"]

_EXTRA = "_extra_state"
"""The suffix of keys in a `state_dict` that hold the result of `get_extra_state`, which may be any object."""
_FIX = "restore the code, or use another storage URL"
_CHOICES = f'{_FIX}, or set Run(…, resume=…) or ${variables.RESUME}: "ignore" loads what fits, "model-only" the weights'
_REFUSALS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError)


def parse_choice(value: str) -> Choice:
    """Return the choice of this name. Raises TrainError if there is none."""
    for choice in get_args(Choice):
        if value == choice:
            found: Choice = choice
            return found
    raise TrainError(f"resume={value!r}: give one of {', '.join(get_args(Choice))}")


class Comparison:
    """The differences between a checkpoint's state and the parts. Tensors may be without data (on the meta device)."""

    def __init__(self, parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
        self._parts, self._state = parts, state
        self._said = _description(state)
        known = names_of_parameters(parts) if any(map(_is_optimizer, parts.values())) else {}
        self._pairs = {
            name: Pairs(part, state[name], names(part, known), self._said.get(name, {}))
            for name, part in parts.items()
            if isinstance(part, torch.optim.Optimizer) and name in state
        }
        self.by_part = {name: self._mismatch(name, part) for name, part in parts.items() if name in state}
        self.lacking = [name for name in parts if name not in state]
        self.left_over = sorted((self._said.keys() & state.keys()) - parts.keys())

    def differences(self) -> str:
        """Return a description of all differences; "" if there are none."""
        found = [f"this {name}: {words}" for name, words in self.by_part.items() if words]
        has = ", ".join(sorted(self._state.keys() - {OWN})) or "nothing"
        found += [f"this run: the checkpoint has no {name!r}, only {has}" for name in self.lacking]
        found += [
            f"this run: the checkpoint also holds {name!r}, which this run no longer passes" for name in self.left_over
        ]
        return "; ".join(found)

    def sharded(self) -> dict[str, Any]:
        """Return the sharded part of the live state."""
        live: dict[str, Any] = {}
        for name, part in self._parts.items():
            if name in self._pairs:
                live[name] = self._pairs[name].sharding() if self._pairs[name].can_load else {}
            elif name in self._state and isinstance(part, torch.nn.Module):
                live[name] = part.state_dict() if dtensor.has_sharded(part) else {}
        return live

    def load(self, name: str) -> None:
        """Load one part's state, as far as it fits."""
        part = self._parts[name]
        if not self.by_part[name]:
            if name in self._pairs:
                self._load_optimizer(name)
            elif _is_judged(part):
                part.load_state_dict(self._state[name])
            else:
                part.load_state_dict(_where_they_are(self._state[name], part.state_dict()))
        elif isinstance(part, torch.nn.Module):
            self._load_what_fits(part, self._state[name])
        elif name in self._pairs and self._is_same_class(name, part) and self._pairs[name].can_load:
            self._load_optimizer(name)

    def _load_what_fits(self, module: torch.nn.Module, state: Any) -> None:
        if isinstance(state, Mapping):
            live = module.state_dict()
            common = (key for key in state if key in live)
            fits = {key: state[key] for key in common if _is_extra(key) or _shape(state[key]) == _shape(live[key])}
            module.load_state_dict(fits, strict=False)

    def _load_optimizer(self, name: str) -> None:
        pairs = self._pairs[name]
        but, recast, named = set(), set(), pairs.named()
        for number, parameter in pairs.parameters().items():
            module, _, key = named[number].partition("/")
            weights = self._state.get(module)
            saved = weights.get(key) if isinstance(weights, Mapping) else None
            if isinstance(saved, torch.Tensor) and saved.shape != parameter.shape:
                but.add(number)
            elif isinstance(saved, torch.Tensor) and saved.dtype != parameter.dtype:
                recast.add(number)
        pairs.load(but, recast)

    def _mismatch(self, name: str, part: Stateful) -> str:
        if isinstance(part, torch.nn.Module):
            return module_mismatch(part, self._state[name])
        if not self._is_same_class(name, part):
            return f"the checkpoint's is a {self._said[name]['class']}, this a {type(part).__qualname__}"
        return self._pairs[name].mismatch() if name in self._pairs else ""

    def _is_same_class(self, name: str, part: Stateful) -> bool:
        own = type(part).__qualname__
        return bool(self._said.get(name, {}).get("class", own) == own)


def check(
    parts: Mapping[str, Stateful], state: Mapping[str, Any], where: str, choice: Choice | None = None
) -> dict[str, Any]:
    """Check that a checkpoint's state can be loaded into the parts, before anything is changed.

    `where` names the checkpoint. Returns the sharded part of the live state. Raises RestoreError, with all differences,
    unless the `choice` allows them (None: strict, and the message does not mention choices).
    """
    return _checked(Comparison(parts, state), where, choice).sharded()


def load(parts: Mapping[str, Stateful], state: Mapping[str, Any], where: str, choice: Choice | None = None) -> str:
    """Load a checkpoint's state into the parts; return the differences that were ignored ("" if there are none).

    Raises RestoreError as `check` does, and if a part refuses its state: then the parts are as they were before.
    """
    found = _checked(Comparison(parts, state), where, choice)
    different = found.differences()
    wanted = [MODEL] if different and choice == "model-only" else [name for name in parts if name in state]
    # Parts with a load_state_dict of their own may refuse; load them first, while everything can still be undone.
    wanted.sort(key=lambda name: _is_judged(parts[name]))
    _load_in_order(parts, wanted, found.load, where)
    return different


def module_mismatch(module: torch.nn.Module, state: Any) -> str:
    """Return why `state` cannot be loaded into this module as it is; "" if it can.

    A module with a `load_state_dict` of its own is not checked.
    """
    if not _is_judged(module):
        return ""
    if not isinstance(state, Mapping):
        return f"it holds a {type(state).__name__} in its place"
    live = module.state_dict()
    common = [(name, state[name], here) for name, here in live.items() if name in state and not _is_extra(name)]
    shapes = [
        f"{name} ({_shape(there)} in the checkpoint, {_shape(here)} here)"
        for name, there, here in common
        if _shape(there) != _shape(here)
    ]
    dtypes = [
        f"{name} ({_dtype(there)} in the checkpoint, {_dtype(here)} here)"
        for name, there, here in common
        if _shape(there) == _shape(here) and _dtype(there) != _dtype(here)
    ]
    found = [
        counted("missing in it", [name for name in live if name not in state]),
        counted("unexpected", [name for name in state if name not in live]),
        counted("of another shape", shapes),
        counted("of another dtype", dtypes),
    ]
    return "; ".join(text for text in found if text)


def _checked(found: Comparison, where: str, choice: Choice | None) -> Comparison:
    different = found.differences()
    misfit = ""
    if choice == "model-only":
        misfit = f"this {MODEL}: {found.by_part[MODEL]}" if found.by_part.get(MODEL) else ""
    elif choice != "ignore":
        misfit = different
    if misfit:
        raise RestoreError(f"{where}: the checkpoint does not fit {misfit}. FIX: {_CHOICES if choice else _FIX}")
    return found


def _load_in_order(
    parts: Mapping[str, Stateful], wanted: list[str], load_one: Callable[[str], None], where: str
) -> None:
    before: dict[str, Any] = {}
    name, is_done = "", False
    try:
        for name in wanted:
            if not _is_judged(parts[name]):
                before[name] = copy.deepcopy(parts[name].state_dict())
            load_one(name)
        is_done = True
    except _REFUSALS as e:
        raise RestoreError(f"{where}: the checkpoint does not fit this {name}: {e}") from e
    finally:
        if not is_done:
            for name_before, state in before.items():
                with suppress(*_REFUSALS):
                    parts[name_before].load_state_dict(state)


def _where_they_are(saved: Any, live: Any) -> Any:
    """Return the saved value with each tensor on the device of its counterpart in `live`, if there is one.

    Modules and optimizers move what they load to where they need it; a class of the script's own may keep what it is
    given.
    """
    if isinstance(saved, torch.Tensor):
        return saved.to(live.device) if isinstance(live, torch.Tensor) else saved
    if isinstance(saved, dict) and isinstance(live, Mapping):
        found = saved.copy()
        for key, value in saved.items():
            found[key] = _where_they_are(value, live.get(key))
        return found
    if isinstance(saved, list | tuple) and isinstance(live, list | tuple):
        rest = [None] * (len(saved) - len(live))
        return type(saved)(map(_where_they_are, saved, [*live, *rest]))
    return saved


def _description(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `Describer` recorded about the saved parts; empty for checkpoints of earlier versions and of
    hooks."""
    own = state.get(OWN)
    said = own.get("parts") if isinstance(own, Mapping) else None
    return said if isinstance(said, Mapping) and all(isinstance(one, Mapping) for one in said.values()) else {}


def _is_optimizer(part: Stateful) -> bool:
    return isinstance(part, torch.optim.Optimizer)


def _is_judged(part: Stateful) -> bool:
    """Return whether it can be known in advance that the part accepts its state."""
    if isinstance(part, torch.nn.Module):
        return type(part).load_state_dict is torch.nn.Module.load_state_dict
    return isinstance(part, torch.optim.Optimizer)


def _is_extra(name: str) -> bool:
    return name.endswith(_EXTRA)


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
