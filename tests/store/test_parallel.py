"""Several pieces of work at once."""

from __future__ import annotations

import threading

import pytest

from elasticctl_store.parallel import each


def test_all_is_done_and_as_many_at_a_time_as_allowed() -> None:
    together = threading.Barrier(3, timeout=240)
    done: list[int] = []

    def work(item: int) -> None:
        together.wait()
        done.append(item)

    each(work, range(9), threads=3)
    assert sorted(done) == list(range(9))


def test_fewer_threads_than_wanted_do_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a container's limit on processes is reached."""
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


def test_nothing_is_nothing() -> None:
    each(lambda item: pytest.fail("called"), [], threads=3)


def test_the_first_error_stops_the_rest_and_is_raised_when_nothing_runs_any_more() -> None:
    begun: list[threading.Thread] = []

    def work(item: int) -> None:
        begun.append(threading.current_thread())
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        each(work, range(100), threads=4)
    assert len(begun) <= 4
    assert not any(thread.is_alive() for thread in begun if thread is not threading.main_thread())
