"""The rows of a tensor in memory: views of them, digests that tell which have changed, and which a patch replaces.

A digest of a row consists of two sums, modulo 2**64, of its words of up to 32 bits, each times a random 64-bit key. If
a row changes, a sum stays the same with a probability of at most 2**-33: for a word that differs by d, which 2**32 does
not divide, key times d takes each of at least 2**33 values with the same probability. Both stay the same with at most
2**-66. The keys are drawn by the system when a process needs them, independent of all data and of torch's generators.
"""

from __future__ import annotations

import math
import os

import torch

from elasticctl_store.checkpoints.pieces import PatchedRows, Piece

_SUMS = 2
_WORDS_AT_ONCE = 1 << 15
"""Torch computes larger parts on several threads, which belong to training."""


def view(data: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the rows of a piece of the tensor file `data` as words: integers, as wide as row and position allow."""
    words = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
    dtype = words[math.gcd(piece.row_bytes, piece.start, 4)]
    flat = data[piece.start : piece.start + piece.size_bytes]
    return flat.view(dtype).view(-1, piece.row_bytes // dtype.itemsize)


def draw_keys(words: int) -> torch.Tensor:
    """Return new keys for rows of up to so many words."""
    drawn = bytearray(os.urandom(8 * _SUMS * words))
    return torch.frombuffer(drawn, dtype=torch.int64).view(words, _SUMS)


def digest(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the digests of rows, one row each."""
    keys = keys[: rows.shape[1]]
    found = torch.empty((rows.shape[0], _SUMS), dtype=torch.int64)
    at_once = max(1, _WORDS_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), at_once):
        torch.mm(rows[start : start + at_once].to(torch.int64), keys, out=found[start : start + at_once])
    return found


def to_bitmap(mask: torch.Tensor) -> bytes:
    """Return a mask of rows (bool) as a bitmap."""
    padded = torch.nn.functional.pad(mask.view(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8).numpy().tobytes()


def to_mask(bitmap: bytes, rows: int) -> torch.Tensor:
    """Return a bitmap as a mask of so many rows (bool)."""
    packed = torch.frombuffer(bytearray(bitmap), dtype=torch.uint8)
    return ((packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).view(-1)[:rows].view(torch.bool)


def apply(patched: PatchedRows, patch: torch.Tensor, data: torch.Tensor) -> None:
    """Replace rows in the tensor file `data` by those in the tensor file `patch`."""
    piece = patched.piece
    table = data[piece.start : piece.start + piece.size_bytes].view(-1, piece.row_bytes)
    mask = to_mask(patched.bitmap, len(table))
    where = mask.nonzero().view(-1)
    end = patched.start + len(where) * piece.row_bytes
    table.index_copy_(0, where, patch[patched.start : end].view(-1, piece.row_bytes))
