"""One rank's share of a checkpoint: what it writes, and how rank 0 gathers the shares. `reader` describes the format.

A share exists if and only if its document does, which is written last. Ranks do not communicate while saving: rank 0
polls the storage for the documents. So no collective runs next to training, and a rank that dies during a save leaves
the others nothing to hang on.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from elasticctl_store.checkpoints import entries, repair
from elasticctl_store.checkpoints.entries import ObjectRef
from elasticctl_store.checkpoints.pieces import Piece
from elasticctl_store.checkpoints.reader import MOST_READS, is_sealed, load_document, seal
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import MissingError, SaveError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_train.checkpoint import plans, tree
from elasticctl_train.checkpoint.incremental.unchanged import Unchanged
from elasticctl_train.checkpoint.memory.copying import LateCopy
from elasticctl_train.checkpoint.plans import FilledPlan

_MAX_NAMED = 10
"""The number of parameters that are not finite which each rank names: more would not say more."""
_POLL_S, _POLL_MAX_S = 0.005, 0.5
_FENCE_FROM_S = 0.2
"""Once polls are this far apart, the missing shares may never come: check the fence as well."""


@dataclass(frozen=True, slots=True)
class Share(FilledPlan):
    """What one rank writes. Its tensors have been copied, so training may change them meanwhile.

    `label` is what the checkpoint says about itself (see `repair.label`).
    """

    state: Mapping[str, Any]
    local: Any
    copied: Collection[torch.cuda.Event | LateCopy] = ()
    label: Mapping[str, Any] = field(default_factory=dict)

    def write(
        self, storage: Storage, key: str, parameters: Collection[str] = (), unchanged: Unchanged | None = None
    ) -> tuple[ObjectRef, ...]:
        """Store the tensor files, then the document at `key`; return what the planned files are. Raises StorageError.

        The document names those of `parameters` that are not finite. With `unchanged`, most of the base files may
        already be stored; without it, everything is written to one file.
        """
        for copy in self.copied:
            copy.synchronize()
        own, *apart = self.plan.files
        stored = unchanged.store(self, storage, key) if unchanged is not None else []
        said: dict[str, Any] = {"label": dict(self.label)}
        if unchanged is not None and stored:
            said |= unchanged.said
            said["bases"] = [
                {"file": asdict(one.file), "pieces": plans.rows_of(planned.pieces), **one.patches}
                for one, planned in zip(stored, apart, strict=True)
            ]
        pieces, parts = (own.pieces, [self.bytes_of(own)]) if stored or not apart else self._as_one_file()
        tensors_key = entries.tensors_key(key)
        crc = storage.put(tensors_key, parts)
        file = ObjectRef(tensors_key, sum(map(len, parts)), entries.as_checksum(crc))
        said |= {"tensors": asdict(file), "pieces": plans.rows_of(pieces)}
        state = self.state if self.plan.document["rank"] == 0 else None
        if lost := self._not_finite(parameters):
            said["not_finite"] = lost
        for copy in self.copied:
            if isinstance(copy, LateCopy):
                copy.check()
        storage.put(key, [seal({**self.plan.document, **said, "state": state, "local": self.local})])
        return (file, *(one.content for one in stored))

    def _as_one_file(self) -> tuple[tuple[Piece, ...], list[bytes | memoryview]]:
        """Return the pieces of all files in the order that they have in a single file, and the parts of that file."""
        found = list(self.plan.placed)
        layout, placed = plans.lay_out([(p.name, TensorType(p.dtype, p.box.shape), p.box) for p, _ in found])
        data = memoryview(self.buffer.data.numpy().data)
        starts = [(found[index][1], piece.size_bytes) for piece, index in placed]
        parts: list[bytes | memoryview] = [layout.header]
        parts += [data[start : start + size_bytes] for start, size_bytes in starts]
        return tuple(piece for piece, _ in placed), parts

    def _not_finite(self, names: Collection[str]) -> list[str]:
        """Return the first of these tensors that contain a NaN or an infinity in this rank's part."""
        views = (
            (piece.name, tree.view(self.buffer.data, start, piece.dtype, piece.box.shape))
            for piece, start in self.plan.placed
            if piece.name in names
        )
        return list(itertools.islice((name for name, view in views if not _is_finite(view)), _MAX_NAMED))


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a save has stored: the documents in order of rank, the total size, and other fields of its commit."""

    refs: tuple[ObjectRef, ...]
    size_bytes: int
    not_finite: tuple[str, ...]
    bases: tuple[str, ...]


def check_stored(storage: Storage, key: str) -> None:
    """Raise MissingError or DamagedError if the storage has lost the share document that it has just acknowledged: rank
    0 would wait for it for ever."""
    try:
        storage.read_into(key, 0, memoryview(bytearray(1)))
    except MissingError as e:
        raise MissingError(f"{storage.url}: the storage has lost {key}, which it had acknowledged") from e


def gather(
    storage: Storage,
    folder: str,
    world_size: int,
    abandon: threading.Event,
    check_fence: Callable[[], None] = lambda: None,
) -> Gathered:
    """Wait on rank 0, which has written its own share, until every rank's share is stored.

    Another rank may have to wait for its storage, however long that takes. But if a newer run has swept the shares,
    they do not come back, so `check_fence` is called again and again meanwhile. Raises what that raises, and SaveError
    if `abandon` is set, if a share is deleted, if a base file is missing, or if the ranks' states differ in structure.
    """
    found: dict[int, tuple[ObjectRef, Any]] = {}
    misread: dict[int, int] = {}
    pause_s = _POLL_S
    while True:
        listed = set(all_keys(storage, folder))
        gone = any(ref.key not in listed for ref, _ in found.values())
        if gone or pause_s >= _FENCE_FROM_S:
            check_fence()
        _refuse_without(storage, [ref.key for ref, _ in found.values()], there=listed)
        for rank in sorted(set(range(world_size)) - found.keys()):
            key = entries.share_key(folder, rank, world_size)
            if key not in listed:
                continue
            data = _read_unless_swept(storage, key, check_fence)
            if is_sealed(data):
                found[rank] = ObjectRef(key, len(data), entries.checksum([data])), load_document(key, data)
                continue
            misread[rank] = misread.get(rank, 0) + 1
            if misread[rank] == MOST_READS:
                raise SaveError(f"{storage.url}: the storage does not return {key} as it was written")
        if len(found) == world_size:
            break
        missing = sorted(set(range(world_size)) - found.keys())
        if abandon.wait(pause_s):
            check_fence()
            raise SaveError(f"{storage.url}: save given up: the share of rank {missing[0]} is missing")
        pause_s = min(pause_s * 1.5, _POLL_MAX_S)
    shares = [found[rank] for rank in range(world_size)]
    if len({document["fingerprint"] for _, document in shares}) > 1:
        raise SaveError(
            f"{storage.url}: not saved: the ranks' states differ in names, shapes or shards of tensors; a sharded "
            "tensor needs the same mesh on all ranks"
        )
    documents = [document for _, document in shares]
    bases = entries.bases_of(documents)
    there = {key for base in bases for key in all_keys(storage, base)}
    needed = (file["key"] for document in documents for file in entries.base_files_of(document))
    _refuse_without(storage, needed, there=there)
    return Gathered(
        refs=tuple(ref for ref, _ in shares),
        size_bytes=sum(ref.size_bytes + repair.tensor_bytes(document) for ref, document in shares),
        not_finite=entries.not_finite_of(documents),
        bases=bases,
    )


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor if tensor.itemsize > 1 else tensor.float())  # a NaN becomes both values
    return math.isfinite(low) and math.isfinite(high)


def _refuse_without(storage: Storage, keys: Iterable[str], *, there: Collection[str]) -> None:
    gone = next((key for key in keys if key not in there), None)
    if gone is not None:
        raise SaveError(f"{storage.url}: {gone} was deleted while waiting for the shares of other ranks")


def _read_unless_swept(storage: Storage, key: str, check_fence: Callable[[], None]) -> bytes:
    """Return a listed share document. Raises MissingError, or what `check_fence` does, if it has been deleted since."""
    try:
        return storage.get(key)
    except MissingError:
        check_fence()
        raise
