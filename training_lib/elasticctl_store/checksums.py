"""CRC-32 of bytes that were looked at in pieces: of several parts at a time, each part once.

A CRC is linear over bits: appending n bytes multiplies it by a matrix that depends on n alone, and adds their own CRC.
Matrices are 32 numbers, one a column; see zlib's crc32_combine, whose method this is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache

from elasticctl_store import parallel
from elasticctl_store.parallel import each

_POLYNOMIAL = 0xEDB88320
PIECE_BYTES = 16 << 20
_Matrix = tuple[int, ...]


def crc32(data: bytes | memoryview) -> int:
    """The CRC-32 of bytes, of large ones with all processors of this rank: that of what was restored is waited for."""
    view = memoryview(data)
    pieces = [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]
    crcs = [0] * len(pieces)

    def find(index: int) -> None:
        crcs[index] = zlib.crc32(pieces[index])

    each(find, range(len(pieces)), parallel.per_rank())
    return combine_all((crc, len(piece)) for crc, piece in zip(crcs, pieces, strict=True))


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two byte strings in a row, from theirs and the length of the second one."""
    return _times(_append_matrix(second_bytes), first) ^ second if first else second  # a matrix takes milliseconds


def combine_all(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of byte strings in a row, each given as its CRC-32 and its length."""
    crc = 0
    for piece, size_bytes in pieces:
        crc = combine(crc, piece, size_bytes)
    return crc


@lru_cache(maxsize=64)  # parts have one length but for the last
def _append_matrix(size_bytes: int) -> _Matrix:
    """What `size_bytes` zero bytes do to a CRC."""
    one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    power = _square(_square(_square(one_bit)))
    result: _Matrix = tuple(1 << bit for bit in range(32))
    while size_bytes:
        if size_bytes & 1:
            result = tuple(_times(power, column) for column in result)
        power = _square(power)
        size_bytes >>= 1
    return result


def _times(matrix: _Matrix, vector: int) -> int:
    total = 0
    for column in matrix:
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


def _square(matrix: _Matrix) -> _Matrix:
    return tuple(_times(matrix, column) for column in matrix)
