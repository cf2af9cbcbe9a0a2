"""The tensors a rank restores, filled from shares it holds and from parcels that other ranks send.

What a rank wants of a tensor is all of it, or, where the live state has a sharded tensor in its place, its own box of
that. Both sides of every exchange work out what is in it from what all ranks know, so a parcel is nothing but bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from elasticctl_train import boxes, shards, tensors, tree
from elasticctl_train.boxes import Box
from elasticctl_train.dist import World
from elasticctl_train.manifest import Manifest
from elasticctl_train.shares import OWN, Piece

PARCEL_BYTES = 16 << 20
"""About how much is sent at a time."""

Parcel = list[tuple[Piece, Box]]
"""Boxes to be sent together, each with the piece it is part of."""


class Filling:
    """One rank's part of a restore."""

    def __init__(self, world: World, manifest: Manifest, alike: Mapping[str, torch.Tensor], own_of: int) -> None:
        """`alike` has the sharded tensors of the live state, by name; `own_of` the rank whose own is wanted."""
        self._world, self._manifest, self._alike, self._own_of = world, manifest, alike, own_of
        self._spread: dict[str, dict[int, Box]] = {}
        self._filled: dict[str, torch.Tensor] = {}

    def take(self, index: int, data: torch.Tensor, *, may_keep: bool) -> None:
        """Take what this rank wants from share number `index`, whose bytes are `data`.

        With `may_keep`, a tensor that lies there in one piece stays there: nothing is copied.
        """
        for piece in self._manifest.documents[index].pieces:
            wanted = self._wanted(index, piece, self._world.rank)
            if wanted is None:
                continue
            source = tensors.view(data, piece.start, piece.dtype, piece.box.shape)
            if may_keep and not _is_own(piece) and wanted == piece.box == self._target(piece, self._world.rank):
                self._filled[piece.name] = source
            else:
                self._put(piece, wanted, _slice(source, wanted.within(piece.box)))

    def hand_on(self, index: int, supplier: int, receivers: Sequence[int], data: torch.Tensor | None) -> None:
        """Send share number `index` from rank `supplier`, which holds it as `data`. All ranks must call."""
        if not receivers:
            return
        me = self._world.rank
        for parcel in self._parcels(index, None):
            content = _packed(parcel, data) if data is not None and me == supplier else _room_for(parcel)
            self._world.share(content, supplier)
            if me in receivers:
                self._unpack(parcel, content)
        for receiver in receivers if me == supplier else [me] if me in receivers else []:
            for parcel in self._parcels(index, receiver):
                if data is not None and me == supplier:
                    self._world.send(_packed(parcel, data), receiver)
                else:
                    content = _room_for(parcel)
                    self._world.receive(content, supplier)
                    self._unpack(parcel, content)

    def state(self) -> dict[str, Any]:
        """The state, once every share has been taken or received."""
        state: dict[str, Any] = tree.decode(self._manifest.state, self._tensor)
        return state

    def own(self) -> Any:
        """What was this rank's own; None if there was no such rank."""
        documents, rank = self._manifest.documents, self._own_of
        return tree.decode(documents[rank].local, self._tensor) if rank < len(documents) else None

    def _tensor(self, name: str, dtype: str, shape: list[int]) -> torch.Tensor:
        if name not in self._filled:  # one without elements, on this rank or altogether
            box = shards.box_of(self._alike[name]) if name in self._alike else boxes.whole(shape)
            self._filled[name] = torch.empty(box.shape, dtype=tensors.dtype_of(dtype))
        if name in self._alike and not shards.is_sharded(self._filled[name]):
            self._filled[name] = shards.like(self._alike[name], self._filled[name])
        return self._filled[name]

    def _target(self, piece: Piece, rank: int) -> Box | None:
        """What a rank wants of the tensor a piece is of; None: nothing."""
        if piece.name not in self._alike:
            return boxes.whole(self._manifest.kinds[piece.name][1]) if piece.name in self._manifest.kinds else piece.box
        if piece.name not in self._spread:
            self._spread[piece.name] = shards.boxes_by_rank(self._alike[piece.name])
        return self._spread[piece.name].get(rank)

    def _wanted(self, index: int, piece: Piece, rank: int) -> Box | None:
        """What a rank wants of a piece of share number `index`; None: nothing."""
        if _is_own(piece) and index != (self._own_of if rank == self._world.rank else rank):
            return None
        target = self._target(piece, rank)
        return None if target is None else boxes.overlap(piece.box, target)

    def _put(self, piece: Piece, box: Box, source: torch.Tensor) -> None:
        target = self._target(piece, self._world.rank)
        if target is None:
            return
        if piece.name not in self._filled:
            self._filled[piece.name] = torch.empty(target.shape, dtype=piece.dtype)
        _slice(self._filled[piece.name], box.within(target)).copy_(source)

    def _parcels(self, index: int, receiver: int | None) -> Iterator[Parcel]:
        """What of a share is sent to one receiver, or, with None, to all ranks, because all want all of it."""
        parcel: Parcel = []
        room = PARCEL_BYTES
        for piece in self._manifest.documents[index].pieces:
            for_all = piece.name not in self._alike and not _is_own(piece)
            if for_all != (receiver is None):
                continue
            box = self._wanted(index, piece, self._world.rank if receiver is None else receiver)
            for part in _cut_up(box, piece.dtype.itemsize) if box is not None else ():
                parcel.append((piece, part))
                room -= part.elements * piece.dtype.itemsize
                if room <= 0:
                    yield parcel
                    parcel, room = [], PARCEL_BYTES
        if parcel:
            yield parcel

    def _unpack(self, parcel: Parcel, content: torch.Tensor) -> None:
        start = 0
        for piece, box in parcel:
            size_bytes = box.elements * piece.dtype.itemsize
            source = content[start : start + size_bytes]
            self._put(piece, box, _aligned(source, piece.dtype).view(piece.dtype).view(box.shape))
            start += size_bytes


def _is_own(piece: Piece) -> bool:
    return piece.name.startswith(f"{OWN}/")


def _slice(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box, counted in this very tensor."""
    for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _cut_up(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in parts of about a parcel at most."""
    while True:
        parts = boxes.cut_at(box, box.elements * itemsize, PARCEL_BYTES)
        if parts is None:
            yield box
            return
        yield parts[0]
        box = parts[1]


def _packed(parcel: Parcel, data: torch.Tensor) -> torch.Tensor:
    """The bytes of a parcel, out of the share they are in."""
    content, start = _room_for(parcel), 0
    for piece, box in parcel:
        source = _slice(tensors.view(data, piece.start, piece.dtype, piece.box.shape), box.within(piece.box))
        size_bytes = box.elements * piece.dtype.itemsize
        content[start : start + size_bytes].copy_(source.contiguous().view(-1).view(torch.uint8))
        start += size_bytes
    return content


def _room_for(parcel: Parcel) -> torch.Tensor:
    return torch.empty(sum(box.elements * piece.dtype.itemsize for piece, box in parcel), dtype=torch.uint8)


def _aligned(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """These bytes where elements of this dtype may lie."""
    return data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
