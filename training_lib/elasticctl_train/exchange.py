"""Reading a checkpoint: every share from storage once in all, or from the memory of a node that still has it.

First each share gets one rank that supplies it: one that finds it in its node's tier, or else, evenly spread, one that
reads it from storage. Only when all shares are there and whole, on all ranks, are they handed on: ranks of the
supplier's node copy from the shared memory, the others are sent what they want of it, a parcel at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elasticctl_train import buffers
from elasticctl_train.commits import Commit, ObjectRef
from elasticctl_train.dist import World
from elasticctl_train.documents import check, fetch, twice
from elasticctl_train.errors import DamagedError, MissingError, StorageError
from elasticctl_train.filling import Filling
from elasticctl_train.manifest import Manifest, parse
from elasticctl_train.storage import Storage
from elasticctl_train.tier import Tier

_DAMAGE = (DamagedError, MissingError)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank reads from."""

    storage: Storage
    world: World
    tier: Tier | None


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank could supply from its node's tier: share numbers and the files. `node` is "" without a tier."""

    node: str
    files: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Held:
    """A share's bytes, found whole. `in_tier`: they are the tier's own, and will be overwritten one day."""

    data: torch.Tensor
    in_tier: bool


def read_alone(storage: Storage, commit: Commit, rank: int = 0) -> tuple[dict[str, Any], Any]:
    """Read a checkpoint in one process: the whole state, and what was `rank`'s own (None if there was no such rank).

    Raises DamagedError or MissingError unless all is there, to the byte, and StorageError.
    """
    manifest = parse(fetch(storage, commit))
    return read(Place(storage, World(), None), manifest, {}, own_of=rank)


def read(
    place: Place, manifest: Manifest, alike: Mapping[str, torch.Tensor], own_of: int | None = None
) -> tuple[dict[str, Any], Any]:
    """Read a checkpoint on all ranks: the state, and what was this rank's own (None if there was no such rank).

    `alike` has the sharded tensors of the live state by name; `own_of` is another rank whose own is wanted. Raises
    DamagedError, on every rank, when any byte is not what was committed, and StorageError, on every rank, when storage
    cannot be read.
    """
    world = place.world
    offers = _gather_offers(place, manifest)
    sizes_bytes = [document.file.size_bytes for document in manifest.documents]
    suppliers = choose(sizes_bytes, [offer.files.keys() for offer in offers])
    mine = [index for index, supplier in enumerate(suppliers) if supplier == world.rank]
    held, in_tier = _agree(world, _acquire(place, manifest, mine, offers[world.rank].files))
    filling = Filling(world, manifest, alike, world.rank if own_of is None else own_of)
    for index, supplier in enumerate(suppliers):
        node = offers[supplier].node if index in in_tier else ""
        near = {
            supplier,
            *(rank for rank, offer in enumerate(offers) if node == offer.node != "" and index in offer.files),
        }
        data = held.pop(index) if supplier == world.rank else None
        if data is None and world.rank in near:
            data = _mapped(offers[world.rank].files[index])
        if data is not None:
            filling.take(index, data, may_keep=index not in in_tier)
        filling.hand_on(index, supplier, [rank for rank in range(world.size) if rank not in near], data)
    world.highest(0)  # nobody writes to the tier while another still reads from it
    return filling.state(), filling.own()


def choose(sizes_bytes: Sequence[int], offered: Sequence[Collection[int]]) -> list[int]:
    """Which rank supplies which share: one that has it in its tier, else any; spread evenly, one's own if possible."""
    load_bytes = [0] * len(offered)
    suppliers = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda index: (-sizes_bytes[index], index)):
        ranks = [rank for rank, known in enumerate(offered) if index in known] or range(len(offered))
        supplier = min(ranks, key=lambda rank: (load_bytes[rank], rank != index, rank))
        suppliers[index] = supplier
        load_bytes[supplier] += sizes_bytes[index]
    return suppliers


def _gather_offers(place: Place, manifest: Manifest) -> list[Offer]:
    """What every rank could supply from its tier."""
    node, files = "", {}
    if place.tier is not None:
        node, found = place.tier.node(), place.tier.offers()
        files = {i: str(found[d.file]) for i, d in enumerate(manifest.documents) if d.file in found}
    gathered = place.world.gather([node, list(files.items())])
    return [Offer(node, dict(items)) for node, items in gathered]


def _acquire(
    place: Place, manifest: Manifest, mine: Sequence[int], files: Mapping[int, str]
) -> Iterator[tuple[int, Held | StorageError]]:
    """The shares this rank supplies, each checked, or why there is none."""
    for index in mine:
        ref = manifest.documents[index].file
        try:
            found = _from_tier(files[index], ref) if index in files else None
            yield index, found or _from_storage(place.storage, ref)
        except StorageError as e:
            yield index, e


def _from_tier(path: str, ref: ObjectRef) -> Held | None:
    """The bytes in the tier if they are what they are said to be."""
    try:
        data = _mapped(path)[: ref.size_bytes]
        check(ref, data.numpy().data)
    except (OSError, ValueError, DamagedError):  # deleted or truncated meanwhile, or torn
        return None
    return Held(data, in_tier=True)


def _mapped(path: str) -> torch.Tensor:
    with Path(path).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # never written to, but torch wants it writable
    return torch.frombuffer(memory, dtype=torch.uint8)


def _from_storage(storage: Storage, ref: ObjectRef) -> Held:
    data = buffers.anonymous(ref.size_bytes)
    view = data.numpy().data

    def fill() -> Held:
        storage.read_into(ref.key, 0, view)
        check(ref, view)
        return Held(data, in_tier=False)

    return twice(fill)


def _agree(
    world: World, acquired: Iterable[tuple[int, Held | StorageError]]
) -> tuple[dict[int, torch.Tensor], set[int]]:
    """This rank's shares, and which of all ranks' lie in tiers; raises, on every rank, what any rank has met."""
    held: dict[int, torch.Tensor] = {}
    tier: list[int] = []
    error: StorageError | None = None
    for index, found in acquired:
        if isinstance(found, StorageError):
            error = found if error is None or isinstance(error, _DAMAGE) else error
        else:
            held[index] = found.data
            tier += [index] if found.in_tier else []
    said = world.gather([tier, "" if error is None else str(error), isinstance(error, _DAMAGE)])
    for _, message, is_damage in sorted(said, key=lambda one: bool(one[2])):  # first what cannot be read at all
        if message:
            raise (DamagedError if is_damage else StorageError)(message) from error
    return held, {index for indices, _, _ in said for index in indices}
