"""Boxes of tensors: which part of a tensor is where, and which rank writes which part. Pure: no torch, no I/O.

A tensor that is sharded over ranks, or that is too large for one rank to write, is stored as boxes: an offset in the
whole tensor and a shape. Who holds, writes or needs which elements is computed with boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

CUT_BYTES = 1 << 20
"""Tensors up to this size are written whole: balancing less than that is not worth another entry."""


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor from `offset` on; `shape` has their number in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements in it."""
        return prod(self.shape)

    def within(self, outer: Box) -> Box:
        """The same elements, with an offset relative to the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)


@dataclass(frozen=True, slots=True)
class Holding:
    """A box of the tensor `name`, its size in bytes, and the ranks that hold identical copies of it, in ascending
    order."""

    name: str
    box: Box
    size_bytes: int
    ranks: tuple[int, ...]


def whole(shape: Iterable[int]) -> Box:
    """Return the box that covers a whole tensor."""
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the elements that are in both of two boxes of one tensor; None if there are none."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    ends = zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    shape = tuple(min(x + n, y + m) - start for start, (x, n, y, m) in zip(offset, ends, strict=True))
    return Box(offset, shape) if all(length > 0 for length in shape) else None


def are_disjoint(found: Iterable[Box]) -> bool:
    """Return whether no two of these boxes of one tensor have an element in common."""
    filled = [box for box in found if box.elements]
    if len(filled) < 2 or not filled[0].shape:
        return len(filled) < 2
    sweep = max(range(len(filled[0].shape)), key=lambda dim: len({box.offset[dim] for box in filled}))
    active: list[Box] = []
    for box in sorted(filled, key=lambda box: box.offset[sweep]):
        active = [other for other in active if other.offset[sweep] + other.shape[sweep] > box.offset[sweep]]
        if any(overlap(box, other) for other in active):
            return False
        active.append(box)
    return True


def shard(shape: Sequence[int], splits: Iterable[tuple[int, int, int]]) -> Box:
    """Return one rank's box of a tensor that is split like `torch.chunk`: equal chunks, the last ones shorter or empty.

    `splits` are (dimension, number of chunks, index of the chunk), applied in order: each splits what the last one
    left.
    """
    offset, left = [0] * len(shape), list(shape)
    for dim, chunks, index in splits:
        chunk = -(-left[dim] // chunks)
        start = min(index * chunk, left[dim])
        offset[dim] += start
        left[dim] = min(chunk, left[dim] - start)
    return Box(tuple(offset), tuple(left))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def row_dimension(shape: Sequence[int]) -> int | None:
    """Return the dimension along which a box can be cut into contiguous parts; None if it cannot be cut."""
    return next((dim for dim, length in enumerate(shape) if length > 1), None)


def cut(box: Box, rows: int) -> tuple[Box, Box]:
    """Cut off the first `rows` rows along `row_dimension`. Raises ValueError unless both parts have rows."""
    dim = row_dimension(box.shape)
    if dim is None or not 0 < rows < box.shape[dim]:
        raise ValueError(f"{box} cannot be cut after {rows} rows")
    head, tail, offset = list(box.shape), list(box.shape), list(box.offset)
    head[dim], tail[dim], offset[dim] = rows, box.shape[dim] - rows, box.offset[dim] + rows
    return Box(box.offset, tuple(head)), Box(tuple(offset), tuple(tail))


def cut_at(box: Box, size_bytes: int, at_bytes: int) -> tuple[Box, Box] | None:
    """Cut a box of `size_bytes` after about its first `at_bytes`; return None if one part would be empty."""
    dim = row_dimension(box.shape)
    if dim is None or not size_bytes:
        return None
    rows = at_bytes * box.shape[dim] // size_bytes
    return cut(box, rows) if 0 < rows < box.shape[dim] else None


def share_out(holdings: Iterable[Holding], world_size: int) -> list[list[tuple[str, Box]]]:
    """Return which rank writes which boxes: every element once, balanced by bytes, identical for identical arguments.

    What only one rank holds is written by it. The rest fills the ranks that hold it to one level, in the given order; a
    tensor larger than `CUT_BYTES` is cut where one rank is full.
    """
    shares: list[list[tuple[str, Box]]] = [[] for _ in range(world_size)]
    load_bytes = [0] * world_size
    groups: dict[tuple[int, ...], list[Holding]] = {}
    for holding in holdings:
        groups.setdefault(holding.ranks, []).append(holding)
    for ranks in sorted(groups, key=lambda ranks: (len(ranks), ranks)):
        _fill(shares, load_bytes, ranks, groups[ranks])
    return shares


def _fill(
    shares: list[list[tuple[str, Box]]], load_bytes: list[int], ranks: tuple[int, ...], group: list[Holding]
) -> None:
    """Distribute the holdings of `ranks` to them, in order, each until it reaches the common level."""
    level = _level([load_bytes[rank] for rank in ranks], sum(holding.size_bytes for holding in group))
    todo = [(holding.name, holding.box, holding.size_bytes) for holding in reversed(group)]
    position = 0
    while todo:
        name, box, size_bytes = todo.pop()
        rank = ranks[position]
        room = level - load_bytes[rank]
        is_last = position == len(ranks) - 1
        if not is_last and room < size_bytes:
            parts = cut_at(box, size_bytes, room) if size_bytes > CUT_BYTES else None
            if parts is None and room * 2 < size_bytes:  # less than half fits: leave it to the next rank
                todo.append((name, box, size_bytes))
                position += 1
                continue
            if parts is not None:
                tail_bytes = size_bytes // box.elements * parts[1].elements
                todo.append((name, parts[1], tail_bytes))
                box, size_bytes = parts[0], size_bytes - tail_bytes
                position += 1
        shares[rank].append((name, box))
        load_bytes[rank] += size_bytes


def _level(loads: list[int], added: int) -> int:
    """Return the common load once `added` is distributed so that those with the highest load get least."""
    total = added
    ordered = sorted(loads)
    for count, load in enumerate(ordered, start=1):
        total += load
        level = -(-total // count)
        if count == len(ordered) or level <= ordered[count]:
            return level
    return 0
