"""The tensor file's layout, compared with the reference implementation of the format."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.checkpoints import tensor_files
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_train.checkpoint import tree
from tests.support.train import states
from tests.support.train.states import same

tables = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "__metadata__"), states.tensors(), max_size=6)


def types_of(table: dict[str, torch.Tensor]) -> dict[str, TensorType]:
    return {name: TensorType(tree.NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in table.items()}


def a_file(table: dict[str, torch.Tensor]) -> tuple[tensor_files.Layout, torch.Tensor]:
    layout = tensor_files.lay_out(types_of(table))
    data = torch.empty(layout.size_bytes, dtype=torch.uint8)
    data[: len(layout.header)].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
    for name, tensor in table.items():
        tree.view(data, layout.starts[name], tree.NAMES[tensor.dtype], tensor.shape).copy_(tensor.detach())
    return layout, data


@given(tables)
@settings(max_examples=30)
def test_tensors_survive_exactly(table: dict[str, torch.Tensor]) -> None:
    layout, data = a_file(table)
    assert layout.starts.keys() == table.keys()
    for name, tensor in table.items():
        found = tree.view(data, layout.starts[name], tree.NAMES[tensor.dtype], tensor.shape)
        assert same(found, tensor.detach())


@given(tables, st.data())
@settings(max_examples=30)
def test_a_header_matches_only_its_own_tensors(table: dict[str, torch.Tensor], data: st.DataObject) -> None:
    layout = tensor_files.lay_out(types_of(table))
    places: dict[int, list[TensorType]] = {}
    for name, kind in types_of(table).items():
        places.setdefault(layout.starts[name], []).append(kind)
    assert tensor_files.is_header_of(layout.header, places)
    assert not tensor_files.is_header_of(layout.header, {**places, 1 << 20: [TensorType("int8", (3,))]})
    at = data.draw(st.integers(0, len(layout.header) - 1))
    torn = layout.header[:at] + bytes([layout.header[at] ^ 0x80]) + layout.header[at + 1 :]
    assert not tensor_files.is_header_of(torn, places)


def test_the_reference_implementation_reads_the_file(tmp_path: Path) -> None:
    table = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in tree.NAMES}
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
    assert all(layout.starts[name] % tensor.element_size() == 0 for name, tensor in table.items())


def test_dtypes_have_the_sizes_of_torchs() -> None:
    for name, dtype in tensor_files.DTYPES.items():
        kind = tree.DTYPES[name]
        assert str(kind) == f"torch.{name}"
        assert (dtype.item_bytes, dtype.is_complex) == (kind.itemsize, kind.is_complex)
