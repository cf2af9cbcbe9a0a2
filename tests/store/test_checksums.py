"""CRCs of pieces, against zlib's of the whole."""

from __future__ import annotations

import random
import threading
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store import checksums, parallel
from elasticctl_store.checksums import combine, combine_all


@given(pieces=st.lists(st.binary(max_size=300), max_size=6))
@settings(max_examples=30)
def test_combined_pieces_have_the_crc_of_the_whole(pieces: list[bytes]) -> None:
    assert combine_all((zlib.crc32(piece), len(piece)) for piece in pieces) == zlib.crc32(b"".join(pieces))


def test_combining_works_for_large_pieces() -> None:
    first, second = bytes(range(256)) * 4096, b"\xff" * (1 << 20)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("size_bytes", [0, (33 << 20) + 7])
def test_the_parallel_crc_equals_the_sequential_one(size_bytes: int) -> None:
    data = random.Random(size_bytes).randbytes(size_bytes)
    assert checksums.crc32(data) == checksums.crc32(memoryview(data)) == zlib.crc32(data)


def test_a_rank_uses_only_its_part_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    def crc32(piece: memoryview) -> int:
        used.add(threading.get_ident())
        return whole(piece)

    whole, used = zlib.crc32, set[int]()
    monkeypatch.setattr(zlib, "crc32", crc32)
    monkeypatch.setattr(checksums, "PIECE_BYTES", 1000)
    monkeypatch.setattr(parallel, "available", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert checksums.crc32(bytes(100_000)) == whole(bytes(100_000))
    assert used == {threading.get_ident()}
