"""State trees as JSON: the tensors in them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl_store.checkpoints.state_trees import decode, tensors_by_path
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError

LEAF = {"$tensor": "x", "dtype": "float32", "shape": [2]}


def test_tensors_are_named_by_their_path() -> None:
    tree = {"a": [LEAF, 1, {"$tuple": [LEAF]}], "b": {"$map": [[0, LEAF], ["k", None]]}, "c": {"$float": "nan"}}
    found = list(tensors_by_path(tree))
    assert found == [(path, "x", TensorType("float32", (2,))) for path in ("a.0", "a.2.0", "b.0")]


@pytest.mark.parametrize(
    "data",
    [
        {"$float": "1.5"},
        {"$float": 1.5},
        {"$bytes": 1},
        {"$bytes": "AAA"},
        {"$bytes": "ä==="},
        {"$tuple": 1},
        {"$tuple": [], "more": 1},
        {"$map": {"a": 1}},
        {"$map": [["a"]]},
        {"$map": [[[], 1]]},
        {"$map": [["a", 1], ["a", 2]]},
        {"$map": [[LEAF, 1]]},
        {"$counter": 3},
        {"$new": 1},
        {**LEAF, "dtype": "float3"},
        {**LEAF, "dtype": ["float32"]},
        {**LEAF, "shape": 2},
        {**LEAF, "shape": [2.0]},
        {**LEAF, "shape": [True]},
        {**LEAF, "shape": [-1]},
        {**LEAF, "shape": [0, 1 << 63]},
        {**LEAF, "shape": [0, 1 << 40, 1 << 40]},
        {**LEAF, "strides": [1]},
        {**LEAF, "stride": [2]},
        {**LEAF, "stride": [0]},
        {**LEAF, "stride": [1, 1]},
        {**LEAF, "stride": None},
        {**LEAF, "shape": [0, 2], "stride": [2, 1]},
        {**LEAF, "shape": [2, 2], "stride": [1, 1]},
        {**LEAF, "shape": [2, 1], "stride": [1, 1 << 63]},
        {**LEAF, "requires_grad": False},
        {**LEAF, "dtype": "int8", "requires_grad": True},
        {**LEAF, "parameter": 1},
        {**LEAF, "$tensor": 5},
        {"$tensor": "x"},
    ],
)
def test_an_invalid_tree_is_damage(data: Any) -> None:
    with pytest.raises(DamagedError):
        decode({"part": [data]}, lambda name, kind: (name, kind))
