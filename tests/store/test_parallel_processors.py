"""How many processors there are for this process."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from elasticctl_store import parallel


def test_only_those_it_is_bound_to_count() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert parallel.available() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert parallel.available() == len(before)


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu.max": "100000 0"}, math.inf),
        ({"cpu.max": ""}, math.inf),
    ],
)
def test_a_container_has_no_more_than_it_may_use(tmp_path: Path, files: dict[str, str], allowed: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert parallel.quota(tmp_path) == allowed
    assert parallel.available(tmp_path) == max(1, min(len(os.sched_getaffinity(0)), int(min(allowed, 1e6))))


def test_where_nobody_is_bound_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert parallel.available() == os.cpu_count()


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
