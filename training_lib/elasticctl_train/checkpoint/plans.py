"""What one rank writes at a save: which pieces of which tensors, and where in its tensor files they go."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elasticctl_store.checkpoints import tensor_boxes, tensor_files
from elasticctl_store.checkpoints.pieces import OWN, Piece
from elasticctl_store.checkpoints.tensor_boxes import Box, Holding
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_train.checkpoint import dtensor, tree
from elasticctl_train.checkpoint.memory.buffers import Buffer
from elasticctl_train.checkpoint.memory.copying import Copier, CopyTarget, LateCopy

State = Mapping[str, Any]
"""What is saved: parts by name, each a tree (see `tree`)."""

Name = tuple[str, Box]
"""A box of a tensor, which identifies a piece wherever it is stored."""


@dataclass(frozen=True, slots=True)
class Apart:
    """The pieces that belong in files of their own: those that do not change, and tables."""

    unchanged: frozenset[Name] = frozenset()
    tables: frozenset[Name] = frozenset()


NOTHING_APART = Apart()


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state: the tensors that all ranks name alike, this rank's own, and the two trees as JSON.

    `kinds` is what a plan depends on: names, dtypes, shapes and, for sharded tensors, their layout over ranks.
    """

    shared: Mapping[str, torch.Tensor]
    own: Mapping[str, torch.Tensor]
    kinds: Sequence[tree.Kind]
    state: Mapping[str, Any]
    local: Any


@dataclass(frozen=True, slots=True)
class CopySource:
    """Where a piece is copied from: the named tensor, and for a plain one the rows that it is cut to (None: all)."""

    name: str
    cut: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A tensor file before it is filled, and the byte of the buffer at which it starts; pieces count from there."""

    start: int
    header: bytes
    size_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class SharePlan:
    """What this rank writes for states of certain `kinds`. It is reused, because planning is slow and states rarely
    change.

    `apart` are the pieces in the files `base` and `tables`. `sources` are in the order of the pieces of all files.
    """

    kinds: Sequence[tree.Kind]
    rank_0_only: Collection[str]
    apart: Apart
    own: PlannedFile
    base: PlannedFile | None
    tables: PlannedFile | None
    sources: tuple[CopySource, ...]
    document: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """The size of the buffer that it needs."""
        return self.files[-1].start + self.files[-1].size_bytes

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        """The planned files, in the order in which they are in the buffer."""
        return tuple(file for file in (self.own, self.base, self.tables) if file is not None)

    @property
    def placed(self) -> Iterator[tuple[Piece, int]]:
        """The pieces of all files, each with the byte of the buffer at which it starts."""
        return ((piece, file.start + piece.start) for file in self.files for piece in file.pieces)

    @property
    def shared_pieces(self) -> frozenset[Name]:
        """What could be in a base file: everything that does not belong to this rank alone."""
        return frozenset((piece.name, piece.box) for piece, _ in self.placed if not piece.is_own)

    def fits(self, flat: Flat, rank_0_only: Collection[str], apart: Apart = NOTHING_APART) -> bool:
        """Return whether this is also the plan for such a state."""
        return self.kinds == flat.kinds and self.rank_0_only == rank_0_only and self.apart == apart

    def fill(
        self, buffer: Buffer, flat: Flat, copier: Copier, until_step: Collection[str] = ()
    ) -> list[torch.cuda.Event | LateCopy]:
        """Copy this rank's share to its place in `buffer`; the parts in `until_step` may be copied later.

        Copies from a GPU to page-locked memory are only queued, on the training's own stream, so that nothing that
        training queues later can overtake them. The file is complete once everything that is returned has been
        synchronized.
        """
        if buffer.plan is not self:
            buffer.plan = self
            for file in self.files:
                header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
                buffer.data[file.start : file.start + len(header)].copy_(header)
            views = [tree.view(buffer.data, start, piece.dtype, piece.box.shape) for piece, start in self.placed]
            buffer.targets = [CopyTarget.of(view) for view in views]
        with torch.no_grad():
            found = [self._part(source, flat) for source in self.sources]
            if not buffer.pinned:
                may_wait = (
                    [source.name.split("/", 1)[0] in until_step for source in self.sources] if until_step else None
                )
                late = copier.copy(buffer.targets, found, may_wait)
                return [late] if late is not None else []
            torch._foreach_copy_([target.view for target in buffer.targets], found, non_blocking=True)
        devices = {tensor.device for tensor in found if tensor.is_cuda}
        return [torch.cuda.current_stream(device).record_event(_waitable()) for device in devices]

    def _part(self, source: CopySource, flat: Flat) -> torch.Tensor:
        tensor = flat.own[source.name] if source.name in flat.own else flat.shared[source.name]
        if source.cut is None and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            return tensor
        part = dtensor.local_part(tensor) if dtensor.is_sharded(tensor) else tensor
        return part if source.cut is None else part.narrow(*source.cut)


@dataclass(frozen=True, slots=True)
class FilledPlan:
    """The tensor files of a plan, with the tensors' bytes in `buffer` once everything is copied."""

    plan: SharePlan
    buffer: Buffer

    def bytes_of(self, file: PlannedFile) -> memoryview:
        """Return a file of the plan."""
        return self.buffer.data.numpy().data[file.start : file.start + file.size_bytes]

    def pieces(self) -> Iterator[tuple[Name, memoryview]]:
        """Yield the bytes of all pieces."""
        data = self.buffer.data.numpy().data
        for piece, start in self.plan.placed:
            yield (piece.name, piece.box), data[start : start + piece.size_bytes]


def flatten(state: State, local: State) -> Flat:
    """Flatten a state. Raises StateError for what a checkpoint cannot hold."""
    flat, own = tree.Flattener(), tree.Flattener()
    for part in state:
        tree.check_part_name(part)
    state_tree = {part: flat.encode(value, part, depth=1) for part, value in state.items()}
    local_tree = own.encode(dict(local), OWN)
    return Flat(flat.tensors, own.tensors, flat.kinds + own.kinds, state_tree, local_tree)


def plan(
    flat: Flat,
    rank: int,
    world_size: int,
    rank_0_only: Collection[str] = (),
    apart: Apart = NOTHING_APART,
) -> SharePlan:
    """Return this rank's part of a save: who writes what.

    Plain tensors are equal on all ranks and shared out, except those in `rank_0_only`, given by path or first
    component. Of sharded tensors, each rank writes what it holds, and ranks that hold the same box share it out. What
    is unchanged and the tables go into files of their own.
    """
    everyone = tuple(range(world_size))
    holdings: list[Holding] = []
    for name, tensor in flat.shared.items():
        if dtensor.is_sharded(tensor):
            held = dtensor.holders(tensor)
        else:
            alone = name in rank_0_only or name.split("/", 1)[0] in rank_0_only
            held = [(tensor_boxes.whole(tensor.shape), (0,) if alone else everyone)]
        holdings += [Holding(name, box, box.elements * tensor.dtype.itemsize, ranks) for box, ranks in held]
    mine = tensor_boxes.share_out(holdings, world_size)[rank]
    changing: list[tuple[str, torch.Tensor, Box]] = []
    fixed: list[tuple[str, torch.Tensor, Box]] = []
    tables: list[tuple[str, torch.Tensor, Box]] = []
    for name, box in mine:
        part = fixed if (name, box) in apart.unchanged else tables if (name, box) in apart.tables else changing
        part.append((name, flat.shared[name], box))
    changing += [(name, tensor, tensor_boxes.whole(tensor.shape)) for name, tensor in flat.own.items()]
    own, sources = _plan_file(changing, 0)
    end = own.start + own.size_bytes
    others: list[PlannedFile | None] = []
    for part in (fixed, tables):
        file, found = _plan_file(part, _aligned(end)) if part else (None, [])
        end = file.start + file.size_bytes if file is not None else end
        others.append(file)
        sources += found
    return SharePlan(
        kinds=flat.kinds,
        rank_0_only=rank_0_only,
        apart=apart,
        own=own,
        base=others[0],
        tables=others[1],
        sources=tuple(sources),
        document={"rank": rank, "world_size": world_size, "fingerprint": fingerprint(flat.shared)},
    )


def _plan_file(todo: Sequence[tuple[str, torch.Tensor, Box]], start: int) -> tuple[PlannedFile, list[CopySource]]:
    """Return the file of these boxes of tensors, and where its pieces are copied from."""
    layout, placed = lay_out(
        [(name, TensorType(tree.NAMES[tensor.dtype], tuple(tensor.shape)), box) for name, tensor, box in todo]
    )
    sources = [CopySource(todo[index][0], _cut(todo[index][1], todo[index][2])) for _, index in placed]
    return PlannedFile(start, layout.header, layout.size_bytes, tuple(piece for piece, _ in placed)), sources


def _aligned(size_bytes: int) -> int:
    """Return where in a buffer the next file can start."""
    return -(-size_bytes // tensor_files.ALIGNMENT) * tensor_files.ALIGNMENT


def lay_out(todo: Sequence[tuple[str, TensorType, Box]]) -> tuple[tensor_files.Layout, list[tuple[Piece, int]]]:
    """Lay out a tensor file for boxes of tensors (name, type of the whole, box).

    Returns its pieces in the order of their positions, each with the index of its box.
    """
    parts: dict[str, int] = {}
    for index, (name, kind, box) in enumerate(todo):
        part = name if box.shape == kind.shape else f"{name}@{','.join(map(str, box.offset))}"
        while part in parts or part == tensor_files.RESERVED_NAME:
            part += "~"
        parts[part] = index
    layout = tensor_files.lay_out(
        {part: TensorType(todo[at][1].dtype, todo[at][2].shape) for part, at in parts.items()}
    )
    found = ((todo[parts[part]], start, parts[part]) for part, start in layout.starts.items())
    return layout, [(Piece(name, kind.dtype, box, start), index) for (name, kind, box), start, index in found]


def rows_of(pieces: Sequence[Piece]) -> list[list[Any]]:
    """Return the pieces of a tensor file as its document lists them."""
    return [[p.name, p.dtype, p.box.offset, p.box.shape, p.start] for p in pieces]


def _cut(tensor: torch.Tensor, box: Box) -> tuple[int, int, int] | None:
    """Return how a box is cut out of what this rank holds: (dimension, first row, rows); None if it is all of it."""
    held = dtensor.box_of(tensor) if dtensor.is_sharded(tensor) else tensor_boxes.whole(tensor.shape)
    inner = box.within(held)
    if inner.shape == held.shape:
        return None
    dim = next(d for d, (length, full) in enumerate(zip(inner.shape, held.shape, strict=True)) if length != full)
    return dim, inner.offset[dim], inner.shape[dim]


def fingerprint(shared: Mapping[str, torch.Tensor]) -> str:
    """Return a text that is equal on two ranks if and only if their tensors have equal names, dtypes, shapes and
    layouts."""
    rows = sorted(
        f"{name} {tree.NAMES[tensor.dtype]} {list(tensor.shape)} {dtensor.describe(tensor)}"
        for name, tensor in shared.items()
    )
    return hashlib.sha256("\n".join(rows).encode("utf-8", "surrogatepass")).hexdigest()


def _waitable() -> torch.cuda.Event:
    """Return an event on which a thread can wait without spinning."""
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event
