"""`ElasticReader`: lets `dcp.load` read any checkpoint of a storage URL, no matter what has saved it.

Every file that this rank needs a part of is read completely, one after the other, and verified against its checksum
before any of it reaches a tensor of the state dict.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints.commits import read_entries
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.checkpoints.pieces import Piece
from elasticctl_store.checkpoints.reader import Contents, fetch_documents, parse
from elasticctl_store.checkpoints.state_trees import decode
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError, MissingError, RestoreError, StorageError
from elasticctl_store.storage import Storage
from elasticctl_train.checkpoint import restore, tree
from elasticctl_train.checkpoint.memory import buffers
from elasticctl_train.dcp import items
from elasticctl_train.dcp.writer import ElasticWriter

log = logging.getLogger("elasticctl_train")

_SHOWN = 5
"""The number of list items that an error shows."""


@dataclass(frozen=True, slots=True)
class Stand:
    """A tensor of a checkpoint, and a tensor without data that takes its place."""

    name: str
    kind: TensorType
    tensor: torch.Tensor


@dataclass(slots=True)
class Found:
    """One checkpoint as a planner sees it."""

    storage: Storage
    commit: Commit
    contents: Contents
    items: dict[str, Any] = field(default_factory=dict)
    planner_data: Any = None
    raw: frozenset[str] = frozenset()
    stands: dict[int, Stand] = field(default_factory=dict)
    pieces: dict[str, list[tuple[int, Piece]]] = field(default_factory=dict)

    @classmethod
    def of(cls, storage: Storage, commit: Commit) -> Found:
        """Read and check the share documents. Raises DamagedError or MissingError, and StorageError."""
        documents = fetch_documents(storage, commit)
        found = cls(storage, commit, parse(commit, documents))
        state = decode(found.contents.state, found._stand_in)
        if items.FIELD in documents[0]:
            found.items, found.planner_data, found.raw = items.find_items(state, documents[0][items.FIELD])
        else:  # saved by Run or Checkpointer
            planner = DefaultSavePlanner()
            try:
                planner.set_up_planner(state, is_coordinator=True)
            except ValueError as e:
                raise RestoreError(f"{storage.url}, step {commit.step}: DCP cannot name its parts: {e}") from e
            found.items, found.planner_data = planner.state_dict, planner.mappings
        if not all(isinstance(found.items[name], torch.Tensor) for name in found.raw):
            raise DamagedError(f"its field {items.FIELD} does not fit its state: a raw item is not bytes")
        for index, share in enumerate(found.contents.shares):
            for piece in share.pieces:
                if piece.box.elements and not piece.is_own:
                    found.pieces.setdefault(piece.name, []).append((index, piece))
        return found

    def metadata(self, load_id: str) -> Metadata:
        """Return what a planner has to know about it."""
        kinds = {name: self._kind_of(name) for name in self.items}
        meta = StorageMeta(checkpoint_id=f"{self.storage.url}#{self.commit.step}", load_id=load_id)
        return Metadata(kinds, planner_data=self.planner_data, storage_data={}, storage_meta=meta)

    def stand_of(self, name: str) -> Stand | None:
        """Return the tensor that an item is; None if it is not a tensor, as far as a planner knows."""
        return self.stands.get(id(self.items[name])) if name not in self.raw else None

    def _kind_of(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        stand = self.stand_of(name)
        if stand is None:
            return BytesStorageMetadata()
        found = [piece.box for _, piece in self.pieces.get(stand.name, ())]
        chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in found]
        size = torch.Size(stand.kind.shape)
        properties = TensorProperties(dtype=stand.tensor.dtype, requires_grad=stand.kind.requires_grad)
        return TensorStorageMetadata(
            properties, size, chunks or [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
        )

    def _stand_in(self, name: str, kind: TensorType) -> torch.Tensor:
        tensor = torch.empty(kind.shape, dtype=tree.DTYPES[kind.dtype], device="meta")
        self.stands[id(tensor)] = Stand(name, kind, tensor)
        return tensor


class ElasticReader(StorageReader):
    """A storage of `torch.distributed.checkpoint` that reads what `ElasticWriter`, `Run` or `Checkpointer` has saved.

    `url` is the storage (default: that of `checkpoint_id`, or $ELASTICCTL_STORAGE). It reads the newest checkpoint
    whose documents are intact, or that of `step`, or of a `checkpoint_id` of the form `URL#STEP` or `#STEP`.
    """

    def __init__(
        self, url: str | os.PathLike[str] = "", *, step: int | None = None, allow_pickle: bool = False
    ) -> None:
        """With `allow_pickle`, pickles are passed to the planner, which may run code in them: only for trusted
        sources."""
        self._url, self._step, self._allow_pickle = os.fspath(url), step, allow_pickle
        self._found: Found | None = None

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint that is read, as `URL#STEP`; the URL before that is known."""
        return self._url if self._found is None else f"{self._url}#{self._found.commit.step}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of this `checkpoint_id` if there is one."""
        if checkpoint_id is not None:
            self._url, self._step = items.parse_id(checkpoint_id, self._url)
        self._found = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Find the checkpoint. Raises MissingError if there is none, and StorageError."""
        self._url = items.check_url(self._url)
        self._found = _newest(storages.open(self._url), self._step)
        return self._found.metadata(load_id=self._found.commit.folder)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: everything is set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Send the checkpoint that this rank has found to the coordinator."""
        plan.storage_data = self._current().commit.folder
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: raise RestoreError unless all ranks have found the same checkpoint."""
        if len({plan.storage_data for plan in plans} - {None}) > 1:
            raise RestoreError(
                f"{self._url}: the ranks found different checkpoints, because one was saved, deleted or damaged just"
                " then. FIX: load again, or specify a step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load the items of a plan. Raises DamagedError, RestoreError and StorageError; some items may be loaded
        then."""
        found = self._current()
        wanted: dict[int, list[tuple[Piece, ReadItem | None]]] = {}
        values: list[ReadItem] = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                values.append(item)
                for name in _tensors_in(found, item.storage_index.fqn):
                    for index, piece in found.pieces.get(name, ()):
                        wanted.setdefault(index, []).append((piece, None))
                continue
            index, piece = _source_of(found, item)
            wanted.setdefault(index, []).append((piece, item))
        inner: dict[str, torch.Tensor] = {}
        for index in sorted(wanted):
            data = _read_share(found, index)
            for piece, target in wanted[index]:
                source = tree.view(data, piece.start, piece.dtype, piece.box.shape)
                if target is not None:
                    _load(planner, target, source)
                else:
                    _copy_piece(inner, found.contents.tensors[piece.name], piece, source)
        for item in values:
            planner.load_bytes(item, self._bytes_of(found, item.storage_index.fqn, inner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is `URL`, `URL#STEP` or `#STEP`."""
        return ElasticWriter.validate_checkpoint_id(checkpoint_id)

    def _current(self) -> Found:
        if self._found is None:
            raise RestoreError("read_metadata has to be called first")
        return self._found

    def _bytes_of(self, found: Found, name: str, inner: dict[str, torch.Tensor]) -> io.BytesIO:
        if name in found.raw:
            if not self._allow_pickle:
                raise RestoreError(
                    f"{name}: it is stored as a pickle, which can run any code when it is loaded. FIX: if you trust "
                    "its author, use ElasticReader(…, allow_pickle=True)"
                )
            stand = found.stands[id(found.items[name])]
            content = inner.get(stand.name)
            return io.BytesIO(content.numpy().tobytes() if content is not None else b"")
        finish = tree.Finisher()

        def real(tensor: torch.Tensor) -> torch.Tensor:
            stand = found.stands[id(tensor)]
            stored = inner.get(stand.name)
            return finish(stand.name, stand.kind, torch.empty_like(tensor, device="cpu") if stored is None else stored)

        return items.to_bytes(items.replace_tensors(found.items[name], real))


def _newest(storage: Storage, step: int | None) -> Found:
    """Return the newest checkpoint (of this step) whose documents are intact. Raises MissingError, StorageError."""
    steps: list[int] = []
    damaged: list[str] = []
    for _, entry in read_entries(storage):
        if isinstance(entry, DamagedError):
            damaged.append(str(entry))
        if not isinstance(entry, Commit):
            continue
        steps.append(entry.step)
        if step is None or entry.step == step:
            try:
                return Found.of(storage, entry)
            except (DamagedError, MissingError) as e:
                log.warning("%s: the checkpoint of step %d is damaged (%s); skipped", storage.url, entry.step, e)
                damaged.append(f"step {entry.step}: {e}")
    if damaged and (step is None or step in steps):
        raise StorageError(f"{storage.url}: no checkpoint can be read: {'; '.join(damaged[:_SHOWN])}")
    known = ", ".join(map(str, dict.fromkeys(steps))) or "none at all"
    wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
    raise MissingError(f"{storage.url}: {wanted} does not exist; existing steps: {known}")


def _source_of(found: Found, item: ReadItem) -> tuple[int, Piece]:
    """Return the piece that an item of a tensor is a part of. Raises RestoreError."""
    name, offset = item.storage_index.fqn, item.storage_index.offset
    stand = found.stand_of(name)
    for index, piece in found.pieces.get(stand.name, ()) if stand is not None else ():
        if offset is None or piece.box.offset == tuple(offset):
            return index, piece
    raise RestoreError(f"{name}: the planner asks for a part at {offset} that the checkpoint does not have")


def _tensors_in(found: Found, name: str) -> Iterator[str]:
    """Yield the names of the tensors in the value of an item."""
    for _, tensor in tree.leaves(found.items[name], name):
        yield found.stands[id(tensor)].name


def _read_share(found: Found, index: int) -> torch.Tensor:
    """Return a tensor file, complete and verified."""
    share = found.contents.shares[index]
    data = torch.frombuffer(buffers.anonymous(share.file.size_bytes), dtype=torch.uint8)
    restore.fetch(found.storage, share, data)
    return data


def _load(planner: LoadPlanner, item: ReadItem, source: torch.Tensor) -> None:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        source = source.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != source.shape:
        name = item.dest_index.fqn
        raise RestoreError(f"{name}: the planner asks for {tuple(source.shape)} to fill {tuple(target.shape)}")
    target.copy_(source)
    planner.commit_tensor(item, target)


def _copy_piece(inner: dict[str, torch.Tensor], kind: TensorType, piece: Piece, source: torch.Tensor) -> None:
    """Copy a piece of a tensor that is part of a value."""
    if piece.name not in inner:
        inner[piece.name] = torch.empty(kind.shape, dtype=source.dtype)
    target = inner[piece.name]
    for dim, (start, length) in enumerate(zip(piece.box.offset, piece.box.shape, strict=True)):
        target = target.narrow(dim, start, length)
    target.copy_(source)
