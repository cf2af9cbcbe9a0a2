"""The tensor file's layout, beside the reference implementation of the format."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.errors import DamagedError
from elasticctl_train.checkpoint import tensors
from tests.support.train import states
from tests.support.train.states import same

tables = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "__metadata__"), states.tensors(), max_size=6)


def a_file(table: dict[str, torch.Tensor]) -> tuple[tensors.Layout, torch.Tensor]:
    layout = tensors.plan({name: (tensor.dtype, tensor.shape) for name, tensor in table.items()})
    data = torch.empty(len(layout.header) + layout.data_bytes, dtype=torch.uint8)
    data[: len(layout.header)].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
    for name, tensor in table.items():
        start = len(layout.header) + layout.places[name].start
        tensors.view(data, start, tensor.dtype, tensor.shape).copy_(tensor.detach())
    return layout, data


@given(tables)
@settings(deadline=None, max_examples=100)
def test_tensors_survive_bit_by_bit(table: dict[str, torch.Tensor]) -> None:
    layout, data = a_file(table)
    assert layout.places.keys() == table.keys()
    for name, tensor in table.items():
        start = len(layout.header) + layout.places[name].start
        assert same(tensors.view(data, start, tensor.dtype, tensor.shape), tensor.detach())


def test_the_reference_implementation_reads_the_file(tmp_path: Path) -> None:
    table = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in tensors.DTYPES}
    table |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "odd bytes": torch.tensor([True, False, True])}
    file = tmp_path / "share.safetensors"
    file.write_bytes(a_file(table)[1].numpy().tobytes())
    read = safetensors.torch.load_file(file)
    assert read.keys() == table.keys()
    for name, tensor in table.items():
        expected = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        assert same(read[name], expected)


def test_every_tensor_is_aligned_to_its_elements() -> None:
    table = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(5).half()}
    layout, _ = a_file(table)
    assert len(layout.header) % 64 == 0
    assert all(layout.places[name].start % tensor.element_size() == 0 for name, tensor in table.items())


def test_dtypes_have_names_and_back() -> None:
    assert tensors.NAMES[torch.bfloat16] == "bfloat16"
    assert all(tensors.dtype_of(tensors.NAMES[dtype]) is dtype for dtype in tensors.DTYPES)
    with pytest.raises(DamagedError, match="object"):
        tensors.dtype_of("object")
