"""Tensor files: the safetensors format, laid out so that a tensor is copied once, straight to its place in the file.

The format (https://github.com/huggingface/safetensors) is eight bytes of header length, a JSON header, and the tensors'
bytes without gaps. Tensors lie in order of falling element size, so every one is aligned. Complex numbers are stored as
pairs of floats: older readers of the format know no complex type.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from elasticctl_train.errors import DamagedError

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

_ALIGNMENT = 64
_MAX_HEADER_BYTES = 1 << 30


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


def plan(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Lay out a file for these tensors (dtypes as in DTYPES, any strides and device); reads no tensor data."""
    places: dict[str, Place] = {}
    header: dict[str, Any] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        place = Place(end, tensor.numel() * tensor.element_size())
        end += place.size_bytes
        places[name] = place
        shape = [*tensor.shape, 2] if tensor.is_complex() else list(tensor.shape)
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [place.start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + PREFIX_BYTES) % _ALIGNMENT)
    return Layout(struct.pack("<Q", len(text)) + text, places, end)


def fill(layout: Layout, tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy the tensors to their places in `buffer` (uint8, on the CPU, `layout.data_bytes` long)."""
    for name, tensor in tensors.items():
        view(buffer, layout.places[name], tensor.dtype, tensor.shape).copy_(tensor.detach())


def view(buffer: torch.Tensor, place: Place, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor at `place` of a file's data, without a copy."""
    return buffer[place.start : place.start + place.size_bytes].view(dtype).view(shape)


def header_bytes(prefix: bytes) -> int:
    """How long the header is, from the first eight bytes of a file; DamagedError if that cannot be."""
    (length,) = struct.unpack("<Q", prefix)
    if length > _MAX_HEADER_BYTES:
        raise DamagedError(f"a tensor file's header cannot have {length} bytes")
    return int(length)


def read_places(header: bytes, data_bytes: int) -> dict[str, Place]:
    """Parse a header (without its length) of a file with `data_bytes` of data; DamagedError where they do not fit."""
    try:
        entries = json.loads(header)
        places = {}
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= data_bytes:
                raise DamagedError(f"tensor {name!r} lies outside its file")
            places[name] = Place(start, end - start)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DamagedError(f"a tensor file's header cannot be read: {e}") from e
    return places


def take(buffer: torch.Tensor, places: Mapping[str, Place], name: str, dtype: str, shape: list[int]) -> torch.Tensor:
    """A copy of one tensor out of a file's data; DamagedError when its bytes are not of that dtype and shape."""
    kind = next((known for known in DTYPES if dtype_name(known) == dtype), None)
    place = places.get(name)
    if kind is None or place is None:
        raise DamagedError(f"tensor {name!r} of dtype {dtype} is not in its file")
    if place.size_bytes != prod(shape) * kind.itemsize or place.start % kind.itemsize:
        raise DamagedError(f"tensor {name!r} has {place.size_bytes} bytes, which is not {dtype} of shape {shape}")
    return view(buffer, place, kind, tuple(shape)).clone()


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")
