"""One rank's share of a checkpoint: what it writes, how rank 0 gathers the shares, how they are read back.

A share is a tensor file and a share document (JSON) with the file's digest, the rank's own state and, from rank 0, the
state tree. The document is written last, so a share is there exactly when its document is. Ranks tell each other
nothing while saving: rank 0 watches the storage for the documents. So no collective runs beside training, and a rank
that dies in mid-save leaves the others nothing to hang on.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elasticctl_train import commits, tensors, tree
from elasticctl_train.commits import Commit, ObjectRef
from elasticctl_train.errors import DamagedError, SaveError
from elasticctl_train.storage import Storage, all_keys

_LOCAL = "$rank"  # prefix of the rank's own tensors: no part of the state can be called that
_POLL_S, _POLL_MAX_S = 0.005, 0.5


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes, its tensors already copied: training may go on and change them."""

    layout: tensors.Layout
    buffer: torch.Tensor
    document: Mapping[str, Any]

    def write(self, storage: Storage, key: str) -> None:
        """Store the tensor file, then the document at `key`. Raises StorageError."""
        parts: list[bytes | memoryview] = [self.layout.header, self.buffer.numpy().data]
        size_bytes = sum(len(part) for part in parts)
        file = ObjectRef(commits.tensors_key(key), size_bytes, commits.checksum(parts))
        storage.put(file.key, parts)
        storage.put(key, [json.dumps({**self.document, "tensors": asdict(file)}).encode()])


def make(
    state: Mapping[str, Any],
    local: Mapping[str, Any],
    rank: int,
    world_size: int,
    *,
    rank_0_only: Collection[str] = (),
    buffer: torch.Tensor | None = None,
) -> Share:
    """Copy this rank's share of `state`, which all ranks hold alike, and its own `local` state.

    Tensors of `state` are shared out over the ranks but for those named in `rank_0_only`, by path or first part of the
    path. `buffer` is the buffer of an earlier share, used again if it fits. Raises StateError; same on all ranks.
    """
    flat, own = tree.Flattener(), tree.Flattener()
    state_tree = {part: flat.encode(value, part) for part, value in state.items()}
    local_tree = own.encode(dict(local), _LOCAL)
    kept = {name: 0 for name in flat.tensors if name in rank_0_only or name.split("/")[0] in rank_0_only}
    sizes_bytes = {name: tensor.numel() * tensor.element_size() for name, tensor in flat.tensors.items()}
    owners = tree.share_out(sizes_bytes, kept, world_size)
    mine = {name: tensor for name, tensor in flat.tensors.items() if owners[name] == rank} | own.tensors
    layout = tensors.plan(mine)
    if buffer is None or len(buffer) != layout.data_bytes:
        buffer = torch.empty(layout.data_bytes, dtype=torch.uint8)
    tensors.fill(layout, mine, buffer)
    document = {
        "rank": rank,
        "world_size": world_size,
        "fingerprint": _fingerprint(flat.tensors),
        "state": state_tree if rank == 0 else None,
        "local": local_tree,
    }
    return Share(layout, buffer, document)


def gather(
    storage: Storage, folder: str, world_size: int, abandon: threading.Event, timeout_s: float
) -> tuple[tuple[ObjectRef, ...], int]:
    """Wait until every rank's share is stored; returns the documents' refs in order of rank and the size of it all.

    Raises SaveError when `abandon` is set, after `timeout_s`, and when the ranks' states are not of one shape.
    """
    found: dict[int, tuple[ObjectRef, Any]] = {}
    deadline, pause_s = time.monotonic() + timeout_s, _POLL_S
    while True:
        listed = set(all_keys(storage, folder))
        for rank in range(world_size):
            key = commits.share_key(folder, rank, world_size)
            if rank not in found and key in listed:
                data = storage.get(key)
                found[rank] = ObjectRef(key, len(data), commits.checksum([data])), json.loads(data)
        if len(found) == world_size:
            break
        missing = sorted(set(range(world_size)) - found.keys())
        if abandon.wait(pause_s):
            raise SaveError(f"{storage.url}: save given up: the share of rank {missing[0]} did not come")
        if time.monotonic() > deadline:
            raise SaveError(f"{storage.url}: the share of rank {missing[0]} did not come within {timeout_s:.0f} s")
        pause_s = min(pause_s * 1.5, _POLL_MAX_S)
    shares = [found[rank] for rank in range(world_size)]
    if len({document["fingerprint"] for _, document in shares}) > 1:
        raise SaveError(f"{storage.url}: not saved: the ranks' states differ in names or shapes of tensors")
    return tuple(ref for ref, _ in shares), sum(ref.size_bytes + doc["tensors"]["size_bytes"] for ref, doc in shares)


def read(storage: Storage, commit: Commit, rank: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read a checkpoint: the state, and what was `local` to this rank (None if there was no such rank).

    Raises DamagedError or MissingError unless every byte is what was committed.
    """
    places: dict[str, tuple[torch.Tensor, Mapping[str, tensors.Place]]] = {}
    state_tree: Any = None
    local_tree: Any = None
    for index, ref in enumerate(commit.shares):
        document = _read_document(storage, ref)
        buffer, found = _read_tensors(storage, ObjectRef(**document["tensors"]))
        names = [name for name in found if index == rank or not name.startswith(_LOCAL)]
        places |= dict.fromkeys(names, (buffer, found))
        state_tree = document["state"] if index == 0 else state_tree
        local_tree = document["local"] if index == rank else local_tree
    taken: dict[str, torch.Tensor] = {}

    def tensor(name: str, dtype: str, shape: list[int]) -> torch.Tensor:
        if name not in taken:
            buffer, found = places.get(name, (torch.empty(0, dtype=torch.uint8), {}))
            taken[name] = tensors.take(buffer, found, name, dtype, shape)
        return taken[name]

    return tree.decode(state_tree, tensor), None if local_tree is None else tree.decode(local_tree, tensor)


def _read_document(storage: Storage, ref: ObjectRef) -> Any:
    data = storage.get(ref.key)
    if commits.checksum([data]) != ref.checksum:
        raise DamagedError(f"{ref.key}: its checksum does not match")
    return json.loads(data)


def _read_tensors(storage: Storage, ref: ObjectRef) -> tuple[torch.Tensor, Mapping[str, tensors.Place]]:
    prefix = bytearray(tensors.PREFIX_BYTES)
    storage.read_into(ref.key, 0, memoryview(prefix))
    header_bytes = tensors.header_bytes(bytes(prefix))
    data_bytes = ref.size_bytes - tensors.PREFIX_BYTES - header_bytes
    if data_bytes < 0:
        raise DamagedError(f"{ref.key}: its header does not fit into it")
    header, buffer = bytearray(header_bytes), torch.empty(data_bytes, dtype=torch.uint8)
    storage.read_into(ref.key, len(prefix), memoryview(header))
    data = buffer.numpy().data
    storage.read_into(ref.key, len(prefix) + header_bytes, data)
    if commits.checksum([bytes(prefix), bytes(header), data]) != ref.checksum:
        raise DamagedError(f"{ref.key}: its checksum does not match")
    return buffer, tensors.read_places(bytes(header), data_bytes)


def _fingerprint(flat: Mapping[str, torch.Tensor]) -> str:
    """Equal on two ranks exactly when their tensors have equal names, dtypes and shapes."""
    rows = sorted(f"{name} {tensors.dtype_name(tensor.dtype)} {list(tensor.shape)}" for name, tensor in flat.items())
    return hashlib.sha256("\n".join(rows).encode("utf-8", "surrogatepass")).hexdigest()
