"""State trees in their stored form: JSON <-> dicts, lists, numbers, text, None and tensors. Tensors are opaque here.

What JSON lacks is represented by an object with a key that starts with `$`:

    {"$tensor": NAME, "dtype": …, "shape": […]}     two references to one name are one shared tensor
        and, where it applies: "stride": […] unless it is row-major, "requires_grad": true, "parameter": true
    {"$map": [[KEY, VALUE], …]}                     a dict with keys that are not text (optimizer states), in order
    {"$tuple": […]}  {"$counter": [[KEY, COUNT], …]}  {"$float": "nan" | "inf" | "-inf"}  {"$bytes": BASE64}
    {"$ordered": [[KEY, VALUE], …]}                 an OrderedDict

Versions that do not know `$ordered` must be able to read a tree, too. So it is stored with a plain dict instead, and
the document lists where these are (`take_order`, `give_order`).

Nothing is ever unpickled. `elasticctl_train.checkpoint.tree` writes these trees.
"""

from __future__ import annotations

import binascii
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

from elasticctl_store.checkpoints.tensor_files import DTYPES, TensorType
from elasticctl_store.errors import DamagedError

MAX_DEPTH = 100
"""The maximum nesting depth of dicts, lists and tuples."""
MAX_TENSOR_BYTES = 1 << 62
"""More than any memory; up to this limit, torch accepts sizes and strides."""

OnTensor = Callable[[str, TensorType], Any]
"""Returns the object to use in place of a reference to the tensor of this name."""

_REFERENCE, _SPECIALS = {"$tensor", "dtype", "shape"}, {"stride", "requires_grad", "parameter"}
_FLOATS = {"nan", "inf", "-inf"}
_PAIRS = {"$map", "$counter", "$ordered"}


def decode(data: Any, on_tensor: OnTensor, depth: int = 0) -> Any:
    """Rebuild a tree from JSON data; `on_tensor` supplies each tensor. Raises DamagedError if the data is not a valid
    tree."""
    if depth > MAX_DEPTH:
        raise DamagedError(f"not a state tree: it is more than {MAX_DEPTH} levels deep")
    if type(data) is list:
        return [decode(item, on_tensor, depth + 1) for item in data]
    if type(data) is not dict:
        return data
    marker = next(iter(data), "")
    if not marker.startswith("$"):
        return {key: decode(item, on_tensor, depth + 1) for key, item in data.items()}
    if marker == "$tensor":
        return on_tensor(*parse_reference(data))
    if len(data) > 1:
        raise DamagedError(f"not a state tree: an object has other keys than {marker!r:.40}")
    return _decode_marked(marker, data[marker], on_tensor, depth)


def take_order(tree: Any, where: list[Any], place: tuple[Any, ...] = ()) -> Any:
    """Return the tree with a plain dict for each `$ordered`, and append the places of these to `where`.

    A place is a list of keys and indices, in the returned JSON.
    """
    if type(tree) is list:
        return [take_order(item, where, (*place, index)) for index, item in enumerate(tree)]
    if type(tree) is not dict:
        return tree
    marker = next(iter(tree), "")
    if marker == "$ordered":
        where.append(place)
        pairs = tree[marker]
        is_plain = all(type(key) is str and not key.startswith("$") for key, _ in pairs)
        tree = dict(pairs) if is_plain else {"$map": pairs}
    return {key: take_order(item, where, (*place, key)) for key, item in tree.items()}


def give_order(tree: Any, where: Any) -> Any:
    """Return the tree with `$ordered` in the places that `take_order` has found. Raises DamagedError."""
    if type(where) is not list or any(type(place) is not list for place in where):
        raise DamagedError("not a state tree: the list of its ordered dicts is invalid")
    try:
        return _with_order(tree, where) if where else tree
    except (LookupError, TypeError, AttributeError, RecursionError) as e:
        raise DamagedError("not a state tree: one of its ordered dicts is missing") from e


def _with_order(tree: Any, where: list[list[Any]]) -> Any:
    below: dict[Any, list[list[Any]]] = {}
    for first, *rest in filter(None, where):
        below.setdefault(first, []).append(rest)
    tree = tree.copy()
    for key, places in below.items():
        tree[key] = _with_order(tree[key], places)
    if [] not in where:
        return tree
    marker = next(iter(tree), "")
    if type(tree) is not dict or (marker.startswith("$") and marker != "$map"):
        raise TypeError("not a dict")
    return {"$ordered": tree["$map"] if marker == "$map" else [[key, item] for key, item in tree.items()]}


def parse_reference(data: dict[str, Any]) -> tuple[str, TensorType]:
    """Return the name and the type of the tensor that `{"$tensor": …}` refers to. Raises DamagedError."""
    name = data["$tensor"]
    if not _REFERENCE <= data.keys() <= _REFERENCE | _SPECIALS or type(name) is not str:
        raise DamagedError("not a state tree: $tensor is not a reference to a tensor")
    kind = parse_type(name, data["dtype"], data["shape"])
    return (name, kind) if len(data) == len(_REFERENCE) else (name, _parse_special(name, kind, data))


def _parse_special(name: str, kind: TensorType, data: dict[str, Any]) -> TensorType:
    """Return the type with the optional fields of a reference. Raises DamagedError for what no tensor can have."""
    stride = parse_lengths(name, data["stride"]) if "stride" in data else None
    if stride is not None and not _is_dense(kind.shape, stride):
        raise DamagedError(f"tensor {name!r:.100}: its stride does not fit its shape without gaps")
    flags = [data[flag] for flag in ("requires_grad", "parameter") if flag in data]
    if any(flag is not True for flag in flags):
        raise DamagedError("not a state tree: $tensor is not a reference to a tensor")
    if "requires_grad" in data and not kind.dtype.startswith(("float", "bfloat", "complex")):
        raise DamagedError(f"tensor {name!r:.100}: only floating-point tensors can require gradients")
    return replace(kind, stride=stride, requires_grad="requires_grad" in data, is_parameter="parameter" in data)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether these are the strides, in elements, of a tensor without gaps or overlaps."""
    if len(stride) != len(shape) or 0 in shape or any(step > MAX_TENSOR_BYTES for step in stride):
        return False
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(stride, shape, strict=True) if length > 1):
        if step != expected:
            return False
        expected *= length
    return True


def parse_type(name: str, dtype: Any, shape: Any) -> TensorType:
    """Return a tensor's type from JSON data. Raises DamagedError, with the tensor's name, for what no tensor can
    have."""
    if type(dtype) is not str or dtype not in DTYPES:
        raise DamagedError(f"tensor {name!r:.100}: its dtype is not one that a checkpoint can hold")
    lengths = parse_lengths(name, shape)
    if prod(max(1, length) for length in lengths) > MAX_TENSOR_BYTES // DTYPES[dtype].item_bytes:
        raise DamagedError(f"tensor {name!r:.100}: its shape is larger than any memory")
    return TensorType(dtype, lengths)


def parse_lengths(name: str, lengths: Any) -> tuple[int, ...]:
    """Return a shape or an offset from JSON data. Raises DamagedError unless it is a list of integers >= 0."""
    if type(lengths) is not list or any(type(length) is not int or length < 0 for length in lengths):
        raise DamagedError(f"tensor {name!r:.100}: its shape or offset is not a list of lengths")
    return tuple(lengths)


def tensors_by_path(tree: Any, path: str = "") -> Iterator[tuple[str, str, TensorType]]:
    """Yield the tensors of a valid tree as (path, name, type); a path is joined by dots, like names in a
    `state_dict()`."""
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from tensors_by_path(item, f"{path}.{index}" if path else str(index))
    elif isinstance(tree, dict):
        marker = next(iter(tree), "")
        if marker == "$tensor":
            yield path, *parse_reference(tree)
        elif marker == "$tuple":
            yield from tensors_by_path(tree[marker], path)
        else:
            for key, item in tree[marker] if marker in _PAIRS else tree.items():
                yield from tensors_by_path(item, f"{path}.{key}" if path else str(key))


def _decode_marked(marker: str, content: Any, on_tensor: OnTensor, depth: int) -> Any:
    match marker:
        case "$map":
            return _decode_pairs(content, on_tensor, depth)
        case "$counter":
            return Counter(_decode_pairs(content, on_tensor, depth))
        case "$ordered":
            return OrderedDict(_decode_pairs(content, on_tensor, depth))
        case "$tuple" if type(content) is list:
            return tuple([decode(item, on_tensor, depth + 1) for item in content])
        case "$float" if type(content) is str and content in _FLOATS:
            return float(content)
        case "$bytes" if type(content) is str:
            return _decode_bytes(content)
        case "$tuple" | "$float" | "$bytes":
            raise DamagedError(f"not a state tree: {marker} has an invalid value")
    raise DamagedError(f"not a state tree: {marker!r:.40} is unknown to this version")


def _decode_bytes(content: str) -> bytes:
    try:
        return binascii.a2b_base64(content, strict_mode=True)
    except ValueError as e:
        raise DamagedError(f"not a state tree: $bytes has an invalid value: {e}") from e


def _decode_pairs(content: Any, on_tensor: OnTensor, depth: int) -> dict[Any, Any]:
    if type(content) is not list or any(type(pair) is not list or len(pair) != 2 for pair in content):
        raise DamagedError("not a state tree: it has a dict that is not a list of pairs")
    try:
        found = {decode(key, _refuse_tensor, depth + 1): decode(value, on_tensor, depth + 1) for key, value in content}
    except TypeError as e:
        raise DamagedError("not a state tree: a key of a dict is a list or a dict") from e
    if len(found) != len(content):
        raise DamagedError("not a state tree: a dict has the same key twice")
    return found


def _refuse_tensor(name: str, kind: TensorType) -> Any:
    raise DamagedError(f"not a state tree: tensor {name!r:.100} is a key of a dict")
