"""Tensor files: the safetensors format, laid out so that a tensor is copied once, directly to its place in the file.

The format (https://github.com/huggingface/safetensors) is eight bytes with the length of the header, a JSON header, and
the tensors' bytes without gaps. Tensors whose size is a multiple of 64 bytes come first, so that they are aligned like
torch's own allocations; the others follow by decreasing element size, so that each is aligned to its elements. Complex
numbers are stored as pairs of floats, because older readers of the format have no complex type. Dtypes are given by
name, because this module does not need torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class Dtype:
    """`code` is the name in safetensors files; `item_bytes` is the size of one element in bytes."""

    code: str
    item_bytes: int
    is_complex: bool = False


DTYPES: Mapping[str, Dtype] = {
    "float64": Dtype("F64", 8),
    "float32": Dtype("F32", 4),
    "float16": Dtype("F16", 2),
    "bfloat16": Dtype("BF16", 2),
    "float8_e4m3fn": Dtype("F8_E4M3", 1),
    "float8_e5m2": Dtype("F8_E5M2", 1),
    "int64": Dtype("I64", 8),
    "int32": Dtype("I32", 4),
    "int16": Dtype("I16", 2),
    "int8": Dtype("I8", 1),
    "uint64": Dtype("U64", 8),
    "uint32": Dtype("U32", 4),
    "uint16": Dtype("U16", 2),
    "uint8": Dtype("U8", 1),
    "bool": Dtype("BOOL", 1),
    "complex128": Dtype("F64", 16, is_complex=True),
    "complex64": Dtype("F32", 8, is_complex=True),
}
"""The dtypes that a checkpoint can hold, by the names that share documents and torch use for them."""

RESERVED_NAME = "__metadata__"
"""The one name that the format has for itself."""
PREFIX_BYTES = 8
"""A file begins with the length of its header, in this many bytes."""
ALIGNMENT = 64
"""The alignment of tensors in bytes."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's dtype, one of `DTYPES`, and its shape.

    `stride` is its memory layout where it is used, in elements; None: row-major. In the file it is always row-major.
    The rest belongs to a reference to the tensor: torch's `requires_grad`, and whether it is an `nn.Parameter`.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    requires_grad: bool = field(default=False, compare=False)
    is_parameter: bool = field(default=False, compare=False)

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """The size of its elements in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].item_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor file before it is filled: its complete header, and the byte of the file at which each tensor starts."""

    header: bytes
    starts: Mapping[str, int]
    size_bytes: int


def lay_out(tensors: Mapping[str, TensorType]) -> Layout:
    """Return the layout of a file for these tensors."""
    starts: dict[str, int] = {}
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=_place):
        code, shape = _entry(tensor)
        starts[name] = end
        end += tensor.size_bytes
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + PREFIX_BYTES) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)


def _place(named: tuple[str, TensorType]) -> tuple[bool, int, str]:
    name, tensor = named
    return tensor.size_bytes % ALIGNMENT != 0, -DTYPES[tensor.dtype].item_bytes, name


def is_header_of(header: bytes, tensors: Mapping[int, list[TensorType]]) -> bool:
    """Return whether a header describes exactly these tensors: byte of the file -> their types; names do not matter."""
    expected = []
    for start, types in tensors.items():
        for tensor in types:
            code, shape = _entry(tensor)
            expected.append((start, start + tensor.size_bytes, code, shape))
    found = []
    try:
        (length,) = struct.unpack_from("<Q", header)
        for entry in json.loads(header[PREFIX_BYTES:]).values():
            start, end = entry["data_offsets"]
            found.append((len(header) + start, len(header) + end, entry["dtype"], tuple(entry["shape"])))
        return bool(length == len(header) - PREFIX_BYTES and sorted(found) == sorted(expected))
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _entry(tensor: TensorType) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape of a tensor in the header."""
    dtype = DTYPES[tensor.dtype]
    return dtype.code, (*tensor.shape, 2) if dtype.is_complex else tensor.shape
