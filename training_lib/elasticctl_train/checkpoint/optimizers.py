"""Restore the states of optimizers as they were, to the parameters that they belong to.

torch numbers the parameters in a state, so a state fits any optimizer with the same number of them. With the names that
`names` returns, each state finds its parameter, regardless of the script's order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from elasticctl_train.checkpoint import dtensor

Names = Sequence[Sequence[str]]
"""The names of an optimizer's parameters by group."""
_SHOWN = 4
"""How many names a message lists."""


def names(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> Names:
    """Return the names of its parameters; `known` has those of all modules' parameters, by id. Others are numbered."""
    unnamed = 0
    found: list[list[str]] = []
    for group in optimizer.param_groups:
        found.append([])
        for parameter in group["params"]:
            name = known.get(id(parameter))
            if name is None:
                name, unnamed = f"#{unnamed}", unnamed + 1
            found[-1].append(name)
    return found


def spreads(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Return the states of sharded parameters with a layout of their own, as rows (number, key, layout).

    A layout is the dimension that each dimension of the mesh shards (see `dtensor.sharded_dims`); None: a plain tensor.
    """
    found: list[list[Any]] = []
    for number, parameter in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        entry = optimizer.state.get(parameter)
        if not dtensor.is_sharded(parameter) or not isinstance(entry, Mapping):
            continue
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor) or not isinstance(key, str):
                continue
            if not dtensor.is_sharded(value):
                found += [[number, key, None]] if value.shape == parameter.shape else []
            elif value.shape != parameter.shape or dtensor.placements(value) != dtensor.placements(parameter):
                found.append([number, key, dtensor.sharded_dims(value)])
    return found


class Pairs:
    """Which parameter of an optimizer each number in a state stands for."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, state: Any, here: Names, said: Mapping[str, Any] | None = None
    ) -> None:
        """`said` is what was saved with it as `names` and as `spreads`.

        Without the names, parameters are matched by position; without the spreads, states of a parameter's shape are
        sharded like it.
        """
        said = said or {}
        there: Any = said.get("names")
        self._optimizer, self._state, self._here = optimizer, state, here
        self._spread = _parse_spreads(said.get("spreads"))
        self._groups = _numbers_by_group(state)
        lengths = [len(group) for group in self._groups or ()]
        is_named = _are_names(there) and [len(group) for group in there] == lengths
        self._there: Names | None = there if is_named else None

    def mismatch(self) -> str:
        """Return why the state cannot be loaded: other groups or parameters; "" if it can."""
        if self._groups is None:
            return "what it holds in its place is not the state of an optimizer"
        if self._there is None:
            return _mismatch_of_counts([len(group) for group in self._groups], [len(group) for group in self._here])
        there, here = _group_by_name(self._there), _group_by_name(self._here)
        common = [name for name in here if name in there]
        moved = [
            f"{name} ({there[name]} in the checkpoint, {here[name]} here)"
            for name in common
            if there[name] != here[name]
        ]
        found = [
            counted("missing in it", [name for name in here if name not in there]),
            counted("unexpected", [name for name in there if name not in here]),
            f"in another group of parameters: {listed(moved)}" if moved else "",
        ]
        if isinstance(self._optimizer, torch.optim.LBFGS) and list(there) != list(here) and not any(found):
            found.append("its parameters have another order, and LBFGS keeps them all in one vector")
        return "; ".join(text for text in found if text)

    @property
    def can_load(self) -> bool:
        """Whether it is known which parameter is which, at least for some of them."""
        if self._groups is None:
            return False
        return self._there is not None or not self.mismatch()

    def named(self) -> dict[int, str]:
        """Return number in the state -> name, for the parameters that exist here."""
        here = list(chain.from_iterable(self._here))
        return {number: here[place] for number, place in self._places().items()}

    def parameters(self) -> dict[int, torch.Tensor]:
        """Return number in the state -> parameter, for the parameters that exist here."""
        live = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return {number: live[place] for number, place in self._places().items()}

    def sharding(self) -> dict[str, Any]:
        """Return the state with the sharded parameter in place of each tensor that is sharded like it.

        An optimizer has no state before its first step, so this cannot be seen in the live one. States with another
        shape than their parameter (steps, factored moments) are complete on every rank, unless `spreads` said so.
        """
        spread: dict[Any, dict[str, torch.Tensor]] = {}
        for number, parameter in self.parameters().items():
            entry = self._state["state"].get(number)
            if dtensor.is_sharded(parameter) and isinstance(entry, Mapping):
                tensors = ((key, value) for key, value in entry.items() if isinstance(value, torch.Tensor))
                found = ((key, self._like(number, key, value, parameter)) for key, value in tensors)
                spread[number] = {key: like for key, like in found if like is not None}
        return {"state": spread}

    def _like(self, number: int, key: Any, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with the layout for this state of a sharded parameter; None if it is not sharded."""
        if (number, key) not in self._spread:
            return parameter if value.shape == parameter.shape else None
        dims = self._spread[number, key]
        if dims is None or not all(dim is None or dim < value.dim() for dim in dims):
            return None
        like: torch.Tensor = dtensor.stand_in(parameter, value.shape, value.dtype, dims)
        return like

    def load(self, but: Collection[int] = (), recast: Collection[int] = ()) -> None:
        """Load the state of the parameters that exist here, except the numbers in `but`.

        torch casts all floating-point states except `step` to their parameter's dtype. For half-precision and double
        parameters, some optimizers (ASGD, NAdam) keep others in float32: these keep their saved dtype, except for the
        numbers in `recast`, whose parameters now have another dtype.
        """
        places = {number: place for number, place in self._places().items() if number not in but}
        self._optimizer.load_state_dict(self._arranged(places))
        if type(self._optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            for number, parameter in self.parameters().items():
                entry = self._state["state"].get(number)
                if number in places and number not in recast and parameter in self._optimizer.state:
                    self._optimizer.state[parameter] = _as_saved(self._optimizer.state[parameter], entry)
        # A step sets this. At the end of an epoch the scheduler is called next, and torch would warn, wrongly, that the
        # optimizer has not made a step yet.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _places(self) -> dict[int, int]:
        """Return number in the state -> position of the parameter here, counted over all groups."""
        numbers = list(chain.from_iterable(self._groups or ()))
        if self._there is None:
            return {number: place for place, number in enumerate(numbers)}
        here = {name: place for place, name in enumerate(chain.from_iterable(self._here))}
        named = zip(numbers, chain.from_iterable(self._there), strict=True)
        return {number: here[name] for number, name in named if name in here}

    def _arranged(self, places: Mapping[int, int]) -> dict[str, Any]:
        """Return the state, numbered by positions here. A group whose parameters formed one group gets its saved
        options."""
        start, groups = 0, []
        for index, live in enumerate(self._optimizer.param_groups):
            numbers = list(range(start, start + len(live["params"])))
            start += len(numbers)
            saved = self._state["param_groups"][index] if index < len(self._groups or ()) else None
            options = live if saved is None or self._is_remade(index) else saved
            groups.append({**options, "params": numbers})
            if "param_names" in live:
                groups[-1]["param_names"] = live["param_names"]
            else:
                groups[-1].pop("param_names", None)
        state = self._state["state"]
        numbered = set(chain.from_iterable(self._groups or ()))
        entries = {key: value for key, value in state.items() if key not in numbered}
        entries |= {place: state[number] for number, place in places.items() if number in state}
        return {**self._state, "state": entries, "param_groups": groups}

    def _is_remade(self, index: int) -> bool:
        """Return whether this group has parameters that were in another one."""
        if self._there is None:
            return False
        there = _group_by_name(self._there)
        return bool(self._here[index]) and {there.get(name, index) for name in self._here[index]} != {index}


def _group_by_name(by_group: Names) -> dict[str, int]:
    return {name: index for index, group in enumerate(by_group) for name in group}


def _numbers_by_group(state: Any) -> list[list[int]] | None:
    """Return the numbers of the parameters; None if this is not the state of an optimizer."""
    try:
        groups = [list(group["params"]) for group in state["param_groups"]]
        is_known = isinstance(state["state"], Mapping) and all(type(one) is int for one in chain.from_iterable(groups))
    except (KeyError, TypeError):
        return None
    return groups if is_known else None


def _parse_spreads(value: Any) -> dict[tuple[int, str], list[int | None] | None]:
    """Parse what `spreads` has returned, as far as it is valid."""
    found: dict[tuple[int, str], list[int | None] | None] = {}
    for row in value if isinstance(value, list) else ():
        if isinstance(row, list) and len(row) == 3 and type(row[0]) is int and type(row[1]) is str:
            number, key, dims = row
            if dims is None or (isinstance(dims, list) and all(_is_dim(dim) for dim in dims)):
                found[number, key] = dims
    return found


def _is_dim(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, list) and all(isinstance(name, str) for name in group) for group in value
    )


def _mismatch_of_counts(there: Sequence[int], here: Sequence[int]) -> str:
    if len(there) != len(here):
        return f"it has {len(there)} groups of parameters, this optimizer {len(here)}"
    differing = [
        f"group {index}: {a} in the checkpoint, {b} here"
        for index, (a, b) in enumerate(zip(there, here, strict=True))
        if a != b
    ]
    return f"numbers of parameters differ ({listed(differing)})" if differing else ""


def _as_saved(live: Any, saved: Any) -> Any:
    """Return what was loaded, with the dtypes that were saved."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return live if live.dtype == saved.dtype else saved.to(live.device)
    if isinstance(live, dict) and isinstance(saved, Mapping):
        for key in live.keys() & saved.keys():
            live[key] = _as_saved(live[key], saved[key])
    elif type(live) in (list, tuple) and isinstance(saved, list | tuple) and len(live) == len(saved):
        return type(live)(_as_saved(a, b) for a, b in zip(live, saved, strict=True))
    return live


def counted(what: str, names: Sequence[str]) -> str:
    """Return how many names are `what`, and the first of them; "" if there are none."""
    verb = "is" if len(names) == 1 else "are"
    return f"{len(names)} {verb} {what}: {listed(names)}" if names else ""


def listed(names: Sequence[str]) -> str:
    """Return the first of these names."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, …"
