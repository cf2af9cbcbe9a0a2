"""State that a script has not passed to `Run`: learning-rate schedulers, and averages or other copies of its models.

No checkpoint has it, and no new worker receives it, so it begins anew whenever the script starts, while the rest
continues. Nothing fails then: the rest of the training has other learning rates, or the average forgets what was.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

_DEPTH = 3
"""How deep to look into a part: a class of the script's own may hold schedulers, in a list for example."""
_SAMPLED = 64
"""How many elements of each parameter are compared to tell whether it has changed."""


class Unsaved:
    """Finds state that belongs to `parts` and that none of them holds, in the first two steps of a process.

    Before that, the script may not have created it yet. A copy of a model may be there only to be compared with, so it
    counts if the second step changes it. An `AveragedModel` counts at once, because an average may begin late.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._looks = 0
        self._copies: list[tuple[weakref.ref[torch.nn.Module], list[torch.Tensor]]] = []

    def look(self) -> str:
        """Return what this step shows, in words; "" if it is nothing. Call it in each step.

        The first call searches all objects of this process, which takes some hundredths of a second.
        """
        self._looks += 1
        if self._looks > 2:
            return ""
        return " and the ".join(self._search() if self._looks == 1 else self._changed())

    def _search(self) -> list[str]:
        # isinstance() would ask objects that pretend to be others, as proxies do, for their class.
        found = (each for each in gc.get_objects() if issubclass(type(each), LRScheduler | torch.nn.Module))
        existing = [each for each in found if _is_built(each)]
        saved = set[int]()
        _collect(self._parts.values(), saved)
        unsaved = [each for each in existing if id(each) not in saved]
        copies = self._copies_among(unsaved, saved)
        averages, averaged = [], set[int]()
        for average in (each for each in unsaved if isinstance(each, AveragedModel)):
            inner = {id(each) for each in average.modules()}
            if any(id(each) in inner for each in copies):
                averages.append(average)
                averaged |= inner
        self._copies = [(weakref.ref(each), _sample(each)) for each in copies if id(each) not in averaged]
        return sorted({type(each).__name__ for each in [*self._schedulers_among(unsaved), *averages]})

    def _changed(self) -> list[str]:
        copies, self._copies = self._copies, []
        alive = [(copy, before) for found, before in copies if (copy := found()) is not None]
        return sorted({f"copy of {type(copy).__name__}" for copy, before in alive if not _same(before, _sample(copy))})

    def _schedulers_among(self, unsaved: Sequence[object]) -> list[LRScheduler]:
        """Return the schedulers whose optimizer is a part, without those that others of them consist of."""
        optimizers = {id(part) for part in self._parts.values()}
        schedulers = [each for each in unsaved if isinstance(each, LRScheduler)]
        found = [each for each in schedulers if id(getattr(each, "optimizer", None)) in optimizers]
        inner = set[int]()
        for each in found:
            _collect(vars(each).values(), inner)
        return [each for each in found if id(each) not in inner]

    def _copies_among(self, unsaved: Sequence[object], saved: set[int]) -> list[torch.nn.Module]:
        """Return the modules that are like one of the parts, with parameters of their own."""
        models = [part for part in self._parts.values() if isinstance(part, torch.nn.Module)]
        kinds = {type(model) for model in models}
        shapes = [_shapes(model) for model in models]
        own = {id(one) for model in models for one in model.parameters()}
        found = [each for each in unsaved if isinstance(each, torch.nn.Module) and type(each) in kinds]
        apart = [each for each in found if own.isdisjoint(map(id, each.parameters()))]
        return [each for each in apart if _shapes(each) and _shapes(each) in shapes]


def _is_built(thing: object) -> bool:
    """Return False for a module that an error, or another thread, has left without its parameters."""
    return not isinstance(thing, torch.nn.Module) or "_parameters" in vars(thing)


def _collect(things: Iterable[object], found: set[int], depth: int = _DEPTH) -> None:
    """Add the ids of the schedulers and modules among these objects, in them, and in lists and dicts there."""
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            found |= {id(module) for module in thing.modules()}
        elif isinstance(thing, LRScheduler):
            if id(thing) not in found:
                found.add(id(thing))
                _collect(vars(thing).values(), found)
        elif depth and not isinstance(thing, torch.optim.Optimizer | torch.Tensor | type):
            _collect(_held_by(thing), found, depth - 1)


def _held_by(thing: object) -> Iterable[object]:
    if isinstance(thing, Mapping):
        return thing.values()
    return thing if isinstance(thing, list | tuple) else getattr(thing, "__dict__", {}).values()


def _shapes(module: torch.nn.Module) -> list[torch.Size]:
    """The shapes of the module's parameters; none if some have no data yet, or never."""
    parameters = list(module.parameters())
    return [] if any(is_lazy(one) or one.is_meta for one in parameters) else [one.shape for one in parameters]


def _sample(module: torch.nn.Module) -> list[torch.Tensor]:
    """The first elements of each parameter, as bytes."""
    return [one.detach().reshape(-1)[:_SAMPLED].clone().view(torch.uint8) for one in module.parameters()]


def _same(before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, before, now))
