"""Digests of rows detect every change; masks and bitmaps are equivalent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticctl_store.checkpoints import bitmaps, tensor_boxes
from elasticctl_store.checkpoints.pieces import PatchedRows, Piece
from elasticctl_train.checkpoint import tree
from elasticctl_train.checkpoint.incremental import rows


def test_sums_collide_as_rarely_as_promised() -> None:
    """The worst difference is 2**31 in one word: then the lowest bits of the key decide. Of 16-bit keys and words of 8
    bits, all can be tried."""
    worst = 0
    keys = torch.arange(1 << 16)
    for difference in range(1, 1 << 8):
        worst = max(worst, int((keys * difference % (1 << 16) == 0).sum()))
    assert worst == 1 << 7  # of 2**16 keys: 2**-9, which is 2**-33 for 64 bits and words of 32


@given(st.sampled_from(sorted(tree.DTYPES)), st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**32), st.data())
def test_a_flipped_bit_changes_only_the_digest_of_its_row(
    dtype: str, items: int, length: int, seed: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    item_bytes = tree.DTYPES[dtype].itemsize
    piece = Piece("a", dtype, tensor_boxes.whole((length, items)), item_bytes * data.draw(st.integers(0, 9)))
    file = torch.randint(256, (piece.start + piece.size_bytes + 3,), dtype=torch.uint8)
    keys = rows.draw_keys(64 * 9)
    before = rows.digest(rows.view(file, piece), keys)
    at = data.draw(st.integers(0, piece.size_bytes - 1))
    file[piece.start + at] ^= 1 << data.draw(st.integers(0, 7))
    after = rows.digest(rows.view(file, piece), keys)
    assert (before != after).any(1).nonzero().view(-1).tolist() == [at // piece.row_bytes]


def test_digests_are_sums_modulo_2_to_the_64() -> None:
    words = torch.randint(-(2**31), 2**31, (70_000, 3), dtype=torch.int32)
    keys = rows.draw_keys(5)
    found = rows.digest(words, keys)
    for row in (0, 1, 33_333, 69_999):
        for column in range(2):
            expected = sum(int(word) * int(key) for word, key in zip(words[row], keys[:3, column], strict=True))
            assert (int(found[row, column]) - expected) % 2**64 == 0


def test_keys_are_random_and_do_not_use_torchs_generator() -> None:
    before = torch.get_rng_state()
    assert not torch.equal(rows.draw_keys(8), rows.draw_keys(8))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 1000])
def test_a_mask_survives_its_bitmap(length: int) -> None:
    mask = torch.rand(length) < 0.3
    assert torch.equal(rows.to_mask(rows.to_bitmap(mask), length), mask)


def test_only_the_patched_rows_are_replaced() -> None:
    table, file = torch.randn(10, 3), torch.zeros(8 + 120 + 5, dtype=torch.uint8)
    file[8:128] = table.view(-1).view(torch.uint8)
    mask = torch.tensor([row in (0, 4, 9) for row in range(10)])
    newer = torch.randn(3, 3)
    patch = torch.cat([torch.zeros(16, dtype=torch.uint8), newer.view(-1).view(torch.uint8)])
    text = bitmaps.to_text(rows.to_bitmap(mask))
    rows.apply(PatchedRows(Piece("a", "float32", tensor_boxes.whole((10, 3)), 8), text, 16), patch, file)
    table[mask] = newer
    assert torch.equal(file[8:128], table.view(-1).view(torch.uint8))
    assert not file[:8].any()
    assert not file[128:].any()
