"""A resumed state is as if training had not been interrupted."""

from __future__ import annotations

import inspect
import io
import json
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.reader import fetch_documents, parse
from elasticctl_store.checkpoints.state_trees import decode
from elasticctl_store.errors import DamagedError, StateError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run
from elasticctl_train.checkpoint import compatibility
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.checkpoint.memory import buffers
from tests.support.train.checkpoints import read_alone
from tests.support.train.states import same

OPTIMIZERS = sorted(
    name
    for name, found in vars(torch.optim).items()
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
)
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
    "LBFGS": {"max_iter": 2, "history_size": 3},
}


class Net(nn.Module):
    """Weights in the channels-last format, large ones, and ones of a single element."""

    def __init__(self, dtype: torch.dtype, only_matrices: bool, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(170, 200, sparse=sparse)
        self.out = nn.Linear(200, 1, bias=not only_matrices)
        self.convolution = None if only_matrices or sparse else nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.to(dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.table(rows)
        if self.convolution is not None:
            found = found * self.convolution(found.view(-1, 1, 10, 20)).mean()
        return self.out(found)


def trained(kind: str, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, not stepped yet."""
    torch.manual_seed(0)
    model = Net(dtype, only_matrices=kind == "Muon", sparse=kind == "SparseAdam")
    parameters: Any = model.table.parameters() if kind == "SparseAdam" else model.parameters()
    return model, getattr(torch.optim, kind)(parameters, lr=1e-3, **OPTIONS.get(kind, {}))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    rows = torch.arange(12)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(rows).square().sum()
        loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}/{index}")


def described(state: Any) -> dict[str, Any]:
    """The properties of each tensor, and the others that share its storage."""
    found = dict(tensors(state))
    homes: dict[int, list[str]] = {}
    for path, tensor in found.items():
        if tensor.numel():
            homes.setdefault(tensor.untyped_storage().data_ptr(), []).append(path)
    return {
        path: (
            type(tensor),
            tensor.dtype,
            tensor.device,
            tensor.shape,
            tensor.stride(),
            tensor.requires_grad,
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
            homes.get(tensor.untyped_storage().data_ptr()),
        )
        for path, tensor in found.items()
    }


def written(state: Any) -> tuple[Any, list[int]]:
    """The state after torch.save and torch.load, and the sizes of its storages."""
    file = io.BytesIO()
    torch.save(state, file)
    sizes = [each.file_size for each in zipfile.ZipFile(file).infolist() if "/data/" in each.filename]
    file.seek(0)
    return torch.load(file), sizes


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*[(kind, torch.float32) for kind in OPTIMIZERS], ("Adam", torch.bfloat16), ("SGD", torch.float64)],
    ids=str,
)
def test_a_resumed_optimizer_equals_an_uninterrupted_one(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model, optimizer = trained(kind, dtype)
    steps(model, optimizer, 2)
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    checkpoints.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Label(2))
    assert checkpoints.settle()

    live = dict(zip(("model", "optimizer"), trained(kind, dtype), strict=True))
    restored = Checkpointer(LocalStorage(tmp_path)).restore()
    assert restored is not None
    compatibility.load(live, restored.state, "here")
    del restored
    for each in (lambda: None, lambda: [steps(*pair, 2) for pair in ((model, optimizer), tuple(live.values()))]):
        each()
        here, there = live["optimizer"].state_dict(), optimizer.state_dict()
        assert same(here, there)
        assert described(here) == described(there)
        assert described(live["model"].state_dict()) == described(model.state_dict())
        (a, sizes_a), (b, sizes_b) = written(here), written(there)
        assert same(a, b)
        assert sizes_a == sizes_b


def test_every_kind_of_tensor_is_restored(tmp_path: Path) -> None:
    shared = torch.randn(40, 60)
    state = {
        "large": torch.randn(300, 400),
        "large odd": torch.randn(333, 101).double(),
        "columns": torch.randn(300, 400).t(),
        "small columns": torch.randn(3, 4).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one channel": torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        "leaf": torch.randn(300, 200, requires_grad=True),
        "parameter": nn.Parameter(torch.randn(2)),
        "frozen": nn.Parameter(torch.arange(4), requires_grad=False),
        "shared": shared,
        "again": [shared],
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3, dtype=torch.int8),
    }
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    checkpoints.save({"all": state}, Label(1))
    assert checkpoints.settle()
    restored = checkpoints.restore()
    assert restored is not None
    found = restored.state["all"]
    assert same(found, {**state, "parameter": state["parameter"], "frozen": state["frozen"]})
    assert described(found) == described(state)
    assert found["again"][0] is found["shared"]
    written(found)


def test_a_view_with_gaps_is_restored_without_them(tmp_path: Path) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    whole = torch.randn(6, 8)
    checkpoints.save(
        {"all": {"rows": whole[::2], "corner": whole.t()[:3, :2], "wide": whole[:1].expand(5, 8)}}, Label(1)
    )
    assert checkpoints.settle()
    restored = checkpoints.restore()
    assert restored is not None
    for tensor in restored.state["all"].values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert same(restored.state["all"]["corner"], whole.t()[:3, :2].clone())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_freed_with_its_tensors() -> None:
    size = 32 << 20
    room = buffers.ReadBuffer(2 * size + 100)
    room.data.fill_(1)
    first, second = (room.keep_tensor(start, torch.float32, (size // 4,)) for start in (0, size))
    assert first is not None
    assert second is not None
    full = resident_bytes()
    del first
    assert full - resident_bytes() > size // 2
    assert second.view(torch.uint8).sum() == size
    room.close()
    assert second.view(torch.uint8).sum() == size


def test_unused_memory_is_freed_immediately() -> None:
    room = buffers.ReadBuffer(32 << 20)
    room.data.fill_(1)
    kept = room.keep_tensor(16 << 20, torch.uint8, (1 << 20,))
    assert kept is not None
    full = resident_bytes()
    room.close()
    assert full - resident_bytes() > 24 << 20
    assert int(kept.sum()) == 1 << 20


@pytest.mark.parametrize(("start", "length"), [(64, 1000), (32, 1 << 20)])
def test_small_and_unaligned_tensors_are_copied(start: int, length: int) -> None:
    assert buffers.ReadBuffer(2 << 20).keep_tensor(start, torch.uint8, (length,)) is None


def test_earlier_versions_read_ordered_dicts_as_plain_ones(tmp_path: Path) -> None:
    """Earlier versions ignore the field of a share document that lists them."""
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpointer(storage)
    inner = OrderedDict({2: 1.5, "$b": OrderedDict(a=(OrderedDict(c=1), {"d": [OrderedDict()]}))})
    state, local = {"part": {"x": inner, "y": [inner]}}, {"own": OrderedDict(z=1, a=2)}
    checkpoints.save(state, Label(1), local=local)
    assert checkpoints.settle()
    (commit,) = read_commits(storage)
    read, own = read_alone(storage, commit)
    assert same(read, state)
    assert same(own, local)
    (document,) = fetch_documents(storage, commit)
    assert b"$ordered" not in json.dumps({**document, "ordered": None}).encode()
    del document["ordered"]
    plain = decode(parse(commit, [document]).state, lambda name, kind: None)
    assert plain == state
    assert type(plain["part"]["x"]["$b"]["a"][0]) is dict
    odd = ["part", "z"], ["part", "y", 0, "$map"], [[]], ["part", "x", "$map", 0, 1]
    for where in (*([place] for place in odd), [["part"], 3], {}):
        with pytest.raises(DamagedError):
            parse(commit, [{**document, "ordered": {"state": where}}])


def test_a_custom_part_gets_its_ordered_dict(tmp_path: Path) -> None:
    class Recent:
        """Moves entries that were read to the end."""

        def __init__(self) -> None:
            self.seen: Any = OrderedDict(a=torch.ones(1), b=torch.ones(2))

        def state_dict(self) -> Any:
            return self.seen

        def load_state_dict(self, state: Any) -> None:
            state.move_to_end("a")
            self.seen = state

    part = Recent()
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    checkpoints.save({"recent": part.state_dict()}, Label(1))
    assert checkpoints.settle()
    restored = checkpoints.restore()
    assert restored is not None
    compatibility.load({"recent": part}, restored.state, "here")
    assert list(part.seen) == ["b", "a"]


@pytest.mark.parametrize("name", ["$own", "$rank", "$"])
def test_a_reserved_name_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(StateError, match="needs another name: names that start with"):
        Run(str(tmp_path), model=nn.Linear(1, 1), **{name: nn.Linear(1, 1)})
    with pytest.raises(StateError, match="needs a name that is text"):
        Checkpointer(LocalStorage(tmp_path)).save({3: 1}, Label(1))  # type: ignore[dict-item]
