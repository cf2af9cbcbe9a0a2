"""Read checkpoints: the one module that defines when a checkpoint is intact. Needs neither torch nor numpy.

Each rank has written a share: a tensor file (see `tensor_files`) and a share document, which is JSON. The tensor file
holds *pieces*: whole tensors, or boxes of tensors that are sharded or large.

    {"rank": 0, "world_size": 2, "fingerprint": …, "state": TREE or null, "local": TREE,
     "tensors": {"key": …, "size_bytes": …, "checksum": …},
     "pieces": [[TENSOR, DTYPE, OFFSET, SHAPE, FIRST BYTE IN THE FILE], …],
     "bases": [{"file": {"key": …, "size_bytes": …, "checksum": …}, "pieces": …,       absent if there are none
                "patches": [{"file": …, "rows": [[NUMBER OF A PIECE, BITMAP, FIRST BYTE IN THE FILE], …]}, …],
                "checksum": …}]}                                                        both absent if there are none

`ordered` says which of the dicts in `state` and `local` are ordered (see `state_trees`); absent if none is. A document
also has a `label`, which describes its checkpoint (step, epoch, metrics, time), and ends with a digest of
itself, its *seal*. So the entry of the journal can be restored from the documents (see `repair`).

`bases` are tensor files, too, which an earlier save of the same job may have written: they hold the pieces that have
not changed since (see `entries`). *Patches* are tensor files with rows of a base file's pieces that have changed since:
where a piece of it is patched, the rows whose bits are set (see `bitmaps`) replace those of the base file, and of the
patches before, in the order of the list. A row is what a tensor's last dimension spans. `checksum` is that of the base
file as it is once all patches are applied. `state` is the state tree (see `state_trees`), which rank 0 writes; `local`
is the rank's own.

`verify` and a restore both read through this module, so each accepts what the other does. Nothing is trusted before it
has been checked: checksums, the types and ranges of all numbers, that the documents belong together, that the pieces
fill their file without gaps, and that they hold every element of every tensor exactly once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from elasticctl_store import checksums
from elasticctl_store.checkpoints import entries, state_trees, tensor_files
from elasticctl_store.checkpoints.entries import Commit, ObjectRef
from elasticctl_store.checkpoints.pieces import OWN, ShareContents, parse_bases, parse_file, parse_pieces
from elasticctl_store.checkpoints.tensor_boxes import Box, are_disjoint
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError, FormatError
from elasticctl_store.parallel import each
from elasticctl_store.storage import Storage

log = logging.getLogger("elasticctl_train")
T = TypeVar("T")

MOST_READS = 10
"""What is damaged in this many reads in a row is damaged in the storage, not in transit."""
_SAME_READS = 3
"""So is a tensor file, which takes long to read, of which this many reads in a row find the same bytes."""
_AT_ONCE = 16
_FOLDER = re.compile(rf"{entries.DATA}[A-Za-z0-9._-]{{1,200}}/", re.ASCII)
_SEAL = b', "sha256": "%s"}'
_SEAL_BYTES = len(_SEAL % bytes(64))
_ORDERED = '"$ordered"'
_TREES = ("state", "local")
_FIELDS = ("rank", "world_size", "fingerprint", "state", "local", "tensors", "pieces")


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a checkpoint: the state tree as JSON, its tensors by name, and its tensor files.

    The first `world_size` of the `shares` are those of the ranks, in order; the base files follow.
    """

    state: dict[str, Any]
    tensors: Mapping[str, TensorType]
    shares: tuple[ShareContents, ...]
    world_size: int

    @property
    def files(self) -> Iterator[ObjectRef]:
        """All tensor files, including patches."""
        for share in self.shares:
            yield share.file
            for patch in share.patches:
                yield patch.share.file

    @property
    def base_files(self) -> set[ObjectRef]:
        """The base files, including patches."""
        return set(self.files).difference(share.file for share in self.shares[: self.world_size])


def read_contents(storage: Storage, commit: Commit) -> Contents:
    """Read and check a checkpoint's share documents. Raises DamagedError or MissingError, and StorageError."""
    return parse(commit, fetch_documents(storage, commit))


def fetch_documents(storage: Storage, commit: Commit) -> list[Any]:
    """Read the share documents as JSON. Raises DamagedError or MissingError unless they are what was committed."""
    if not _FOLDER.fullmatch(commit.folder) or ".." in commit.folder:
        raise DamagedError(f"{commit.folder!r:.100} is not a folder of a checkpoint")
    for rank, ref in enumerate(commit.shares):
        if ref.key != entries.share_key(commit.folder, rank, len(commit.shares)):
            raise DamagedError(f"{ref.key!r:.100} is not the share of rank {rank} of {len(commit.shares)}")

    found: list[Any] = [None] * len(commit.shares)

    def place(rank: int) -> None:
        found[rank] = retry_damaged(lambda: fetch_document(storage, commit.shares[rank]))

    each(place, range(len(found)), _AT_ONCE)
    return found


def fetch_document(storage: Storage, ref: ObjectRef) -> Any:
    """Read one share document as JSON. Raises DamagedError or MissingError unless it is what was committed."""
    data = storage.get(ref.key)
    check_bytes(ref, data)
    return load_document(ref.key, data)


def parse(commit: Commit, documents: Sequence[Any]) -> Contents:
    """Return the contents that share documents describe. Raises DamagedError unless they form a complete checkpoint."""
    state = _read_tree(documents[0], "state") if isinstance(documents[0], dict) else None
    if not isinstance(state, dict):
        raise DamagedError(f"{commit.shares[0].key}: it contains no state")
    tensors = _tensors_of(state)
    if any(name.startswith(f"{OWN}/") for name in tensors):
        raise DamagedError(
            f"{commit.shares[0].key}: a tensor of the state has a name that is reserved for a rank's own tensors"
        )
    boxes: dict[str, list[Box]] = {}
    shares, bases = [], list[ShareContents]()
    for rank, (ref, document) in enumerate(zip(commit.shares, documents, strict=True)):
        _check_document(ref.key, document, documents, rank)
        local = _read_tree(document, "local")
        own_tensors, own_boxes = _tensors_of(local), dict[str, list[Box]]()
        if any(not name.startswith(f"{OWN}/") for name in own_tensors):
            raise DamagedError(f"{ref.key}: one of the rank's own tensors has a name of the state's")
        file = parse_file(ref.key, document["tensors"])
        pieces = parse_pieces(file, document["pieces"], {**tensors, **own_tensors})
        for piece in pieces:
            (own_boxes if piece.is_own else boxes).setdefault(piece.name, []).append(piece.box)
        _check_complete(own_tensors, own_boxes)
        shares.append(ShareContents(file, pieces, local, file))
        for base in parse_bases(ref.key, document.get("bases", []), tensors):
            bases.append(base)
            for piece in base.pieces:
                boxes.setdefault(piece.name, []).append(piece.box)
    _check_complete(tensors, boxes)
    contents = Contents(state, tensors, (*shares, *bases), len(shares))
    if {entries.folder_of(file.key) for file in contents.base_files} != set(commit.bases):
        raise DamagedError(f"{commit.shares[0].key}: its base files are not those that were committed")
    return contents


def seal(document: Mapping[str, Any]) -> bytes:
    """Return a share document in its stored form: JSON that ends with a digest of everything before it."""
    text = json.dumps(document)
    if _ORDERED in text:
        where: dict[str, list[Any]] = {name: [] for name in _TREES}
        trees = {name: state_trees.take_order(document[name], where[name]) for name in _TREES}
        text = json.dumps({**document, **trees, "ordered": where})
    body = text.encode()[:-1]
    return body + _SEAL % hashlib.sha256(body).hexdigest().encode()


def is_sealed(data: bytes) -> bool:
    """Return whether this is a document exactly as it was sealed."""
    body = data[:-_SEAL_BYTES]
    return data[-_SEAL_BYTES:] == _SEAL % hashlib.sha256(body).hexdigest().encode()


def check_bytes(ref: ObjectRef, data: bytes | memoryview) -> None:
    """Raise DamagedError unless these are the bytes that were committed."""
    found = entries.as_checksum(checksums.crc32(data))
    if len(data) != ref.size_bytes or found != ref.checksum:
        raise DamagedError(f"{ref.key}: its checksum does not match", found=found)


def check_header(share: ShareContents, header: bytes) -> None:
    """Raise DamagedError unless the tensor file's first `header_bytes` bytes agree with the share document."""
    places: dict[int, list[TensorType]] = {}
    for piece in share.pieces:
        places.setdefault(piece.start, []).append(TensorType(piece.dtype, piece.box.shape))
    if not tensor_files.is_header_of(header, places):
        raise DamagedError(f"{share.file.key}: its header does not match the share document")


def retry_damaged(read: Callable[[], T], *, until_same: bool = False, level: int = logging.WARNING) -> T:
    """Return what `read` returns; after damage, which may only have happened in transit, read again, `MOST_READS` times
    in all.

    With `until_same`, three reads in a row that find the same bytes are enough. Logged once, at `level`.
    """
    found: list[str] = []
    while True:
        try:
            return read()
        except FormatError:
            raise
        except DamagedError as e:
            found.append(e.found)
            is_same = until_same and e.found and found[-_SAME_READS:] == [e.found] * _SAME_READS
            if is_same or len(found) == MOST_READS:
                raise
            if len(found) == 1:
                log.log(level, "%s; reading it again", e)


def load_document(key: str, data: bytes) -> Any:
    """Parse a share document as JSON. Raises DamagedError."""
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise DamagedError(f"{key}: not a share document: {e!s:.80}") from e


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_document(key: str, document: Any, documents: Sequence[Any], rank: int) -> None:
    """Raise DamagedError unless the document has all fields, and those that relate it to the others match."""
    if not isinstance(document, dict) or any(name not in document for name in _FIELDS):
        raise DamagedError(f"{key}: not a share document")
    for name, expected in (("rank", rank), ("world_size", len(documents))):
        if type(document[name]) is not int or document[name] != expected:
            raise DamagedError(f"{key}: its {name} is not {expected}")
    if type(document["fingerprint"]) is not str or document["fingerprint"] != documents[0]["fingerprint"]:
        raise DamagedError(f"{key}: its state is not that of the share of rank 0")
    if rank and document["state"] is not None:
        raise DamagedError(f"{key}: it contains a state, which only rank 0 writes")
    if not isinstance(document["local"], dict):
        raise DamagedError(f"{key}: it contains no state of its rank's own")


def _read_tree(document: Mapping[str, Any], name: str) -> Any:
    """Return a tree of a share document. Raises DamagedError."""
    ordered = document.get("ordered", {})
    if not isinstance(ordered, dict):
        raise DamagedError("not a share document: its list of ordered dicts is invalid")
    return state_trees.give_order(document.get(name), ordered.get(name, []))


def _tensors_of(tree: dict[str, Any]) -> dict[str, TensorType]:
    """Return the tensors that a tree refers to, by name. Raises DamagedError if it is not the tree of a dict."""
    found: dict[str, TensorType] = {}

    def add_tensor(name: str, tensor: TensorType) -> None:
        if found.setdefault(name, tensor) != tensor:
            raise DamagedError(f"tensor {name!r:.100}: two references to it differ in dtype or shape")

    if not isinstance(state_trees.decode(tree, add_tensor), dict):
        raise DamagedError("not a state tree: it is not a dict")
    return found


def _check_complete(tensors: Mapping[str, TensorType], boxes: Mapping[str, Collection[Box]]) -> None:
    """Raise DamagedError unless the boxes contain every element of every tensor exactly once."""
    for name, tensor in tensors.items():
        found = boxes.get(name, ())
        stored = sum(box.elements for box in found)
        if stored != tensor.elements:
            raise DamagedError(f"tensor {name!r:.100}: {stored} of its {tensor.elements} elements are stored")
        if not are_disjoint(found):
            raise DamagedError(f"tensor {name!r:.100}: some of its elements are stored twice, others not at all")
