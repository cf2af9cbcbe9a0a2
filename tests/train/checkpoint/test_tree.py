"""State trees to JSON and back."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from contextlib import suppress
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.checkpoints.state_trees import MAX_DEPTH, decode
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError, StateError
from elasticctl_train.checkpoint import tree as tree_module
from elasticctl_train.checkpoint.tree import MAX_BYTES, Flattener, check_part_name, leaves
from tests.support.train.states import same, through_json, trees


@given(trees)
@settings(max_examples=150)
def test_a_tree_survives_json(tree: Any) -> None:
    assert same(through_json(tree), tree)


def test_the_states_of_torchs_schedulers_are_restored() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    lr = torch.optim.lr_scheduler
    schedulers: list[Any] = [
        lr.MultiStepLR(optimizer, [2, 2, 5]),
        lr.OneCycleLR(optimizer, max_lr=1.0, total_steps=10),
        lr.CosineAnnealingWarmRestarts(optimizer, 3),
        lr.ReduceLROnPlateau(optimizer),
        lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [3]),
        lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    ]
    for scheduler in schedulers:
        restored = through_json(scheduler.state_dict())
        assert same(restored, scheduler.state_dict())
        scheduler.load_state_dict(restored)


def test_tied_tensors_stay_tied() -> None:
    weight = torch.ones(2, 3)
    restored = through_json({"a": weight, "b": {"c": weight}, "view": weight.t(), "copy": weight.clone()})
    assert restored["a"] is restored["b"]["c"]
    assert restored["view"] is not restored["a"]
    assert restored["copy"] is not restored["a"]


def test_the_weights_of_a_model_with_tied_layers_are_stored_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    flat = Flattener()
    flat.encode(model.state_dict(), "model")
    assert list(flat.tensors) == ["model/0.weight"]


def test_names_never_clash() -> None:
    ones, twos = torch.ones(1), torch.full((1,), 2.0)
    tree = {"a": {"b": ones}, "a/b": twos, 0: torch.zeros(1), "0": torch.full((1,), 3.0)}
    assert same(through_json(tree), tree)
    flat = Flattener()
    flat.encode(ones, "__metadata__")
    assert "__metadata__" not in flat.tensors


def test_the_ordered_dict_of_a_module_becomes_a_plain_dict() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    assert type(state) is OrderedDict
    assert same(through_json(state), dict(state))


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def experimental(make: Any) -> Any:
    """Create a value without torch's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


class Level(IntEnum):
    """An int with a name."""

    LOW = 1


class Subclass(torch.Tensor):
    """A tensor that may have more than its elements."""


class Custom:
    """A value that a checkpoint cannot hold."""

    def __reduce__(self) -> Any:
        raise AssertionError("somebody tried to pickle it")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Custom(), "Custom"),
        (lambda: None, "builtins.function"),
        (bytearray(b"bytes"), "builtins.bytearray"),
        pytest.param(bytes(MAX_BYTES + 1), "1048577 bytes outside of tensors", id="bytes"),
        ({1, 2}, "builtins.set"),
        (np.float64(1.0), "numpy.float64"),
        (np.ones(3), "numpy.ndarray"),
        (torch.float32, "torch.dtype"),
        (torch.ones(2, 2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
        (
            experimental(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
            "nested torch.strided tensor",
        ),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
        (freed(), "a tensor whose memory has been freed"),
        (torch.empty(0, 1 << 61), "a tensor of shape (0, 2305843009213693952)"),
        pytest.param(1 << 14_000, "an integer of more than 14000 bits", id="large"),
        pytest.param(-(1 << 20_000), "an integer of more than 14000 bits", id="low"),
        (torch.Size([1]), "torch.Size"),
        (Level.LOW, "Level"),
        ({torch.ones(1): 1}, "tensors as keys"),
        ({(1, torch.ones(1)): 1}, "tensors as keys"),
        (namedtuple("Pair", "a b")(1, 2), "Pair"),
        (frozenset({1}), "builtins.frozenset"),
        (1j, "builtins.complex"),
        (np.int64(1), "numpy.int64"),
        (np.bool_(True), "numpy.bool"),
        (defaultdict(int), "collections.defaultdict"),
        (experimental(lambda: torch.ones(2, 2).to_sparse_csr()), "torch.sparse_csr"),
        (experimental(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)), "torch.quint8"),
        (experimental(lambda: torch.ones(2, dtype=torch.complex32)), "torch.complex32"),
        (torch.ones(2).to(torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz"),
        (torch.ones(2).as_subclass(Subclass), "Subclass"),
        ("\ud83d\ude00", "a text with a pair of surrogates"),
        ([1, "\ud83d\ude00"], "a text with a pair of surrogates"),
    ],
)
def test_unsupported_values_are_refused_with_their_path(value: object, said: str) -> None:
    with pytest.raises(StateError, match=r"optimizer/groups/1/odd(/1)?: a checkpoint cannot hold") as caught:
        Flattener().encode({"groups": [{}, {"odd": value}]}, "optimizer")
    assert said in str(caught.value)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner, 1: 0}])
def test_trees_deeper_than_readable_are_refused(wrap: Any) -> None:
    tree: Any = {}
    for _ in range(MAX_DEPTH):
        tree = wrap(tree)
    assert same(through_json(tree), tree)
    with pytest.raises(StateError, match="more than 100 nested levels"):
        Flattener().encode(wrap(tree), "state")


@pytest.mark.parametrize("leaf", [1, 1.5, "text", [1], [], {"a": 1}, (1, 2), Counter("ab"), torch.ones(1)])
def test_a_saved_tree_of_any_depth_can_be_read(leaf: Any) -> None:
    for depth in range(MAX_DEPTH - 3, MAX_DEPTH + 2):
        tree = leaf
        for _ in range(depth):
            tree = [tree]
        with suppress(StateError):
            assert same(through_json(tree), tree)


def test_circular_values_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    with pytest.raises(
        StateError, match=r"state/0/again/0/again/0.*: a checkpoint cannot hold more than 100 nested lev"
    ):
        Flattener().encode(cycle, "state")


def test_exponentially_nested_lists_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "MAX_CONTAINERS", 1000)
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(StateError, match=r"state/0/0.*more than 1000 lists, dicts and tuples"):
        Flattener().encode(bomb, "state")


@pytest.mark.parametrize("key", [1 << 14_000, (1, 1 << 20_000), 1 << 20_000], ids=["number", "pair", "larger"])
def test_a_key_too_large_to_print_is_refused(key: Any) -> None:
    with pytest.raises(StateError, match=r"^state.*: a checkpoint cannot hold an? (key|integer)"):
        Flattener().encode({key: 1}, "state")


@pytest.mark.parametrize("number", [(1 << 14_000) - 1, 1 << 64, -(1 << 64)], ids=["largest", "large", "low"])
def test_large_numbers_are_restored(number: int) -> None:
    assert through_json([number, {"a": number, number: 1}]) == [number, {"a": number, number: 1}]


@pytest.mark.parametrize("key", ["\ud83d\ude00", ("\ud83d\ude00", 1)], ids=["text", "pair"])
def test_a_key_that_json_would_change_is_refused(key: Any) -> None:
    with pytest.raises(StateError, match=r"^state/.*: a checkpoint cannot hold a text"):
        Flattener().encode({key: 1, "\N{GRINNING FACE}": 2}, "state")
    with pytest.raises(StateError, match="the name of a part: a checkpoint cannot hold a text"):
        check_part_name("\ud83d\ude00")


MARKERS = ("$tensor", "$map", "$tuple", "$counter", "$float", "$bytes")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["$tensor", "$map", "$tuple", "$counter", "$float", "$bytes", "$new", "dtype", "shape", "a"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(json_values)
def test_json_that_is_not_a_tree_is_damage(data: Any) -> None:
    def tensor(name: str, kind: TensorType) -> torch.Tensor:
        raise DamagedError(f"no tensor {name}")

    with suppress(DamagedError):
        decode(data, tensor)


def test_leaves_have_the_names_of_the_flattener() -> None:
    weight = torch.ones(2)
    value = {"a": [weight, {"b": (1, torch.zeros(1))}], 3: {"exp_avg": torch.ones(3)}, "no": None, "again": weight}
    flat = Flattener()
    flat.encode(value, "part")
    found = dict(leaves(value, "part"))
    assert found.keys() == {"part/a/0", "part/a/1/b/1", "part/3/exp_avg", "part/again"}
    assert flat.tensors.keys() == found.keys() - {"part/again"}
    assert all(found[name] is tensor for name, tensor in flat.tensors.items())
