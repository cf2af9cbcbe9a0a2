"""CRC-32 of large data, computed in pieces: several pieces in parallel, and each byte once.

A CRC is linear over bits: appending n bytes multiplies it by a matrix that depends only on n, and adds the CRC of the
appended bytes. A matrix is 32 numbers, one per column. The method is that of zlib's crc32_combine.
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
    """Return the CRC-32 of the data, computed on all of this rank's processors: a restore waits for it."""
    view = memoryview(data)
    pieces = [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]
    crcs = [0] * len(pieces)

    def find(index: int) -> None:
        crcs[index] = zlib.crc32(pieces[index])

    each(find, range(len(pieces)), parallel.per_rank())
    return combine_all((crc, len(piece)) for crc, piece in zip(crcs, pieces, strict=True))


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two concatenated byte strings, from their CRC-32s and the length of the second."""
    if not first:  # computing a matrix takes milliseconds
        return second
    return _times(_append_matrix(second_bytes), first) ^ second


def combine_all(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of concatenated byte strings, each given as (CRC-32, length in bytes)."""
    crc = 0
    for piece, size_bytes in pieces:
        crc = combine(crc, piece, size_bytes)
    return crc


@lru_cache(maxsize=64)  # all parts but the last have the same length
def _append_matrix(size_bytes: int) -> _Matrix:
    """Return the matrix by which `size_bytes` zero bytes change a CRC."""
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
