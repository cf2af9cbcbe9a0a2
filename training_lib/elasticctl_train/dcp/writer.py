"""`ElasticWriter`: makes `dcp.save` and `dcp.async_save` write a checkpoint like any other.

Each rank stores the tensors that the planner gives it, as they are: tensors that are row-major in memory are not
copied. The coordinator, which is rank 0 of the group, then receives the names and the plain values of all, and commits.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints import entries, repair, tensor_boxes
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import ObjectRef, Retention
from elasticctl_store.checkpoints.reader import read_contents, seal
from elasticctl_store.checkpoints.retention import take_over
from elasticctl_store.checkpoints.tensor_boxes import Box
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError, SaveError, StateError, StorageError
from elasticctl_store.storage import Storage
from elasticctl_train.checkpoint import plans, tree
from elasticctl_train.checkpoint.saving import Committer, Label
from elasticctl_train.dcp import items
from elasticctl_train.run_storage import USED_URLS

_ALL = Retention(last=1 << 30)
_OVERTAKEN = (
    "another save with this writer has begun before this one was done, or the planner kept the plan of another. FIX: "
    "wait for the result of dcp.async_save before the next save; and DefaultSavePlanner(enable_plan_caching=False)"
)


@dataclass(frozen=True, slots=True)
class SavePlace:
    """Where one rank writes to in one save, as chosen by the coordinator.

    `nonce` is what that rank sent while planning; None if the planner has dropped it.
    """

    folder: str
    rank: int
    world_size: int
    step: int
    nonce: object


@dataclass(frozen=True, slots=True)
class Written:
    """What the coordinator has to know about an item: the dtype of a tensor, or the JSON of anything else.

    `folder` is where its rank wrote to, so that two simultaneous saves are not mistaken for one.
    """

    dtype: str = ""
    content: Any = None
    is_raw: bool = False
    folder: str = ""


@dataclass(slots=True)
class ItemShare:
    """What a rank is about to store: boxes of tensors, by name, and the description of its items."""

    boxes: list[tuple[str, TensorType, Box]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    results: list[WriteResult] = field(default_factory=list)

    def add(self, name: str, kind: TensorType, box: Box, tensor: torch.Tensor) -> None:
        """Add this box of a tensor, unless it is empty."""
        if box.elements:
            self.boxes.append((name, kind, box))
            self.tensors.append(tensor)


class ElasticWriter(StorageWriter):
    """A storage of `torch.distributed.checkpoint` in which every save is one commit of a storage URL.

    `url` is the storage (default: that of `checkpoint_id`, or $ELASTICCTL_STORAGE). The step of a checkpoint is `step`,
    or that of a `checkpoint_id` of the form `URL#STEP` or `#STEP`, or else one more than the newest there. `keep`
    decides which older checkpoints are kept; by default all are. A writer takes over the URL with its first save.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] = "",
        *,
        step: int | None = None,
        keep: Retention | None = None,
        allow_pickle: bool = False,
    ) -> None:
        """With `allow_pickle`, objects that are not plain data are stored as the pickle that the planner makes of
        them."""
        self._url, self._step = os.fspath(url), step
        self._keep, self._allow_pickle = keep or _ALL, allow_pickle
        self._clear()

    def _clear(self) -> None:
        self._storage: Storage | None = None
        self._committer: Committer | None = None
        self._saves = 0
        self._nonce = ""
        self._written: tuple[SavePlace | None, dict[str, Any]] = None, {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs, as with AsyncCheckpointerType.PROCESS; it opens the storage again."""
        return {name: self.__dict__[name] for name in ("_url", "_step", "_keep", "_allow_pickle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint of the last save, as `URL#STEP`; the URL before there is one."""
        place, _ = self._written
        return f"{self._url}#{place.step}" if place is not None else self._url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, with this `checkpoint_id` if there is one."""
        url, step = items.parse_id(checkpoint_id, self._url)
        if checkpoint_id is not None:
            if url != self._url:
                self._clear()
            self._url, self._step = url, step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the storage, on all ranks. Raises StorageError."""
        if not kwargs.get("use_collectives", True):
            raise SaveError(
                "without collectives nothing can be committed. FIX: call dcp.save with use_collectives=True"
            )
        self._nonce, self._written = secrets.token_hex(8), (None, {})
        self._url = items.check_url(self._url)
        if self._storage is None:
            self._storage = storages.open(self._url)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Send this rank's nonce to the coordinator."""
        return replace(plan, storage_data=self._nonce)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: take over the URL, unless that is done, and decide where each rank writes to."""
        committer = self._take_over()
        step = self._step
        if step is None:
            newest = next(read_commits(self._opened()), None)
            step = newest.step + 1 if newest is not None else 1
        self._saves += 1
        mine = committer.writer.generation
        folder = entries.save_folder(mine.generation, self._saves, step, mine.run_id)
        return [
            replace(plan, storage_data=SavePlace(folder, rank, len(plans), step, plan.storage_data))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's tensors and, except on the coordinator, its document. Raises StateError, StorageError."""
        place = plan.storage_data
        if not isinstance(place, SavePlace) or place.nonce not in (self._nonce, None):
            raise SaveError(_OVERTAKEN)
        share = self._resolve(plan, planner)
        layout, placed = plans.lay_out(share.boxes)
        data: list[bytes | memoryview] = [layout.header, *(_memory(share.tensors[index]) for _, index in placed)]
        key = entries.share_key(place.folder, place.rank, place.world_size)
        file_key = entries.tensors_key(key)
        crc = self._opened().put(file_key, data, if_absent=True)
        document = {
            "rank": place.rank,
            "world_size": place.world_size,
            "fingerprint": hashlib.sha256(place.folder.encode()).hexdigest(),
            "label": repair.label(place.step, 0, {}, time.time()),
            "tensors": asdict(ObjectRef(file_key, layout.size_bytes, entries.as_checksum(crc))),
            "pieces": plans.rows_of([piece for piece, _ in placed]),
            "state": None,
            "local": {},
        }
        if place.rank:
            self._opened().put(key, [seal(document)], if_absent=True)
        self._written = place, document
        done: Future[list[WriteResult]] = Future()
        done.set_result(share.results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: describe what all ranks have stored, and commit it. Raises StateError, StorageError."""
        place, document = self._written
        committer = self._take_over()
        if place is not None and place.rank:
            raise SaveError("the coordinator of a save has to be rank 0 of its group")
        if place is None or any(one.storage_data.folder != place.folder for found in results for one in found):
            raise SaveError(_OVERTAKEN)
        try:
            document = document | _describe(metadata, results)
            key = entries.share_key(place.folder, 0, place.world_size)
            self._opened().put(key, [seal(document)])
            draft = committer.gather(place.folder, place.world_size, Label(place.step), threading.Event())
            try:
                read_contents(self._opened(), draft)
            except DamagedError as e:
                self._opened().delete([key])  # with it, the save would look like a commit that has been damaged
                raise SaveError(
                    f"{self._url}: not saved, because the planner's items do not form a complete state: {e}"
                ) from e
            commit = committer.commit(draft)
        except (StateError, StorageError):
            committer.sweep_again()
            raise
        committer.committed(commit, 0.0)
        metadata.storage_meta = self.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is `URL`, `URL#STEP` or `#STEP`."""
        url, step = items.parse_id(checkpoint_id, "")
        try:
            storages.open(url)
        except StorageError:
            return not url and step is not None
        return True

    def storage_meta(self) -> StorageMeta:
        """Return what planners get to know about this storage."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._nonce)

    def _opened(self) -> Storage:
        if self._storage is None:
            raise SaveError("set_up_storage_writer has to be called first")
        return self._storage

    def _take_over(self) -> Committer:
        if self._committer is None:
            storage = self._opened()
            if storage.url in USED_URLS:
                raise SaveError(
                    f"{storage.url}: a Run of this process saves there: it would be ended by this save, and could not "
                    "resume from it. FIX: give the writer a URL of its own, such as a folder below this one"
                )
            self._committer = Committer(storage, take_over(storage), self._keep, None)
        return self._committer

    def _resolve(self, plan: SavePlan, planner: SavePlanner) -> ItemShare:
        share = ItemShare()
        for item in plan.items:
            resolved = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                size_bytes, said = self._add_bytes(share, item.index.fqn, bytes(resolved.getbuffer()))  # type: ignore[union-attr]
            else:
                size_bytes, said = _add_tensor(share, item, resolved)  # type: ignore[arg-type]
            said = replace(said, folder=plan.storage_data.folder)
            share.results.append(WriteResult(item.index, size_bytes, said))
        return share

    def _add_bytes(self, share: ItemShare, name: str, content: bytes) -> tuple[int, Written]:
        try:
            encoded, tensors = items.encode_bytes(name, content)
        except StateError:
            if not self._allow_pickle:
                raise
            raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            kind = TensorType("uint8", (len(content),))
            share.add(name, kind, tensor_boxes.whole(kind.shape), raw)
            return len(content), Written("uint8", _reference(name, kind), is_raw=True)
        for inner, tensor in tensors.items():
            kind = TensorType(tree.NAMES[tensor.dtype], tuple(tensor.shape))
            share.add(inner, kind, tensor_boxes.whole(kind.shape), tensor.detach())
        return len(content), Written(content=encoded)


def _add_tensor(share: ItemShare, item: WriteItem, tensor: torch.Tensor) -> tuple[int, Written]:
    name, planned = item.index.fqn, item.tensor_data
    dtype = tree.NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_meta or planned is None:
        raise StateError(f"{name}: a checkpoint cannot hold a {tensor.layout} tensor of {tensor.dtype}")
    box = Box(tuple(planned.chunk.offsets), tuple(planned.chunk.sizes))
    if tuple(tensor.shape) != box.shape:
        raise StateError(f"{name}: its planned shape is {box.shape}, but it has {tuple(tensor.shape)}")
    share.add(name, TensorType(dtype, tuple(planned.size)), box, tensor.detach())
    return tensor.nbytes, Written(dtype)


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the elements in row-major order, as bytes."""
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data


def _describe(metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, Any]:
    """Return the state, and what has to be known about the planner, as fields of rank 0's share document."""
    written = {result.index.fqn: result.storage_data for found in results for result in found}
    contents: dict[str, Any] = {}
    for name, kind in metadata.state_dict_metadata.items():
        said = written.get(name)
        if isinstance(kind, TensorStorageMetadata):
            dtype = said.dtype if said else tree.NAMES.get(kind.properties.dtype, "")
            contents[name] = _reference(name, TensorType(dtype, tuple(kind.size)), kind.properties.requires_grad)
        elif said is None:
            raise StateError(f"{name}: no rank has written it")
        else:
            contents[name] = said.content
    data = metadata.planner_data
    paths = data if isinstance(data, Mapping) and all(isinstance(path, tuple) for path in data.values()) else {}
    state, places = items.encode_tree(contents, paths)
    raw = [name for name, said in written.items() if said.is_raw]
    return {"state": state, items.FIELD: items.describe(places, data, raw)}


def _reference(name: str, kind: TensorType, requires_grad: bool = False) -> dict[str, Any]:
    said: dict[str, Any] = {"$tensor": name, "dtype": kind.dtype, "shape": list(kind.shape)}
    return {**said, "requires_grad": True} if requires_grad and kind.dtype.startswith(("float", "bf", "comp")) else said
