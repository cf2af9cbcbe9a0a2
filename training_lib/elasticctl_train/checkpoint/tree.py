"""State trees -> JSON and a flat table of tensors, and torch's side of reading them; see `state_trees` for the JSON.

A tree is made of dicts, lists, tuples, numbers, text, None and tensors: what `state_dict()` returns. Everything but the
tensors becomes JSON; a tensor becomes a reference by name. Nothing is ever pickled: any other type raises StateError
with its path in the tree.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elasticctl_store.checkpoints import tensor_files
from elasticctl_store.checkpoints.state_trees import MAX_DEPTH
from elasticctl_store.errors import StateError
from elasticctl_train.checkpoint import dtensor

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in tensor_files.DTYPES}
"""The dtypes a checkpoint can hold, by the names it uses for them."""
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

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

    def encode(self, value: object, path: str, depth: int = 0) -> Any:
        """Return `value` as JSON data. `path` is where it is in the whole state, for names and errors."""
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}  # type: ignore[arg-type]
        if depth > MAX_DEPTH:
            raise StateError(f"{path:.60}…: a checkpoint cannot hold what is more than {MAX_DEPTH} levels deep")
        depth += 1
        if kind is dict or kind is OrderedDict:
            return self._encode_dict(value, path, depth)  # type: ignore[arg-type]
        if kind is list:
            return self._encode_items(value, path, depth)  # type: ignore[arg-type]
        if kind is tuple:
            return {"$tuple": self._encode_items(value, path, depth)}  # type: ignore[arg-type]
        if kind is Counter:
            return {"$counter": self._encode_pairs(value, path, depth)}  # type: ignore[arg-type]
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise StateError(f"{path}: a checkpoint cannot hold a {name}. FIX: use numbers, text, lists, dicts or tensors")

    def _encode_items(self, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> list[Any]:
        if all(type(item) in _AS_THEY_ARE for item in value):  # Python's generator has 625 numbers
            return list(value)
        return [self.encode(item, f"{path}/{index}", depth) for index, item in enumerate(value)]

    def _encode_dict(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}/{key}", depth) for key, item in value.items()}
        return {"$map": self._encode_pairs(value, path, depth)}

    def _encode_pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        pairs, keys = [], Flattener()
        for key, item in value.items():
            pairs.append([keys.encode(key, f"{path}/{key!r}", depth), self.encode(item, f"{path}/{key}", depth)])
        if keys.tensors:
            raise StateError(f"{path}: a checkpoint cannot hold a dict with tensors as keys")
        return pairs

    def _encode_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if type(tensor) in _PLAIN_TENSORS:
            part, spread = tensor, None
        elif dtensor.is_sharded(tensor):
            dtensor.check_placements(tensor, path)
            part, spread = dtensor.local_part(tensor), dtensor.layout_of(tensor)
        else:
            raise StateError(f"{path}: a checkpoint cannot hold a {type(tensor).__qualname__}, only plain tensors")
        dtype = tensor.dtype
        said = NAMES.get(dtype)
        if said is None or part.layout is not torch.strided or part.is_meta:
            kind = f"{part.layout} tensor of {dtype} on {part.device}"
            raise StateError(f"{path}: a checkpoint cannot hold a {kind}. FIX: use a dense tensor of a common dtype")
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
    part = dtensor.local_part(tensor) if sharded else tensor
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


def view(data: torch.Tensor, start: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that lies at byte `start` of `data` (uint8), without a copy."""
    kind = DTYPES[dtype]
    return data[start : start + math.prod(shape) * kind.itemsize].view(kind).view(tuple(shape))
