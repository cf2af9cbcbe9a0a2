"""Tensor files: the safetensors format, laid out so that a tensor is copied once, straight to its place in the file.

The format (https://github.com/huggingface/safetensors) is eight bytes of header length, a JSON header, and the tensors'
bytes without gaps. Tensors lie in order of falling element size, so every one is aligned. Complex numbers are stored as
pairs of floats: older readers of the format know no complex type.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from elasticctl_store.errors import DamagedError

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex128: "F64",
    torch.complex64: "F32",
}
"""Which torch dtypes a checkpoint can hold, and what the file calls them."""

PREFIX_BYTES = 8
"""A file begins with the header's length, in this many bytes."""

NAMES: Mapping[torch.dtype, str] = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
"""`torch.float32` -> `float32`: what share documents call them."""

_BY_NAME = {name: dtype for dtype, name in NAMES.items()}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor's bytes lie, counted from the end of the header."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor file before it is filled: its finished header and each tensor's place in the rest."""

    header: bytes
    places: Mapping[str, Place]
    data_bytes: int


def plan(entries: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> Layout:
    """Lay out a file for entries of these dtypes (one of DTYPES) and shapes."""
    places: dict[str, Place] = {}
    header: dict[str, Any] = {}
    end = 0
    for name in sorted(entries, key=lambda name: (-entries[name][0].itemsize, name)):
        dtype, shape = entries[name]
        place = Place(end, prod(shape) * dtype.itemsize)
        end += place.size_bytes
        places[name] = place
        stored_shape = [*shape, 2] if dtype.is_complex else list(shape)
        header[name] = {"dtype": DTYPES[dtype], "shape": stored_shape, "data_offsets": [place.start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + PREFIX_BYTES) % _ALIGNMENT)
    return Layout(struct.pack("<Q", len(text)) + text, places, end)


def view(data: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that lies at byte `start` of `data` (uint8), without a copy."""
    return data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def dtype_of(name: str) -> torch.dtype:
    """`float32` -> `torch.float32`; DamagedError for what is none of DTYPES."""
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise DamagedError(f"{name!r} is no dtype that a checkpoint can hold")
    return dtype
