"""Boxes of tensors, compared with torch's own slicing."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.checkpoints import tensor_boxes
from elasticctl_store.checkpoints.tensor_boxes import Box, Holding

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def cells(box: Box, shape: tuple[int, ...]) -> set[int]:
    """The elements of a box, numbered as in the whole tensor."""
    numbers = torch.arange(prod(shape)).reshape(shape)
    for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        numbers = numbers.narrow(dim, start, length)
    return set(numbers.reshape(-1).tolist())


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, length)) for length in shape)
    return Box(offset, tuple(draw(st.integers(0, length - at)) for length, at in zip(shape, offset, strict=True)))


@given(st.data(), shapes)
@settings(max_examples=40)
def test_an_overlap_is_the_intersection(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    both = tensor_boxes.overlap(a, b)
    assert (cells(both, shape) if both else set()) == cells(a, shape) & cells(b, shape)
    if both:
        inner = both.within(a)
        assert all(at >= 0 and at + n <= m for at, n, m in zip(inner.offset, inner.shape, a.shape, strict=True))


@given(shapes.filter(len), st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=40)
def test_shards_are_split_like_torch_chunk(
    shape: tuple[int, ...], first: int, second: int, data: st.DataObject
) -> None:
    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in range(2)]
    found: list[int] = []
    for i in range(first):
        for j in range(second):
            box = tensor_boxes.shard(shape, [(dims[0], first, i), (dims[1], second, j)])
            found += cells(box, shape)
            if second == 1:
                chunks = torch.arange(prod(shape)).reshape(shape).chunk(first, dims[0])
                expected = chunks[i].reshape(-1).tolist() if i < len(chunks) else []
                assert cells(box, shape) == set(expected)
    assert sorted(found) == list(range(prod(shape)))


@given(shapes.filter(lambda shape: tensor_boxes.row_dimension(shape) is not None), st.data())
@settings(max_examples=40)
def test_cut_boxes_are_contiguous_and_complete(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = tensor_boxes.whole(shape)
    rows = data.draw(st.integers(1, shape[tensor_boxes.row_dimension(shape) or 0] - 1))
    head, tail = tensor_boxes.cut(box, rows)
    assert sorted(cells(head, shape)) + sorted(cells(tail, shape)) == list(range(prod(shape)))


@pytest.mark.parametrize("rows", [0, 4, 5])
def test_an_empty_cut_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match="rows"):
        tensor_boxes.cut(tensor_boxes.whole((1, 4)), rows)


def written(shares: list[list[tuple[str, Box]]], sizes: dict[str, tuple[int, ...]]) -> Counter[tuple[str, int]]:
    return Counter((name, cell) for share in shares for name, box in share for cell in cells(box, sizes[name]))


@given(st.dictionaries(st.text(max_size=2), shapes, max_size=8), st.integers(1, 5), st.data())
@settings(max_examples=30)
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    sizes: dict[str, tuple[int, ...]], world_size: int, data: st.DataObject
) -> None:
    some_ranks = st.sets(st.integers(0, world_size - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    holdings = []
    for name, shape in sizes.items():
        box = tensor_boxes.whole(shape)
        holdings.append(Holding(name, box, box.elements * tensor_boxes.CUT_BYTES, data.draw(some_ranks)))
    shares = tensor_boxes.share_out(holdings, world_size)
    held = {holding.name: holding.ranks for holding in holdings}
    assert all(rank in held[name] for rank, share in enumerate(shares) for name, _ in share)
    assert written(shares, sizes) == Counter((n, cell) for n, shape in sizes.items() for cell in range(prod(shape)))
    assert {name for share in shares for name, _ in share} == set(sizes)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_huge_tensor_is_shared_by_the_ranks(world_size: int) -> None:
    ranks = tuple(range(world_size))
    rows = 1000
    holdings = [
        Holding("mean", tensor_boxes.whole((10,)), 40, (0,)),
        Holding("embedding", tensor_boxes.whole((1, rows, 16)), rows * (1 << 17), ranks),
        Holding("bias", tensor_boxes.whole((16,)), 64, ranks),
    ]
    shares = tensor_boxes.share_out(holdings, world_size)
    parts = [sum(box.shape[1] for name, box in share if name == "embedding") for share in shares]
    assert sum(parts) == rows
    assert max(parts) - min(parts) <= world_size


def test_small_tensors_stay_whole_and_are_balanced() -> None:
    holdings = [Holding(str(number), tensor_boxes.whole((1000,)), 4000, (0, 1, 2, 3)) for number in range(8)]
    shares = tensor_boxes.share_out(holdings, 4)
    assert [[box.shape for _, box in share] for share in shares] == [[(1000,), (1000,)]] * 4


def test_ranks_with_more_of_their_own_get_less_of_the_rest() -> None:
    holdings = [Holding("own", tensor_boxes.whole((10,)), 10 << 20, (0,))]
    holdings += [Holding(str(number), tensor_boxes.whole((2, 2)), 1 << 20, (0, 1)) for number in range(20)]
    first, second = tensor_boxes.share_out(holdings, 2)
    assert (len(first), len(second)) == (1 + 5, 15)
