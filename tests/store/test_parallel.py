"""Work in parallel, and the number of processors for it."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import pytest

from elasticctl_store import parallel
from elasticctl_store.parallel import each


def test_all_items_are_processed_with_the_allowed_parallelism() -> None:
    together = threading.Barrier(3, timeout=240)
    done: list[int] = []

    def work(item: int) -> None:
        together.wait()
        done.append(item)

    each(work, range(9), threads=3)
    assert sorted(done) == list(range(9))


def test_fewer_threads_than_requested_do_all_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the container's limit on processes were reached."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    done: list[int] = []
    each(done.append, range(9), threads=8)
    assert sorted(done) == list(range(9))
    assert not any(thread.is_alive() for thread in started)


def test_no_items_need_no_work() -> None:
    each(lambda item: pytest.fail("called"), [], threads=3)


def test_the_first_error_stops_the_rest_and_is_raised_at_the_end() -> None:
    begun: list[threading.Thread] = []

    def work(item: int) -> None:
        begun.append(threading.current_thread())
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        each(work, range(100), threads=4)
    assert len(begun) <= 4
    assert not any(thread.is_alive() for thread in begun if thread is not threading.main_thread())


def test_the_affinity_limits_the_processors() -> None:
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
def test_the_quota_of_a_container_limits_the_processors(tmp_path: Path, files: dict[str, str], allowed: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert parallel.quota(tmp_path) == allowed
    assert parallel.available(tmp_path) == max(1, min(len(os.sched_getaffinity(0)), int(min(allowed, 1e6))))


def test_without_affinity_all_processors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert parallel.available() == os.cpu_count()


@pytest.mark.parametrize(
    ("all_", "ranks", "each"), [(2, None, 2), (2, "2", 1), (8, "", 8), (8, "4", 2), (48, "5", 9), (1, "4", 1)]
)
def test_the_ranks_of_a_worker_share_the_processors(
    monkeypatch: pytest.MonkeyPatch, all_: int, ranks: str | None, each: int
) -> None:
    monkeypatch.setattr(parallel, "available", lambda: all_)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert parallel.per_rank() == each
