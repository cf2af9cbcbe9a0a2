"""State trees <-> JSON and a flat table of tensors.

A tree is made of dicts, lists, tuples, numbers, text, None and tensors: what `state_dict()` returns. Everything but the
tensors becomes JSON; a tensor becomes a reference by name. What JSON lacks is written as an object with one `$` key:

    {"$tensor": NAME, "dtype": …, "shape": […]}     two references to one name are one shared tensor
    {"$map": [[KEY, VALUE], …]}                     a dict with keys that are not text (optimizer states), in order
    {"$tuple": […]}  {"$counter": [[KEY, COUNT], …]}  {"$float": "nan" | "inf" | "-inf"}

Nothing is ever pickled: any other type raises StateError with its path in the tree.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elasticctl_store.errors import DamagedError, StateError
from elasticctl_train.checkpoint import dtensor
from elasticctl_train.checkpoint.tensors import NAMES

_AS_THEY_ARE = frozenset({type(None), bool, int, str})
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_RESERVED_NAME = "__metadata__"  # of safetensors

Kind = tuple[str, torch.dtype, torch.Size, object]


@dataclass(slots=True)
class Flattener:
    """Turns trees into JSON; `tensors` collects each distinct tensor once, under a name made from its path.

    `kinds` has name, dtype, shape and, of sharded ones, the spread of each. Training stands still meanwhile, so this is
    written for speed: about two microseconds a tensor.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    kinds: list[Kind] = field(default_factory=list)
    _names: dict[object, list[str]] = field(default_factory=dict)

    def encode(self, value: object, path: str) -> Any:
        """Return `value` as JSON data. `path` is where it is in the whole state, for names and errors."""
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}  # type: ignore[arg-type]
        if kind is dict or kind is OrderedDict:
            return self._encode_dict(value, path)  # type: ignore[arg-type]
        if kind is list:
            return self._items(value, path)  # type: ignore[arg-type]
        if kind is tuple:
            return {"$tuple": self._items(value, path)}  # type: ignore[arg-type]
        if kind is Counter:
            return {"$counter": self._pairs(value, path)}  # type: ignore[arg-type]
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise StateError(f"{path}: a checkpoint cannot hold a {name}; make it numbers, text, lists, dicts or tensors")

    def _items(self, value: list[Any] | tuple[Any, ...], path: str) -> list[Any]:
        if all(type(item) in _AS_THEY_ARE for item in value):  # Python's generator has 625 numbers
            return list(value)
        return [self.encode(item, f"{path}/{index}") for index, item in enumerate(value)]

    def _encode_dict(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}/{key}") for key, item in value.items()}
        return {"$map": self._pairs(value, path)}

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        pairs = []
        for key, item in value.items():
            if isinstance(key, torch.Tensor):
                raise StateError(f"{path}: a checkpoint cannot hold a dict with tensors as keys")
            pairs.append([self.encode(key, f"{path}/{key!r}"), self.encode(item, f"{path}/{key}")])
        return pairs

    def _encode_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if type(tensor) in _PLAIN_TENSORS:
            part, spread = tensor, None
        elif dtensor.is_sharded(tensor):
            dtensor.check(tensor, path)
            part, spread = dtensor.local(tensor), dtensor.layout_of(tensor)
        else:
            raise StateError(f"{path}: a checkpoint cannot hold a {type(tensor).__qualname__}, only plain tensors")
        dtype = tensor.dtype
        said = NAMES.get(dtype)
        if said is None or part.layout is not torch.strided or part.is_meta:
            kind = f"{part.layout} tensor of {dtype} on {part.device}"
            raise StateError(f"{path}: a checkpoint cannot hold a {kind}; make it a dense tensor of a common dtype")
        shape = tensor.shape
        # An empty part has no address, and yet all ranks have to come to the same names.
        where = part.data_ptr() if spread is None else part.untyped_storage()._cdata
        name = self._known(where, tensor) if where in self._names else None
        if name is None:
            name = path
            while name in self.tensors or name == _RESERVED_NAME:
                name += "~"
            self.tensors[name] = tensor
            self.kinds.append((name, dtype, shape, spread))
            if where:  # without elements there is nothing to share
                self._names.setdefault(where, []).append(name)
        return {"$tensor": name, "dtype": said, "shape": list(shape)}

    def _known(self, where: object, tensor: torch.Tensor) -> str | None:
        """The name of the same memory, seen in the same way."""
        identity = _identity(tensor)
        return next((name for name in self._names[where] if _identity(self.tensors[name]) == identity), None)


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors at one address that are the same."""
    sharded = dtensor.is_sharded(tensor)
    part = dtensor.local(tensor) if sharded else tensor
    whole = (tensor.shape, dtensor.layout_of(tensor)) if sharded else None
    seen = (part.data_ptr(), part.dtype, part.shape, part.stride(), part.is_conj(), part.is_neg())
    return *seen, part.device, whole


def leaves(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a tree with its path, shared ones as often as they occur; whatever else is passed over."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")


def decode(data: Any, tensor: Callable[[str, str, list[int]], torch.Tensor]) -> Any:
    """Rebuild a tree; `tensor(name, dtype, shape)` supplies each reference. DamagedError for JSON that is no tree."""
    if isinstance(data, list):
        return [decode(item, tensor) for item in data]
    if not isinstance(data, dict):
        return data
    marker = next(iter(data), "")
    if not marker.startswith("$"):
        return {key: decode(item, tensor) for key, item in data.items()}
    try:
        return _decode_marked(marker, data, tensor)
    except (KeyError, TypeError, ValueError) as e:
        raise DamagedError(f"not a state tree: {marker} holds {data[marker]!r:.60}") from e


def _decode_marked(marker: str, data: dict[str, Any], tensor: Callable[[str, str, list[int]], torch.Tensor]) -> Any:
    content = data[marker]
    match marker:
        case "$tensor":
            return tensor(content, data["dtype"], data["shape"])
        case "$map":
            return {decode(key, tensor): decode(item, tensor) for key, item in content}
        case "$tuple":
            return tuple(decode(item, tensor) for item in content)
        case "$counter":
            return Counter({decode(key, tensor): decode(item, tensor) for key, item in content})
        case "$float":
            return float(content)
        case _:
            raise DamagedError(f"not a state tree: {marker} is unknown to this version")
