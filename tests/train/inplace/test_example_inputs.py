"""What a model is called with, told to another rank without its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elasticctl_train.inplace.example_inputs import ExampleInputs, repeat

TENSORS = st.builds(
    lambda shape, dtype, turned: torch.ones(shape, dtype=dtype).t() if turned else torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 3), min_size=2, max_size=2),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.booleans(),
)
VALUES = st.recursive(
    st.one_of(TENSORS, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda items: st.one_of(
        st.lists(items, max_size=3),
        st.lists(items, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), items, max_size=3),
    ),
    max_leaves=5,
)


class Witness(nn.Module):
    """Keeps what it is called with, and whether autocast was enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, *inputs: Any, **options: Any) -> list[Any]:
        self.seen.append((list(inputs), options, torch.is_autocast_enabled("cpu")))
        return [self.scale * 2, {"not a tensor": 1}]


def alike(one: Any, other: Any) -> bool:
    """Are two values of the same structure, with tensors of the same kind?"""
    if isinstance(one, torch.Tensor):
        kinds = [(each.dtype, each.shape, each.stride(), each.device.type) for each in (one, other)]
        return kinds[0] == kinds[1] and not other.any()
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    return bool(one == other)


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.sampled_from("abc"), VALUES, max_size=2))
def test_the_call_is_repeated_with_zeros(inputs: list[Any], options: dict[str, Any]) -> None:
    examples = ExampleInputs()
    examples.note(inputs, options)
    (call,) = ExampleInputs(examples.take() or "").calls
    model = Witness()
    repeat(call, model, torch.device("cpu"))
    assert alike([inputs, options], list(model.seen[0][:2]))
    assert model.scale.grad is not None
    assert not model.scale.grad.any()


def test_autocast_is_repeated() -> None:
    examples, model = ExampleInputs(), Witness()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        examples.note([torch.ones(1)], {})
    repeat(examples.calls[0], model, torch.device("cpu"))
    assert model.seen[0][2] is True


def test_batches_that_all_differ_are_not_all_reported() -> None:
    examples = ExampleInputs()
    reports = 0
    for size in range(1, 50):
        examples.note([torch.ones(size)], {})
        reports += examples.take() is not None
    assert reports == 4


def test_only_the_newest_calls_are_kept_and_each_is_reported_once_in_a_group() -> None:
    examples = ExampleInputs()
    for size in (1, 2, 1, 3, 4, 5):
        examples.note([torch.ones(size)], {})
    assert len(examples.calls) == 4
    assert examples.take() is not None
    assert examples.take() is None
    examples.note([torch.ones(5)], {})
    assert examples.take() is None
    examples.enter_group()
    assert examples.take() is not None


@pytest.mark.parametrize("value", [object(), {1: 2}, torch.ones(2).to_sparse(), nn.Parameter(torch.ones(1)), {1, 2}])
def test_what_cannot_be_made_again_is_not_recorded(value: object) -> None:
    examples = ExampleInputs()
    examples.note([value], {})
    assert examples.calls == []
    assert examples.take() is None


def test_more_than_the_service_accepts_is_not_reported() -> None:
    examples = ExampleInputs()
    examples.note([torch.ones(1)] * 500, {})
    assert examples.take() is None
