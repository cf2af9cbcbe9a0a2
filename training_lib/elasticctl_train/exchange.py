"""Reading a checkpoint: every share from storage once in all, or from the memory of a node that still has it.

First each share gets one rank that supplies it: one that finds it in its node's tier, or else, evenly spread, one that
reads it from storage. Only when all shares are there and whole, on all ranks, are they handed on: ranks of the
supplier's node copy from its memory, the others are sent what they want of it, a parcel at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from elasticctl_train import buffers, nearby
from elasticctl_train.commits import Commit, ObjectRef
from elasticctl_train.dist import World
from elasticctl_train.documents import check, fetch, twice
from elasticctl_train.errors import DamagedError, MissingError, StorageError
from elasticctl_train.filling import Filling
from elasticctl_train.manifest import Manifest, parse
from elasticctl_train.nearby import Spot
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
class Held:
    """A share's bytes, found whole, and where other ranks of this node find them, if they can.

    `in_tier`: they are the tier's own, and will be overwritten one day.
    """

    data: torch.Tensor
    spot: Spot | None
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
    files = _in_tier(place, manifest)
    sizes_bytes = [document.file.size_bytes for document in manifest.documents]
    suppliers = choose(sizes_bytes, world.gather(list(files)))
    mine = [index for index, supplier in enumerate(suppliers) if supplier == world.rank]
    with ExitStack() as opened:
        held, in_tier, spots = _agree(world, _acquire(place, manifest, mine, files, opened))
        seen = {index: nearby.find(spot) for index, spot in spots.items() if index not in held}
        near = {index: data for index, data in seen.items() if data is not None}
        near_of = world.gather(list(near))
    filling = Filling(world, manifest, alike, world.rank if own_of is None else own_of)
    for index, supplier in enumerate(suppliers):
        data = held.pop(index).data if supplier == world.rank else near.pop(index, None)
        if data is not None:
            filling.take(index, data, may_keep=supplier == world.rank and index not in in_tier)
        far = [rank for rank in range(world.size) if rank != supplier and index not in near_of[rank]]
        filling.hand_on(index, supplier, far, data)
    world.highest(0)  # nobody writes to what another still reads from
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


def _in_tier(place: Place, manifest: Manifest) -> dict[int, Path]:
    """The shares this rank could supply from its node's tier, by number, and the files."""
    found = place.tier.offers() if place.tier is not None else {}
    return {i: found[document.file] for i, document in enumerate(manifest.documents) if document.file in found}


def _acquire(
    place: Place, manifest: Manifest, mine: Sequence[int], files: Mapping[int, Path], opened: ExitStack
) -> Iterator[tuple[int, Held | StorageError]]:
    """The shares this rank supplies, each checked, or why there is none; their files stay open in `opened`."""
    for index in mine:
        ref = manifest.documents[index].file
        try:
            found = _from_tier(files[index], ref, opened) if index in files else None
            yield index, found or _from_storage(place, ref, opened)
        except StorageError as e:
            yield index, e


def _from_tier(path: Path, ref: ObjectRef, opened: ExitStack) -> Held | None:
    """The bytes in the tier if they are what they are said to be."""
    try:
        file = opened.enter_context(path.open("rb", buffering=0))
        data = nearby.mapped(file)[: ref.size_bytes]
        check(ref, data.numpy().data)
    except (OSError, ValueError, DamagedError):  # deleted or truncated meanwhile, or torn
        return None
    return Held(data, nearby.spot_of(file), in_tier=True)


def _from_storage(place: Place, ref: ObjectRef, opened: ExitStack) -> Held:
    """The bytes as stored, in memory that other ranks of this node can map."""
    shared = nearby.reserve(ref.size_bytes) if place.world.size > 1 else None
    data, file = shared or (buffers.anonymous(ref.size_bytes), None)
    spot = nearby.spot_of(opened.enter_context(file)) if file is not None else None
    view = data.numpy().data

    def fill() -> Held:
        place.storage.read_into(ref.key, 0, view)
        check(ref, view)
        return Held(data, spot, in_tier=False)

    return twice(fill)


def _agree(
    world: World, acquired: Iterable[tuple[int, Held | StorageError]]
) -> tuple[dict[int, Held], set[int], dict[int, Spot]]:
    """This rank's shares, which of all ranks' lie in tiers, and the spots; raises, on every rank, what any has met."""
    held: dict[int, Held] = {}
    error: StorageError | None = None
    for index, found in acquired:
        if isinstance(found, StorageError):
            error = found if error is None or isinstance(error, _DAMAGE) else error
        else:
            held[index] = found
    tier = [index for index, share in held.items() if share.in_tier]
    spots = [(index, astuple(share.spot)) for index, share in held.items() if share.spot is not None]
    said = world.gather([tier, spots, "" if error is None else str(error), isinstance(error, _DAMAGE)])
    for *_, message, is_damage in sorted(said, key=lambda one: bool(one[-1])):  # first what cannot be read at all
        if message:
            raise (DamagedError if is_damage else StorageError)(message) from error
    in_tier = {index for indices, *_ in said for index in indices}
    return held, in_tier, {index: Spot(*spot) for _, found, *_ in said for index, spot in found}
