"""Tensor files: the safetensors format, laid out so that a tensor is copied once, straight to its place in the file.

The format (https://github.com/huggingface/safetensors) is eight bytes of header length, a JSON header, and the tensors'
bytes without gaps. Tensors whose size is a multiple of 64 bytes come first, so that they start where torch would put
them; the others follow in order of falling element size, so that each is aligned. Complex numbers are stored as pairs
of floats: older readers of the format have no complex type. Dtypes go by name, because torch is not needed here.
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
    """`code` is what safetensors files call it; `item_bytes` is the size of one element."""

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
"""The dtypes a checkpoint can hold, by the names that share documents and torch use for them."""

PREFIX_BYTES = 8
"""A file begins with the length of its header, in this many bytes."""
ALIGNMENT = 64
"""Where the bytes of tensors start, in bytes."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's dtype, one of `DTYPES`, and its shape.

    `stride` is how it lies in memory where it is used, None: row by row; in the file it always lies row by row. The
    rest belongs to a reference to the tensor: torch's `requires_grad`, and whether it is an `nn.Parameter`.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    requires_grad: bool = field(default=False, compare=False)
    is_parameter: bool = field(default=False, compare=False)

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """How many bytes its elements take."""
        return prod(self.shape) * DTYPES[self.dtype].item_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor file before it is filled: its finished header and the byte of the file at which each tensor starts."""

    header: bytes
    starts: Mapping[str, int]
    size_bytes: int


def lay_out(tensors: Mapping[str, TensorType]) -> Layout:
    """Lay out a file for these tensors."""
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
    """Does a header say just this: at these bytes of the file start tensors of these types, under whatever names?"""
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
    """The dtype and the shape under which a tensor is in the header."""
    dtype = DTYPES[tensor.dtype]
    return dtype.code, (*tensor.shape, 2) if dtype.is_complex else tensor.shape
