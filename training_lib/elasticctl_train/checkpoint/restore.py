"""Read a checkpoint on all ranks: each share once, from storage or from memory, and from there to the ranks that need
it.

A rank needs the whole of a tensor or, if the live state has a sharded tensor in its place, its own box of it. Both
sides of every exchange derive its contents from what all ranks know, so a parcel consists of nothing but bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from elasticctl_store.checkpoints import tensor_boxes
from elasticctl_store.checkpoints.entries import ObjectRef
from elasticctl_store.checkpoints.pieces import Piece, ShareContents
from elasticctl_store.checkpoints.reader import Contents, check_bytes, check_header, retry_damaged
from elasticctl_store.checkpoints.state_trees import decode
from elasticctl_store.checkpoints.tensor_boxes import Box
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError, MissingError, NoMemoryError, StorageError
from elasticctl_store.storage import Storage
from elasticctl_train.checkpoint import dtensor, tree
from elasticctl_train.checkpoint.incremental import rows
from elasticctl_train.checkpoint.memory import buffers, local_tier
from elasticctl_train.checkpoint.memory.buffers import ReadBuffer
from elasticctl_train.checkpoint.memory.local_tier import FileAddress, LocalObject
from elasticctl_train.dist import World

T = TypeVar("T")

PARCEL_BYTES = 16 << 20
"""About how much is sent at a time."""

Parcel = list[tuple[Piece, Box]]
"""Boxes to be sent together, each with the piece that it is part of."""


class Filling:
    """One rank's part of a restore."""

    def __init__(self, world: World, contents: Contents, alike: Mapping[str, torch.Tensor], own_of: int) -> None:
        """`alike` has the sharded tensors of the live state, by name; `own_of` is the rank whose own state is
        wanted."""
        self._world, self._contents, self._alike, self._own_of = world, contents, alike, own_of
        self._spread: dict[str, dict[int, Box]] = {}
        self._filled: dict[str, torch.Tensor] = {}
        self._finish = tree.Finisher()

    def unpack(self, index: int, data: torch.Tensor, buffer: ReadBuffer | None = None) -> None:
        """Take what this rank needs from share number `index`, whose bytes are `data`.

        If they are in `buffer`, large tensors that are contiguous there stay there, without being copied.
        """
        for piece in self._contents.shares[index].pieces:
            wanted = self._wanted(index, piece, self._world.rank)
            if wanted is None:
                continue
            kept = None
            if buffer is not None and wanted == piece.box == self._target(piece, self._world.rank):
                kept = buffer.keep_tensor(piece.start, tree.DTYPES[piece.dtype], piece.box.shape)
            if kept is not None:
                self._filled[piece.name] = kept
            else:
                source = tree.view(data, piece.start, piece.dtype, piece.box.shape)
                self._copy_piece(piece, wanted, _slice(source, wanted.within(piece.box)))

    def hand_on(self, index: int, supplier: int, receivers: Sequence[int], data: torch.Tensor | None) -> None:
        """Send share number `index` from rank `supplier`, which holds it as `data`, to the receivers. All ranks must
        call."""
        if not receivers:
            return
        me = self._world.rank
        for parcel in self._parcels(index, None):
            content = _pack(parcel, data) if data is not None and me == supplier else _room_for(parcel)
            self._world.share(content, supplier)
            if me in receivers:
                self._unpack(parcel, content)
        for receiver in receivers if me == supplier else [me] if me in receivers else []:
            for parcel in self._parcels(index, receiver):
                if data is not None and me == supplier:
                    self._world.send(_pack(parcel, data), receiver)
                else:
                    content = _room_for(parcel)
                    self._world.receive(content, supplier)
                    self._unpack(parcel, content)

    def state(self) -> dict[str, Any]:
        """Return the state, once every share has been taken or received."""
        state: dict[str, Any] = decode(self._contents.state, self._tensor)
        return state

    def own(self) -> Any:
        """Return what was this rank's own; None if there was no such rank."""
        contents, rank = self._contents, self._own_of
        return decode(contents.shares[rank].local, self._tensor) if rank < contents.world_size else None

    def _tensor(self, name: str, kind: TensorType) -> torch.Tensor:
        if name not in self._filled:  # it has no elements, on this rank or at all
            box = dtensor.box_of(self._alike[name]) if name in self._alike else tensor_boxes.whole(kind.shape)
            self._filled[name] = torch.empty(box.shape, dtype=tree.DTYPES[kind.dtype])
        if name in self._alike and not dtensor.is_sharded(self._filled[name]):
            self._filled[name] = dtensor.spread_like(self._alike[name], self._filled[name])
        return self._finish(name, kind, self._filled[name])

    def _target(self, piece: Piece, rank: int) -> Box | None:
        """Return what a rank needs of the tensor that a piece belongs to; None if nothing."""
        if piece.name not in self._alike:
            return piece.box if piece.is_own else tensor_boxes.whole(self._contents.tensors[piece.name].shape)
        if piece.name not in self._spread:
            self._spread[piece.name] = dtensor.boxes_by_rank(self._alike[piece.name])
        return self._spread[piece.name].get(rank)

    def _wanted(self, index: int, piece: Piece, rank: int) -> Box | None:
        """Return what a rank needs of a piece of share number `index`; None if nothing."""
        if piece.is_own and index != (self._own_of if rank == self._world.rank else rank):
            return None
        target = self._target(piece, rank)
        return None if target is None else tensor_boxes.overlap(piece.box, target)

    def _copy_piece(self, piece: Piece, box: Box, source: torch.Tensor) -> None:
        target = self._target(piece, self._world.rank)
        if target is None:
            return
        if piece.name not in self._filled:
            self._filled[piece.name] = torch.empty(target.shape, dtype=tree.DTYPES[piece.dtype])
        _slice(self._filled[piece.name], box.within(target)).copy_(source)

    def _parcels(self, index: int, receiver: int | None) -> Iterator[Parcel]:
        """Yield what of a share is sent to one receiver; with None, what is sent to all ranks, because all of them need
        all of it."""
        parcel: Parcel = []
        room = PARCEL_BYTES
        for piece in self._contents.shares[index].pieces:
            for_all = piece.name not in self._alike and not piece.is_own
            if for_all != (receiver is None):
                continue
            box = self._wanted(index, piece, self._world.rank if receiver is None else receiver)
            for part in _cut_up(box, piece.item_bytes) if box is not None else ():
                parcel.append((piece, part))
                room -= part.elements * piece.item_bytes
                if room <= 0:
                    yield parcel
                    parcel, room = [], PARCEL_BYTES
        if parcel:
            yield parcel

    def _unpack(self, parcel: Parcel, content: torch.Tensor) -> None:
        start = 0
        for piece, box in parcel:
            size_bytes, dtype = box.elements * piece.item_bytes, tree.DTYPES[piece.dtype]
            source = content[start : start + size_bytes]
            self._copy_piece(piece, box, _aligned(source, dtype).view(dtype).view(box.shape))
            start += size_bytes


def _slice(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of a box, relative to this very tensor."""
    for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _cut_up(box: Box, itemsize: int) -> Iterator[Box]:
    """Yield a box in parts of at most about one parcel."""
    while True:
        parts = tensor_boxes.cut_at(box, box.elements * itemsize, PARCEL_BYTES)
        if parts is None:
            yield box
            return
        yield parts[0]
        box = parts[1]


def _pack(parcel: Parcel, data: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a parcel from the share that contains them."""
    content, start = _room_for(parcel), 0
    for piece, box in parcel:
        source = _slice(tree.view(data, piece.start, piece.dtype, piece.box.shape), box.within(piece.box))
        size_bytes = box.elements * piece.item_bytes
        content[start : start + size_bytes].copy_(source.contiguous().view(-1).view(torch.uint8))
        start += size_bytes
    return content


def _room_for(parcel: Parcel) -> torch.Tensor:
    return torch.empty(sum(box.elements * piece.item_bytes for piece, box in parcel), dtype=torch.uint8)


def _aligned(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return these bytes at an address that is aligned for this dtype."""
    return data if data.storage_offset() % dtype.itemsize == 0 else data.clone()


_DAMAGE = (DamagedError, MissingError)


class Offering(Protocol):
    """Objects in this node's memory: `Tier` has those that are also stored, `Copies` those that are not."""

    def offers(self) -> dict[ObjectRef, LocalObject]:
        """Return where they are, by what they should be."""


@dataclass(frozen=True, slots=True)
class RestoreSource:
    """Where this rank reads from."""

    storage: Storage
    world: World
    tier: Offering | None


@dataclass(frozen=True, slots=True)
class HeldShare:
    """A share's bytes, found intact, and where other ranks of this node can find them, if they can.

    `buffer`: private memory of this process that contains them, which the tensors can keep.
    """

    data: torch.Tensor
    spot: FileAddress | None = None
    buffer: ReadBuffer | None = None


def read(
    place: RestoreSource, contents: Contents, alike: Mapping[str, torch.Tensor], own_of: int | None = None
) -> tuple[dict[str, Any], Any]:
    """Read a checkpoint on all ranks; return the state, and what was this rank's own (None if there was no such rank).

    `alike` has the sharded tensors of the live state by name; `own_of` is another rank whose own state is wanted.
    Raises DamagedError, on every rank, if any byte is not what was committed, and StorageError, on every rank, if the
    storage cannot be read.
    """
    world = place.world
    # Each share has one supplier, which has it in memory or reads it from storage.
    files = _in_tier(place, contents)
    sizes_bytes = [share.file.size_bytes for share in contents.shares]
    suppliers = choose(sizes_bytes, world.gather(list(files)))
    mine = [index for index, supplier in enumerate(suppliers) if supplier == world.rank]
    # The other ranks of a supplier's node map its memory, while its files are open.
    with ExitStack() as opened:
        held, spots = _agree(world, _acquire(place, contents, mine, files, opened))
        seen = {index: local_tier.map_address(spot) for index, spot in spots.items() if index not in held}
        near = {index: data for index, data in seen.items() if data is not None}
        near_of = world.gather(list(near))
    # Ranks of other nodes get what they need of a share over the network, one share after the other, so that the memory
    # of each can be freed.
    filling = Filling(world, contents, alike, world.rank if own_of is None else own_of)
    for index, supplier in enumerate(suppliers):
        own = held.pop(index, None)
        data = own.data if own is not None else near.pop(index, None)
        if data is not None:
            filling.unpack(index, data, own.buffer if own is not None else None)
        far = [rank for rank in range(world.size) if rank != supplier and index not in near_of[rank]]
        filling.hand_on(index, supplier, far, data)
        if own is not None and own.buffer is not None:
            own.buffer.close()
    world.highest(0)  # a barrier: no rank writes to memory that another still reads
    return filling.state(), filling.own()


def choose(sizes_bytes: Sequence[int], offered: Sequence[Collection[int]]) -> list[int]:
    """Return which rank supplies which share: one that has it in its tier, else any; balanced, preferably a rank's
    own."""
    load_bytes = [0] * len(offered)
    suppliers = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda index: (-sizes_bytes[index], index)):
        ranks = [rank for rank, known in enumerate(offered) if index in known] or range(len(offered))
        supplier = min(ranks, key=lambda rank: (load_bytes[rank], rank != index, rank))
        suppliers[index] = supplier
        load_bytes[supplier] += sizes_bytes[index]
    return suppliers


def _in_tier(place: RestoreSource, contents: Contents) -> dict[int, LocalObject]:
    """Return the shares that this rank can supply from its node's tier, by number, and where they are."""
    found = place.tier.offers() if place.tier is not None else {}
    return {i: found[share.content] for i, share in enumerate(contents.shares) if share.content in found}


def _acquire(
    place: RestoreSource, contents: Contents, mine: Sequence[int], files: Mapping[int, LocalObject], opened: ExitStack
) -> Iterator[tuple[int, HeldShare | StorageError]]:
    """Yield the shares that this rank supplies, each verified, or the error; their files stay open in `opened`."""
    for index in mine:
        share = contents.shares[index]
        try:
            found = _from_tier(files[index], share, opened) if index in files else None
            yield index, found or _from_storage(place, share, opened)
        except StorageError as e:
            yield index, e


def _from_tier(offer: LocalObject, share: ShareContents, opened: ExitStack) -> HeldShare | None:
    """Return the bytes in the tier, if they match their label."""
    try:
        file = opened.enter_context(offer.path.open("rb", buffering=0))
        data = local_tier.map_file(file)[offer.start : offer.start + share.file.size_bytes]
        check(share, data)
    except (OSError, ValueError, DamagedError):  # deleted or truncated meanwhile, or damaged
        return None
    return HeldShare(data, local_tier.address_of(file, offer.start))


def _from_storage(place: RestoreSource, share: ShareContents, opened: ExitStack) -> HeldShare:
    """Read the bytes from storage. If there are other ranks, read into memory that those of this node can map."""
    shared = local_tier.reserve(share.file.size_bytes) if place.world.size > 1 else None
    if shared is not None:
        held = HeldShare(shared[0], local_tier.address_of(opened.enter_context(shared[1])))
    else:
        buffer = _allocate(place.storage, share.file, ReadBuffer)
        held = HeldShare(buffer.data, buffer=buffer)

    fetch(place.storage, share, held.data)
    return held


def _allocate(storage: Storage, file: ObjectRef, reserve: Callable[[int], T]) -> T:
    """Return memory for an object. Raises NoMemoryError; DamagedError or MissingError if it is not as large as that."""
    try:
        return reserve(file.size_bytes)
    except NoMemoryError:
        storage.read_into(file.key, file.size_bytes - 1, memoryview(bytearray(1)))  # raises if the object is shorter
        raise


def fetch(storage: Storage, share: ShareContents, data: torch.Tensor) -> None:
    """Read a tensor file into `data`, and apply its patches. Raises DamagedError or MissingError unless every byte is
    as it was committed, and StorageError."""
    stored = replace(share, content=share.file)

    def fill() -> None:
        storage.read_into(share.file.key, 0, data.numpy().data)
        check(stored, data)

    retry_damaged(fill, until_same=True)
    for patch in share.patches:
        newer = torch.frombuffer(_allocate(storage, patch.share.file, buffers.anonymous), dtype=torch.uint8)
        fetch(storage, patch.share, newer)
        for each in patch.rows:
            rows.apply(each, newer, data)
    if share.patches:
        check(share, data)


def check(share: ShareContents, data: torch.Tensor) -> None:
    """Raise DamagedError unless these are the bytes of the share's tensor file, once all patches are applied."""
    view = data.numpy().data
    check_bytes(share.content, view)
    check_header(share, bytes(view[: share.header_bytes]))


def _agree(
    world: World, acquired: Iterable[tuple[int, HeldShare | StorageError]]
) -> tuple[dict[int, HeldShare], dict[int, FileAddress]]:
    """Return this rank's shares, and the addresses of all ranks' shares; raise on every rank what any of them has
    met."""
    held: dict[int, HeldShare] = {}
    error: StorageError | None = None
    for index, found in acquired:
        if isinstance(found, StorageError):
            error = found if error is None or isinstance(error, _DAMAGE) else error
        else:
            held[index] = found
    spots = [(index, astuple(share.spot)) for index, share in held.items() if share.spot is not None]
    said = world.gather([spots, "" if error is None else str(error), isinstance(error, _DAMAGE)])
    for *_, message, is_damage in sorted(
        said, key=lambda one: bool(one[-1])
    ):  # errors of the storage come before damage
        if message:
            raise (DamagedError if is_damage else StorageError)(message) from error
    return held, {index: FileAddress(*spot) for found, *_ in said for index, spot in found}
