"""Bitmaps of rows: encoding, counting, and refusal of invalid ones."""

from __future__ import annotations

import base64
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.checkpoints import bitmaps


def made(rows: set[int], length: int) -> bytes:
    return sum(1 << row for row in rows).to_bytes(-(-length // 8), "little")


@given(st.data(), st.integers(1, 100))
@settings(max_examples=40)
def test_a_bitmap_survives_its_encoding(data: st.DataObject, length: int) -> None:
    rows = data.draw(st.sets(st.integers(0, length - 1), min_size=1))
    start, end = sorted((data.draw(st.integers(0, length)), data.draw(st.integers(0, length))))
    bitmap = bitmaps.from_text(bitmaps.to_text(made(rows, length)), length)
    assert bitmap == made(rows, length)
    assert bitmaps.count_in_text(bitmaps.to_text(bitmap), length) == len(rows)
    assert bitmaps.count(bitmap, start, end) == len([row for row in rows if start <= row < end])
    assert list(bitmaps.rows(bitmap, start, end)) == sorted(row for row in rows if start <= row < end)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "é",
        base64.b64encode(b"\1\0").decode(),
        bitmaps.to_text(b"\1"),
        bitmaps.to_text(b"\1\0\0"),
        bitmaps.to_text(b"\0\0"),
        bitmaps.to_text(b"\0\4"),
        bitmaps.to_text(bytes(1 << 20)),
        base64.b64encode(zlib.compress(b"\1\0")[:-1]).decode(),
        base64.b64encode(zlib.compress(b"\1\0") + b"x").decode(),
        bitmaps.to_text(b"\1\0") + "\n",
    ],
)
def test_invalid_bitmaps_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"bitmap|base64|padding|ASCII|decompress|digit|data"):
        bitmaps.from_text(text, 10)


def test_counting_needs_little_memory() -> None:
    packer = zlib.compressobj()
    parts = [packer.compress(b"\1"), *(packer.compress(bytes(1 << 20)) for _ in range(30)), packer.flush()]
    text = base64.b64encode(b"".join(parts)).decode()
    tracemalloc.start()
    try:
        assert bitmaps.count_in_text(text, 8 * (1 + (30 << 20))) == 1
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
