"""What a checkpoint consists of: its share documents, read and checked before any tensor is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from elasticctl_store.checkpoints.boxes import Box
from elasticctl_store.checkpoints.entries import ObjectRef
from elasticctl_store.errors import DamagedError
from elasticctl_train.checkpoint import tensors, tree
from elasticctl_train.checkpoint.shares import OWN, Piece

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensors by name: dtype and whole shape."""


@dataclass(frozen=True, slots=True)
class Document:
    """A share document, parsed. `state` is the state tree as JSON (rank 0's document only)."""

    file: ObjectRef
    pieces: tuple[Piece, ...]
    state: Any
    local: Any


@dataclass(frozen=True, slots=True)
class Manifest:
    """The documents of one checkpoint in order of rank, and the tensors of its state."""

    documents: tuple[Document, ...]
    kinds: Kinds

    @property
    def state(self) -> Any:
        """The state tree as JSON."""
        return self.documents[0].state


def parse(documents: Sequence[Any]) -> Manifest:
    """Raises DamagedError unless the documents together have every byte of every tensor, once."""
    parsed = tuple(_document(document) for document in documents)
    kinds = kinds_of(parsed[0].state)
    shared = Counter[str]()
    for document in parsed:
        own = kinds_of(document.local)
        found = Counter[str]()
        for piece in document.pieces:
            (found if piece.name.startswith(f"{OWN}/") else shared)[piece.name] += _elements(piece, {**kinds, **own})
        _check_complete(own, found)
    _check_complete(kinds, shared)
    return Manifest(parsed, kinds)


def kinds_of(encoded: Any) -> Kinds:
    """The tensors a tree (as JSON) refers to."""
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

    def note(name: str, dtype: str, shape: list[int]) -> torch.Tensor:
        kinds[name] = tensors.dtype_of(dtype), tuple(shape)
        return _NOTHING

    tree.decode(encoded, note)
    return kinds


_NOTHING = torch.empty(0)


def _document(document: Mapping[str, Any]) -> Document:
    try:
        file = ObjectRef(**document["tensors"])
        pieces = tuple(
            Piece(name, tensors.dtype_of(dtype), Box(tuple(offset), tuple(shape)), start)
            for name, dtype, offset, shape, start in document["pieces"]
        )
        if any(not 0 <= piece.start <= file.size_bytes - piece.size_bytes for piece in pieces):
            raise DamagedError(f"{file.key}: a piece lies outside its file")
        return Document(file, pieces, document["state"], document["local"])
    except (KeyError, TypeError, ValueError) as e:
        raise DamagedError(f"not a share document: {e!r:.80}") from e


def _elements(piece: Piece, kinds: Kinds) -> int:
    """How many elements of its tensor a piece has; DamagedError for one that is of no tensor here."""
    dtype, shape = kinds.get(piece.name, (None, ()))
    offset, lengths = piece.box.offset, piece.box.shape
    if dtype != piece.dtype or len(offset) != len(shape) or len(lengths) != len(shape):
        raise DamagedError(f"tensor {piece.name!r}: a piece of it is of another kind")
    if any(at < 0 or n < 0 or at + n > whole for at, n, whole in zip(offset, lengths, shape, strict=True)):
        raise DamagedError(f"tensor {piece.name!r}: a piece of it lies outside")
    return piece.box.elements


def _check_complete(kinds: Kinds, found: Mapping[str, int]) -> None:
    for name, (_, shape) in kinds.items():
        if found.get(name, 0) != prod(shape):
            raise DamagedError(f"tensor {name!r}: {found.get(name, 0)} of its {prod(shape)} elements are stored")
