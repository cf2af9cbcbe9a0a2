"""Which rows of a table a patch holds: a bitmap, in which row `r` is bit `r % 8` (from the lowest) of byte `r // 8`.

Share documents contain bitmaps as text: compressed by zlib, in base64.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator

MOST_BITS = 1 << 31
"""All bitmaps of a share document have at most so many bits, 256 MiB: compressed, they fit into a document."""


def to_text(bitmap: bytes) -> str:
    """Return a bitmap as it is in a share document."""
    return base64.b64encode(zlib.compress(bitmap)).decode()


def from_text(text: str, rows: int) -> bytes:
    """Return the bitmap for so many rows. Raises ValueError unless it is one, with at least one row set."""
    size_bytes = -(-rows // 8)
    unpacker = zlib.decompressobj()
    try:
        bitmap = unpacker.decompress(base64.b64decode(text, validate=True), size_bytes + 1)
    except zlib.error as e:
        raise ValueError(str(e)) from e
    if len(bitmap) != size_bytes or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"not a bitmap of {rows} rows")
    if bitmap.count(0) == size_bytes or bitmap[-1] >> ((rows - 1) % 8 + 1):
        raise ValueError("a bitmap without rows, or with more than there are")
    return bitmap


def count(bitmap: bytes, end: int | None = None) -> int:
    """Return how many rows are set, of those before `end` (default: of all)."""
    if end is None:
        return int.from_bytes(bitmap, "little").bit_count()
    whole, rest = divmod(end, 8)
    last = bitmap[whole] & ((1 << rest) - 1) if rest else 0
    return int.from_bytes(bitmap[:whole], "little").bit_count() + last.bit_count()


def rows(bitmap: bytes, start: int, end: int) -> Iterator[int]:
    """Yield the rows that are set, in order, from `start` to before `end`."""
    for at in range(start // 8, -(-end // 8)):
        byte = bitmap[at]
        while byte:
            lowest = byte & -byte
            row = 8 * at + lowest.bit_length() - 1
            if start <= row < end:
                yield row
            byte ^= lowest
