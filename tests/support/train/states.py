"""State trees for tests: a strategy that makes them and an equality that looks at every bit."""

from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict
from typing import Any

import torch
from hypothesis import strategies as st

from elasticctl_store.checkpoints.state_trees import decode
from elasticctl_train.checkpoint.tree import NAMES, Flattener

SHAPES = [(), (0,), (1,), (3,), (2, 3), (0, 4), (2, 0, 3), (4, 1, 2)]


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal in types, order and bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Counter | dict):
        return len(a) == len(b) and all(
            same(ka, kb) and same(va, vb) for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (a != a and b != b)
    return bool(a == b)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as bytes, in order."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor.detach())
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype, shape and stride, filled with random bits (so with every kind of nan)."""
    dtype = draw(st.sampled_from(sorted(NAMES, key=str)))
    shape = draw(st.sampled_from(SHAPES))
    count = torch.Size(shape).numel()
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    match draw(st.sampled_from(["plain", "transposed", "strided", "parameter", "conjugate"])):
        case "transposed":
            return tensor.t() if tensor.dim() == 2 else tensor
        case "strided" if tensor.dim():
            return torch.stack([tensor, tensor], dim=-1)[..., 0] if dtype.itemsize > 1 else tensor[::2]
        case "parameter" if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.nn.Parameter(tensor)
        case "conjugate" if dtype.is_complex:
            return tensor.conj()
    return tensor


texts = st.text(max_size=8) | st.sampled_from(["\ud83d", "\ude00\ud83d", "$map", "$ordered", "a/b", "a.b"])
numbers = st.integers() | st.floats() | st.booleans()
keys = texts | numbers | st.none() | st.tuples(st.integers(), texts) | st.binary(max_size=3)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.binary(max_size=5)
    | tensors()
    | st.builds(Counter, st.dictionaries(st.integers(0, 50), st.integers(0, 50), max_size=3))
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=15,
)


def through_json(value: Any) -> Any:
    flat = Flattener()
    text = json.dumps(flat.encode(value, "state"), allow_nan=False)
    return decode(json.loads(text), lambda name, kind: flat.tensors[name])
