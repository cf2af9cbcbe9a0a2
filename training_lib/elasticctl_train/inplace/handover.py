"""Sends the newest state to the ranks of a new group that are behind, over the network.

Storage is read only if no rank has the state. The receivers form a chain after the source, and each passes on what it
receives. So the bandwidth of one link is enough for any number of them. Nothing is pickled: the state is sent as a
checkpoint's JSON and tensors.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from elasticctl_store.checkpoints.state_trees import decode
from elasticctl_train.checkpoint.tree import DTYPES, NAMES, Finisher, Flattener
from elasticctl_train.dist import World
from elasticctl_train.inplace.newest_state import Agreement, Standing, decide

_PACK_BYTES = 32 << 20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux, for which Python has no name."""


def agree(world: World, mine: Standing) -> Agreement:
    """Exchange the ranks' standings; return their agreement. All ranks must call this.

    Raises RuntimeError if a peer is lost.
    """
    found = world.gather([mine.step, mine.epoch, mine.has_state, mine.buckets_bytes, mine.restarts])
    return decide(tuple(Standing(*each) for each in found))


def spread(world: World, agreement: Agreement, data: bytes) -> bytes:
    """Return the source's `data`, its description of buckets, on every rank. All ranks must call this.

    Raises RuntimeError if a peer is lost.
    """
    if agreement.source is None or world.size == 1:
        return data
    known = torch.empty(agreement.newest.buckets_bytes, dtype=torch.uint8)
    if world.rank == agreement.source:
        known.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    world.share(known, agreement.source)
    return known.numpy().tobytes()


def send_state(world: World, agreement: Agreement, state: Mapping[str, Any]) -> None:
    """Send the state to the first receiver; call this on the source. Raises RuntimeError if a peer is lost."""
    if not agreement.receivers:
        return
    flattener = Flattener()
    document = flattener.encode(dict(state), "state")
    shapes = [[name, NAMES[each.dtype], list(each.shape)] for name, each in flattener.tensors.items()]
    _send(world, json.dumps([document, shapes]).encode(), agreement.receivers[0])
    for pack in _packs(shapes):
        parts = [_bytes_of(flattener.tensors[name]) for name, _, _ in pack]
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(data):
            world.send(data, agreement.receivers[0])


def receive_state(world: World, agreement: Agreement) -> dict[str, Any]:
    """Receive the state, and pass it on; call this on each receiver. Raises RuntimeError if a peer is lost.

    The tensors of the result are on the CPU.
    """
    place = agreement.receivers.index(world.rank)
    before = agreement.receivers[place - 1] if place else agreement.source
    after = agreement.receivers[place + 1] if place + 1 < len(agreement.receivers) else None
    if before is None:
        raise ValueError("no rank has a state")
    header = _receive(world, before)
    if after is not None:
        _send(world, header, after)
    document, shapes = json.loads(header)
    tensors: dict[str, torch.Tensor] = {}
    packs = list(_packs(shapes))
    received = [torch.empty(sum(map(_size_bytes, pack)), dtype=torch.uint8) for pack in packs]
    threading.Thread(target=_populate, args=(received,), name="elasticctl-memory", daemon=True).start()
    for pack, data in zip(packs, received, strict=True):
        if len(data):
            world.receive(data, before)
        if len(data) and after is not None:
            world.send(data, after)
        start = 0
        for entry in pack:
            name, dtype, shape = entry
            part = data[start : start + _size_bytes(entry)]
            start += len(part)
            kind = DTYPES[dtype]
            own = part if len(pack) == 1 else part.clone()  # each tensor has its own storage
            tensors[name] = own.view(kind).view(tuple(shape))
    finish = Finisher()
    state: dict[str, Any] = decode(document, lambda name, kind: finish(name, kind, tensors[name]))
    return state


def _packs(shapes: Sequence[Any]) -> Iterator[list[Any]]:
    """Groups of small tensors, and single large tensors. Empty tensors are part of a group, but are not sent."""
    pack: list[Any] = []
    size = 0
    for entry in shapes:
        own = _size_bytes(entry)
        if pack and size + own > _PACK_BYTES:
            yield pack
            pack, size = [], 0
        pack.append(entry)
        size += own
    if pack:
        yield pack


def _populate(buffers: Sequence[torch.Tensor]) -> None:
    """Have the kernel provide the memory of the buffers, in order, while they are filled; their content stays.

    Otherwise it does so page by page as data arrives, which takes as long as a transfer within one machine. Linux
    before 5.14 refuses.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for buffer in buffers:
        start = buffer.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(start, buffer.data_ptr() + len(buffer) - start, _POPULATE_WRITE)


def _size_bytes(entry: Any) -> int:
    _, dtype, shape = entry
    count = 1
    for length in shape:
        count *= length
    return int(count * DTYPES[dtype].itemsize)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _send(world: World, data: bytes, to: int) -> None:
    world.send(torch.tensor([len(data)]).view(torch.uint8), to)
    world.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)


def _receive(world: World, source: int) -> bytes:
    length = torch.empty(8, dtype=torch.uint8)
    world.receive(length, source)
    data = torch.empty(int(length.view(torch.int64)), dtype=torch.uint8)
    world.receive(data, source)
    return data.numpy().tobytes()
