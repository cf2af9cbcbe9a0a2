"""How often the cluster is asked: as often as its answers allow, however long they take to be decoded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elasticctl.dashboard import feed
from elasticctl.dashboard.feed import JobFeed
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

    async def story() -> None:
        jobs = JobFeed(list_jobs, lambda _: {}, 0.01, lambda: now_s)
        with jobs.viewing():
            running = asyncio.create_task(jobs.run())
            while polls < 3:
                await asyncio.sleep(0.01)
            running.cancel()

    asyncio.run(story())


def test_a_cluster_that_answers_slowly_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, pauses = 0.0, []

    def list_jobs() -> list[dict[str, Any]]:
        nonlocal now_s
        now_s += 2.0
        return []

    async def story() -> None:
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

    asyncio.run(story())
    assert pauses[0] == pytest.approx(18.0)
