"""Several pieces of work at once."""

from __future__ import annotations

import threading

import pytest

from elasticctl_store.parallel import each


def test_all_is_done_and_as_many_at_a_time_as_allowed() -> None:
    together = threading.Barrier(3, timeout=10)
    done: list[int] = []

    def work(item: int) -> None:
        together.wait()
        done.append(item)

    each(work, range(9), threads=3)
    assert sorted(done) == list(range(9))


def test_nothing_is_nothing() -> None:
    each(lambda item: pytest.fail("called"), [], threads=3)


def test_the_first_error_stops_the_rest_and_is_raised_when_nothing_runs_any_more() -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        raise ValueError(item)

    threads = threading.active_count()
    with pytest.raises(ValueError, match="0"):
        each(work, range(100), threads=4)
    assert len(begun) <= 4
    assert threading.active_count() == threads
