"""What all object stores have in common: bodies cut without a copy, and checked ranges."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.errors import StorageError
from elasticctl_store.storage.cloud import Body, total_bytes
from elasticctl_store.storage.http import HttpResponse


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=9), max_size=5), st.integers(0, 50), st.integers(0, 50))
def test_cutting_a_body_cuts_its_bytes(parts: list[bytes], start: int, length: int) -> None:
    whole, cut = b"".join(parts), Body.of(parts).cut(start, start + length)
    assert b"".join(cut.views) == whole[start : start + length]
    assert cut.size_bytes == len(whole[start : start + length])
    assert all(any(view.obj is part for part in parts) for view in cut.views)


@pytest.mark.parametrize(
    ("status", "said", "filled", "total"),
    [
        (206, "bytes 10-14/100", 5, 100),
        (206, "bytes 10-11/12", 2, 12),
        (416, "bytes */8", 0, 8),
        (416, "", 0, 0),
    ],
)
def test_the_answer_to_a_range_has_the_size_of_the_object(status: int, said: str, filled: int, total: int) -> None:
    answer = HttpResponse(status, {"content-range": said}, b"", filled)
    assert total_bytes(answer, 10, memoryview(bytearray(5))) == total


@pytest.mark.parametrize(
    ("status", "said", "filled"),
    [(200, "", 5), (206, "", 5), (206, "bytes 0-4/100", 5), (206, "bytes 10-12/100", 3), (206, "bytes 10-14/*", 5)],
)
def test_a_wrong_range_is_refused(status: int, said: str, filled: int) -> None:
    with pytest.raises(StorageError, match="does not answer range requests as HTTP requires"):
        total_bytes(HttpResponse(status, {"content-range": said}, b"", filled), 10, memoryview(bytearray(5)))
