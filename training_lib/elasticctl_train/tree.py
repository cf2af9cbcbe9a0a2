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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elasticctl_train.errors import DamagedError, StateError
from elasticctl_train.tensors import DTYPES, dtype_name

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_RESERVED_NAME = "__metadata__"  # of safetensors


@dataclass(slots=True)
class Flattener:
    """Turns trees into JSON; `tensors` collects each distinct tensor once, under a name made from its path."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def encode(self, value: object, path: str) -> Any:
        """Return `value` as JSON data. `path` is where it is in the whole state, for names and errors."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if type(value) in (dict, OrderedDict):
            return self._encode_dict(value, path)  # type: ignore[arg-type]
        if type(value) is list:
            return [self.encode(item, f"{path}/{index}") for index, item in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": [self.encode(item, f"{path}/{index}") for index, item in enumerate(value)]}
        if type(value) is Counter:
            return {"$counter": self._pairs(value, path)}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise StateError(f"{path}: a checkpoint cannot hold a {kind}; make it numbers, text, lists, dicts or tensors")

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
        if type(tensor) not in _PLAIN_TENSORS:
            raise StateError(f"{path}: a checkpoint cannot hold a {type(tensor).__qualname__}, only plain tensors")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in DTYPES:
            kind = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
            raise StateError(f"{path}: a checkpoint cannot hold a {kind}; make it a dense tensor of a common dtype")
        where = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        identity = (*where, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        name = self._names.get(identity) if tensor.numel() else None
        if name is None:
            name = path
            while name in self.tensors or name == _RESERVED_NAME:
                name += "~"
            self.tensors[name] = tensor
            self._names[identity] = name
        return {"$tensor": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


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


def share_out(sizes_bytes: Mapping[str, int], kept: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Which rank writes which tensor, whole tensors, balanced by bytes: the largest goes to the least laden rank.

    `kept` names the tensors that have their rank already. The same on every rank that passes the same.
    """
    owners = dict(kept)
    load = [0] * world_size
    for name, rank in kept.items():
        load[rank] += sizes_bytes[name]
    for name in sorted(sizes_bytes.keys() - kept.keys(), key=lambda name: (-sizes_bytes[name], name)):
        rank = load.index(min(load))
        owners[name] = rank
        load[rank] += sizes_bytes[name]
    return owners
