"""The tensor file's layout, beside the reference implementation of the format."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_train import tensors
from elasticctl_train.errors import DamagedError
from tests.train import states
from tests.train.states import bits, same

tables = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "__metadata__"), states.tensors(), max_size=6)


def a_file(table: dict[str, torch.Tensor]) -> tuple[bytes, torch.Tensor]:
    layout = tensors.plan(table)
    buffer = torch.empty(layout.data_bytes, dtype=torch.uint8)
    tensors.fill(layout, table, buffer)
    return layout.header, buffer


@given(tables)
@settings(deadline=None, max_examples=100)
def test_tensors_survive_bit_by_bit(table: dict[str, torch.Tensor]) -> None:
    header, buffer = a_file(table)
    length = tensors.header_bytes(header[: tensors.PREFIX_BYTES])
    assert tensors.PREFIX_BYTES + length == len(header)
    places = tensors.read_places(header[tensors.PREFIX_BYTES :], len(buffer))
    assert places.keys() == table.keys()
    for name, tensor in table.items():
        taken = tensors.take(buffer, places, name, tensors.dtype_name(tensor.dtype), list(tensor.shape))
        assert same(taken, tensor.detach())


def test_the_reference_implementation_reads_the_file(tmp_path: Path) -> None:
    table = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in tensors.DTYPES}
    table |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "odd bytes": torch.tensor([True, False, True])}
    header, buffer = a_file(table)
    file = tmp_path / "share.safetensors"
    file.write_bytes(header + bytes(buffer.numpy()))
    read = safetensors.torch.load_file(file)
    assert read.keys() == table.keys()
    for name, tensor in table.items():
        expected = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        assert same(read[name], expected)


def test_every_tensor_is_aligned_to_its_elements() -> None:
    table = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(5).half()}
    layout = tensors.plan(table)
    assert len(layout.header) % 64 == 0
    assert all(layout.places[name].start % tensor.element_size() == 0 for name, tensor in table.items())


def test_a_share_is_a_copy() -> None:
    weight = torch.ones(4)
    _, buffer = a_file({"w": weight})
    weight.zero_()
    assert bits(buffer) == bits(torch.ones(4))


def header_of(entry: object) -> bytes:
    return json.dumps({"w": entry}).encode()


@pytest.mark.parametrize(
    "header",
    [
        b"", b"[]", b"{", b"\xff", header_of(1), header_of({}), header_of({"data_offsets": [0]}),
        header_of({"data_offsets": [0, 101]}),
        header_of({"data_offsets": [8, 4]}), header_of({"data_offsets": [-8, 4]}),
        header_of({"data_offsets": ["0", "4"]}),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_is_damage(header: bytes) -> None:
    with pytest.raises(DamagedError):
        tensors.read_places(header, 100)


def test_a_header_length_that_cannot_be_is_damage() -> None:
    with pytest.raises(DamagedError, match="header"):
        tensors.header_bytes(struct.pack("<Q", 1 << 60))


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [("w", "float32", [3]), ("w", "float64", [4]), ("w", "object", [4]), ("v", "float32", [4]), ("w", "float32", [-4])],
)
def test_a_tensor_of_another_kind_is_damage(name: str, dtype: str, shape: list[int]) -> None:
    buffer = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(DamagedError, match=name):
        tensors.take(buffer, {"w": tensors.Place(0, 16)}, name, dtype, shape)


def test_a_tensor_that_is_not_aligned_is_damage() -> None:
    with pytest.raises(DamagedError):
        tensors.take(torch.zeros(16, dtype=torch.uint8), {"w": tensors.Place(2, 4)}, "w", "float32", [1])
