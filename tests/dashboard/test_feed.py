"""The feed: how often the cluster is queried, and what is new for a viewer that comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl.dashboard import feed
from elasticctl.dashboard.feed import JobFeed, Row, Update, VersionedRows
from tests.support.dashboard.cluster import many


def test_many_jobs_that_take_long_to_decode_are_asked_for_no_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, polls = 0.0, 0

    def decode(*_: Any) -> dict[str, Any]:
        nonlocal now_s
        now_s += 100.0  # after which a slow cluster would be left alone for a minute
        return {"uid": "uid-job-0000"}

    def list_jobs() -> list[dict[str, Any]]:
        nonlocal polls
        polls += 1
        return many(1)

    monkeypatch.setattr(feed, "job_row", decode)

    async def scenario() -> None:
        jobs = JobFeed(list_jobs, lambda _: {}, 0.01, lambda: now_s)
        with jobs.viewing():
            running = asyncio.create_task(jobs.run())
            while polls < 3:
                await asyncio.sleep(0.01)
            running.cancel()

    asyncio.run(scenario())


def test_a_cluster_that_answers_slowly_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, pauses = 0.0, []

    def list_jobs() -> list[dict[str, Any]]:
        nonlocal now_s
        now_s += 2.0
        return []

    async def scenario() -> None:
        jobs = JobFeed(list_jobs, lambda _: {}, 0.01, lambda: now_s)
        paused, waits = asyncio.Event(), asyncio.wait_for

        async def wait_for(waiting: Any, timeout: float) -> Any:
            pauses.append(timeout)
            paused.set()
            return await waits(waiting, timeout)

        with jobs.viewing(), monkeypatch.context() as patched:
            patched.setattr(feed.asyncio, "wait_for", wait_for)
            running = asyncio.create_task(jobs.run())
            await paused.wait()
            running.cancel()

    asyncio.run(scenario())
    assert pauses[0] == pytest.approx(18.0)


def rows(**values: int) -> list[Row]:
    return [{"uid": uid, "value": value} for uid, value in values.items()]


def test_only_changes_are_news() -> None:
    board = VersionedRows()
    assert board.replace(rows(a=1, b=1))
    assert not board.replace(rows(b=1, a=1))
    assert board.replace(rows(a=2, b=1, c=1))
    assert board.since(1) == Update(2, False, tuple(rows(a=2, c=1)))
    assert board.replace(rows(a=2, c=1))
    assert board.since(2) == Update(3, False, (), ("b",))
    assert board.since(1).gone == ("b",)


def test_a_viewer_with_no_or_an_unknown_version_gets_everything() -> None:
    board = VersionedRows()
    board.replace(rows(a=1))
    for known in (None, 7):
        assert board.since(known) == Update(1, True, tuple(rows(a=1)))


def test_a_job_that_returns_is_not_reported_as_deleted() -> None:
    board = VersionedRows()
    for now in (rows(a=1), [], rows(a=1)):
        board.replace(now)
    assert board.since(1) == Update(3, False, tuple(rows(a=1)))


def test_deletions_are_remembered_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_GONE", 20)
    board = VersionedRows()
    for left in range(22, -1, -1):
        board.replace([{"uid": str(n)} for n in range(left)])
    assert board.since(1).whole
    late = board.since(board.version - 20)
    assert not late.whole
    assert len(late.gone) == 20


worlds = st.lists(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 2)), max_size=12)


@given(worlds, st.lists(st.booleans(), min_size=12, max_size=12))
def test_a_viewer_that_misses_some_ends_up_with_all(history: list[dict[str, Any]], looks: list[bool]) -> None:
    board, seen, known = VersionedRows(), {}, None
    for world, looked in zip([*history, history[-1] if history else {}], [*looks[: len(history)], True], strict=True):
        board.replace(rows(**world))
        if looked:
            update = board.since(known)
            known = update.version
            seen = {} if update.whole else seen
            seen |= {row["uid"]: row for row in update.rows}
            for uid in update.gone:
                seen.pop(uid, None)
            assert seen == {row["uid"]: row for row in rows(**world)}
