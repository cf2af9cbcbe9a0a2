"""How many processors there are for this process."""

from __future__ import annotations

import os

import pytest

from elasticctl_store import parallel
from elasticctl_train.checkpoint.memory.copying import Copier


def test_only_those_it_is_bound_to_count() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert parallel.available() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert parallel.available() == len(before)


def test_where_nobody_is_bound_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert parallel.available() == os.cpu_count()
    Copier().copy([], [])


@pytest.mark.parametrize(
    ("all_", "ranks", "each"), [(2, None, 2), (2, "2", 1), (8, "", 8), (8, "4", 2), (48, "5", 9), (1, "4", 1)]
)
def test_the_ranks_of_a_worker_share_them(
    monkeypatch: pytest.MonkeyPatch, all_: int, ranks: str | None, each: int
) -> None:
    monkeypatch.setattr(parallel, "available", lambda: all_)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert parallel.per_rank() == each
