"""Which rows of a table a patch holds: a bitmap, in which row `r` is bit `r % 8` (from the lowest) of byte `r // 8`.

Share documents contain bitmaps as text: compressed by zlib, in base64.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator

MOST_BITS = 1 << 31
"""All bitmaps of a share document have at most so many bits, 256 MiB: compressed, they fit into a document."""
_PART_BYTES = 1 << 20


def to_text(bitmap: bytes) -> str:
    """Return a bitmap as it is in a share document."""
    return base64.b64encode(zlib.compress(bitmap)).decode()


def from_text(text: str, rows: int) -> bytes:
    """Return the bitmap for so many rows. Raises ValueError unless it is one, with at least one row set."""
    return b"".join(_parts(text, rows))


def count_in_text(text: str, rows: int) -> int:
    """Return how many rows are set, without holding the whole bitmap in memory. Raises ValueError like `from_text`."""
    return sum(map(_bits, _parts(text, rows)))


def _parts(text: str, rows: int) -> Iterator[bytes]:
    lacking_bytes, last, is_empty = -(-rows // 8), 0, True
    unpacker, packed = zlib.decompressobj(), base64.b64decode(text, validate=True)
    try:
        while lacking_bytes >= 0 and (part := unpacker.decompress(packed, _PART_BYTES)):
            packed, last = unpacker.unconsumed_tail, part[-1]
            lacking_bytes -= len(part)
            is_empty = is_empty and part == bytes(len(part))
            yield part
    except zlib.error as e:
        raise ValueError(str(e)) from e
    if lacking_bytes or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"not a bitmap of {rows} rows")
    if is_empty or last >> ((rows - 1) % 8 + 1):
        raise ValueError("a bitmap without rows, or with more than there are")


def _bits(data: bytes) -> int:
    return int.from_bytes(data, "little").bit_count()


def count(bitmap: bytes, start: int, end: int) -> int:
    """Return how many rows are set, from `start` to before `end`."""
    first, last = start // 8, -(-end // 8)
    found = int.from_bytes(bitmap[first:last], "little") >> start % 8
    return (found & ((1 << max(0, end - start)) - 1)).bit_count()


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
