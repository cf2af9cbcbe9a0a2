"""Learning-rate schedulers that a script has not passed to `Run`.

No checkpoint has such a scheduler, so it begins anew whenever the script starts, while its optimizer continues. Nothing
fails then: the rest of the training has other learning rates.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler

_DEPTH = 3
"""How deep to look into a part: a class of the script's own may hold schedulers, in a list for example."""


def find_unsaved(parts: Mapping[str, object]) -> list[str]:
    """Return the classes of the schedulers whose optimizer is among `parts`, but which are in none of them themselves.

    Searches all objects of this process, which takes some hundredths of a second.
    """
    # isinstance() would ask objects that pretend to be others, as proxies do, for their class.
    existing = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    if not existing:
        return []
    optimizers = {id(part) for part in parts.values()}
    saved, inner = set[int](), set[int]()
    _collect(parts.values(), saved)
    unsaved = [
        each for each in existing if id(each) not in saved and id(getattr(each, "optimizer", None)) in optimizers
    ]
    for each in unsaved:
        _collect(vars(each).values(), inner)
    return sorted({type(each).__name__ for each in unsaved if id(each) not in inner})


def _collect(things: Iterable[object], found: set[int], depth: int = _DEPTH) -> None:
    """Add the ids of the schedulers among these objects, in their attributes, and in lists and dicts there."""
    for thing in things:
        if isinstance(thing, LRScheduler):
            if id(thing) not in found:
                found.add(id(thing))
                _collect(vars(thing).values(), found)
        elif depth and not isinstance(thing, torch.nn.Module | torch.optim.Optimizer | torch.Tensor | type):
            _collect(_held_by(thing), found, depth - 1)


def _held_by(thing: object) -> Iterable[object]:
    if isinstance(thing, Mapping):
        return thing.values()
    return thing if isinstance(thing, list | tuple) else getattr(thing, "__dict__", {}).values()
