"""State trees -> JSON and a flat table of tensors, and torch's part of reading them. `state_trees` describes the JSON.

A tree consists of dicts, lists, tuples, numbers, text, bytes, None and tensors, like the result of `state_dict()`.
Everything but the tensors becomes JSON; a tensor becomes a reference by name. Nothing is ever pickled: any other type
raises StateError with its path in the tree.
"""

from __future__ import annotations

import binascii
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from elasticctl_store.checkpoints import tensor_boxes, tensor_files
from elasticctl_store.checkpoints.state_trees import MAX_DEPTH, MAX_TENSOR_BYTES
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import StateError
from elasticctl_train.checkpoint import dtensor

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in tensor_files.DTYPES}
"""The dtypes that a checkpoint can hold, by the names that it uses for them."""
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

MAX_CONTAINERS = 1 << 24
"""The maximum number of dicts, lists and tuples in a state: nested lists of the same list could exceed any memory."""
MAX_INT_BITS = 14_000
"""Python does not parse numbers of more than 4300 digits."""

MAX_BYTES = 1 << 20
"""The maximum size of one `bytes` object: it is part of the JSON, which is read as a whole."""

_AS_THEY_ARE = frozenset({type(None), bool, int, str})
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")

Kind = tuple[str, torch.dtype, torch.Size, object]


@dataclass(slots=True)
class Flattener:
    """Turns trees into JSON; `tensors` collects each distinct tensor once, under a name derived from its path.

    `kinds` has name, dtype, shape and, for sharded tensors, layout of each. Training is stopped meanwhile, so this is
    written for speed: about two microseconds per tensor.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    kinds: list[Kind] = field(default_factory=list)
    _names: dict[object, list[str]] = field(default_factory=dict)
    _containers: int = 0

    def encode(self, value: object, path: str, depth: int = 0) -> Any:
        """Return `value` as JSON data. `path` is its position in the whole state, for names and errors. Raises
        StateError."""
        if depth > MAX_DEPTH:
            raise StateError(f"{path:.60}…: a checkpoint cannot hold more than {MAX_DEPTH} nested levels")
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value if _is_plain(value) else _refuse(value, path)
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if kind is float or kind is bytes:
            return _encode_unusual(value, path)  # type: ignore[arg-type]
        depth += 1
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise StateError(
                f"{path:.60}…: a checkpoint cannot hold more than {MAX_CONTAINERS} lists, dicts and tuples; one that "
                "lies in several others counts each time"
            )
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
        if depth <= MAX_DEPTH and all(_is_plain(item) for item in value):  # Python's generator has 625 numbers
            return list(value)
        return [self.encode(item, f"{path}/{index}", depth) for index, item in enumerate(value)]

    def _encode_dict(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        # The result of Module.state_dict() is an OrderedDict, which is needed only as a dict.
        if type(value) is OrderedDict and not hasattr(value, "_metadata"):
            return {"$ordered": self._encode_pairs(value, path, depth)}
        if all(type(key) is str and not key.startswith("$") and _is_plain(key) for key in value):
            return {key: self.encode(item, f"{path}/{key}", depth) for key, item in value.items()}
        return {"$map": self._encode_pairs(value, path, depth)}

    def _encode_pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        pairs, keys = [], Flattener()
        for key, item in value.items():
            if type(key) is not str:
                _check_key(key, path)
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
        if said is None or part.layout is not torch.strided or part.is_meta or part.is_nested:
            raise _odd_tensor(part, path)
        shape = tensor.shape
        # An empty part has no address, but all ranks have to arrive at the same names.
        where = part.data_ptr() if spread is None else part.untyped_storage()._cdata
        name = self._known(where, tensor) if where in self._names else None
        if not where:
            _check_empty(tensor, path)
        if name is None:
            name = path
            while name in self.tensors or name == tensor_files.RESERVED_NAME:
                name += "~"
            self.tensors[name] = tensor
            self.kinds.append((name, dtype, shape, spread))
            if where:  # without elements there is no memory to share
                self._names.setdefault(where, []).append(name)
        reference: dict[str, Any] = {"$tensor": name, "dtype": said, "shape": list(shape)}
        if tensor.requires_grad:
            reference["requires_grad"] = True
        if spread is None:
            _note_specials(reference, tensor)
        return reference

    def _known(self, where: object, tensor: torch.Tensor) -> str | None:
        """Return the name of a tensor that views the same memory in the same way, if there is one."""
        identity = _identity(tensor)
        return next((name for name in self._names[where] if _identity(self.tensors[name]) == identity), None)


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors at one address that view it in the same way."""
    sharded = dtensor.is_sharded(tensor)
    part = dtensor.local_part(tensor) if sharded else tensor
    whole = (tensor.shape, dtensor.layout_of(tensor)) if sharded else None
    seen = (part.data_ptr(), part.dtype, part.shape, part.stride(), part.is_conj(), part.is_neg())
    return *seen, part.device, whole


def check_part_name(name: object) -> None:
    """Raise StateError for an invalid name of a part."""
    if type(name) is not str:
        raise StateError(f"the state's part {name!r:.100} needs a name that is text")
    if not _is_plain(name):
        _refuse(name, "the name of a part")
    if name.startswith("$"):
        raise StateError(f"the state's part {name!r:.100} needs another name: names that start with $ are reserved")


def _is_plain(value: Any) -> bool:
    """Return whether JSON represents the value as it is."""
    kind = type(value)
    if kind is str:
        return value.isascii() or not _SURROGATES.search(value)
    return kind in _AS_THEY_ARE and (kind is not int or value.bit_length() <= MAX_INT_BITS)


def _refuse(value: object, path: str) -> NoReturn:
    """Raise StateError for a number that is too large, or a text that JSON would turn into another."""
    if isinstance(value, int):
        raise StateError(f"{path}: a checkpoint cannot hold an integer of more than {MAX_INT_BITS} bits")
    raise StateError(f"{path}: a checkpoint cannot hold a text with a pair of surrogates in place of a character")


def _encode_unusual(value: float | bytes, path: str) -> Any:
    """Encode bytes, or a float, which JSON may be unable to represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if len(value) > MAX_BYTES:
        raise StateError(
            f"{path}: a checkpoint cannot hold {len(value)} bytes outside of tensors, only {MAX_BYTES}."
            " FIX: torch.frombuffer(bytearray(...), dtype=torch.uint8)"
        )
    return {"$bytes": binascii.b2a_base64(value, newline=False).decode()}


def _check_key(key: object, path: str) -> None:
    """Raise StateError for a key that cannot even be shown in a message."""
    try:
        repr(key)
    except ValueError as e:
        raise StateError(f"{path}: a checkpoint cannot hold a key with so large an integer: {e}") from e


def _odd_tensor(tensor: torch.Tensor, path: str) -> StateError:
    kind = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
    nested = "nested " if tensor.is_nested else ""
    return StateError(f"{path}: a checkpoint cannot hold a {nested}{kind}. FIX: use a dense tensor of a common dtype")


def _check_empty(tensor: torch.Tensor, path: str) -> None:
    """Raise StateError for a tensor without memory that has elements, or whose shape readers would refuse."""
    if dtensor.is_sharded(tensor):
        return
    if tensor.numel():
        raise StateError(f"{path}: a checkpoint cannot hold a tensor whose memory has been freed")
    if math.prod(max(1, length) for length in tensor.shape) > MAX_TENSOR_BYTES // tensor.itemsize:
        raise StateError(f"{path}: a checkpoint cannot hold a tensor of shape {tuple(tensor.shape)}")


def _note_specials(reference: dict[str, Any], tensor: torch.Tensor) -> None:
    """Record whether the tensor is a parameter, and its strides if it is not row-major.

    Gaps are closed, as in torch's own copies.
    """
    if type(tensor) is torch.nn.Parameter:
        reference["parameter"] = True
    if tensor.is_contiguous() and 1 not in tensor.shape:  # the stride of a dimension of length 1 is arbitrary
        return
    usual = tensor_boxes.contiguous_strides(tensor.shape)
    if tensor.numel() and tensor.stride() != usual:
        dense = torch.empty_like(tensor, device="meta").stride()
        if dense != usual:
            reference["stride"] = list(dense)


class Finisher:
    """Restores what was recorded about tensors, which are stored row-major; references to one tensor share the
    result."""

    def __init__(self) -> None:
        self._laid_out: dict[str, torch.Tensor] = {}
        self._made: dict[tuple[str, bool, bool], torch.Tensor] = {}

    def __call__(self, name: str, kind: TensorType, stored: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this name; `stored` has its elements."""
        seen = name, kind.is_parameter, kind.requires_grad
        if seen not in self._made:
            self._made[seen] = self._make(name, kind, stored)
        return self._made[seen]

    def _make(self, name: str, kind: TensorType, stored: torch.Tensor) -> torch.Tensor:
        if kind.stride is not None and not dtensor.is_sharded(stored):
            if name not in self._laid_out:
                with torch.no_grad():
                    self._laid_out[name] = torch.empty_strided(kind.shape, kind.stride, dtype=stored.dtype).copy_(
                        stored
                    )
            stored = self._laid_out[name]
        if kind.is_parameter:
            return torch.nn.Parameter(stored, requires_grad=kind.requires_grad)
        return stored.detach().requires_grad_() if kind.requires_grad else stored


def leaves(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a tree with its path, shared tensors as often as they occur; other values are skipped."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")


def view(data: torch.Tensor, start: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor at byte `start` of `data` (uint8), without a copy."""
    kind = DTYPES[dtype]
    return data[start : start + math.prod(shape) * kind.itemsize].view(kind).view(tuple(shape))
