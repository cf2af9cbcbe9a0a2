"""Looks at the cluster once for all who watch, at a calm rate, and not at all while nobody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from elasticctl.cluster.base import Manifest
from elasticctl.dashboard.board import Board, Row
from elasticctl.dashboard.facts import row
from elasticctl.dashboard.threads import beside
from elasticctl.errors import ElasticctlError
from elasticctl.spec import ElasticJob

POLL_S = 2.0
SHARE = 0.1
"""At most this share of the time is spent asking: a large cluster is asked less often."""
MAX_PAUSE_S = 60.0

Key = tuple[str, str]
"""Namespace and name."""


class Feed:
    """The jobs as `list_jobs` last gave them; `trouble` is why it gives none now, or "".

    Lives on one event loop. `looked`: it has been asked at least once.
    """

    def __init__(self, list_jobs: Callable[[], list[Manifest]], poll_s: float = POLL_S) -> None:
        self._list_jobs, self._poll_s = list_jobs, poll_s
        self.board, self.trouble, self.looked = Board(), "", False
        self._jobs: dict[Key, ElasticJob] = {}
        self._known: dict[str, tuple[str, ElasticJob, Row]] = {}
        self._viewers = 0
        self._wanted, self._news, self._hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this is open, the cluster is looked at."""
        if not self._viewers:
            self.hurry()
        self._viewers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._wanted.clear()

    @property
    def viewers(self) -> int:
        """How many watch."""
        return self._viewers

    def job(self, key: Key) -> ElasticJob | None:
        """A job as it was last seen."""
        return self._jobs.get(key)

    def hurry(self) -> None:
        """Look again at once: something has been changed."""
        self._hurry.set()

    async def news(self, timeout_s: float) -> None:
        """Wait for anything new, but no longer than that."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)

    async def run(self) -> None:
        """Look, again and again, until cancelled."""
        while True:
            await self._wanted.wait()
            self._hurry.clear()
            began = time.monotonic()
            await self._look()
            pause_s = min(max(self._poll_s, (time.monotonic() - began) * (1 / SHARE - 1)), MAX_PAUSE_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), pause_s)

    async def _look(self) -> None:
        try:
            jobs, rows = await beside(self._read)
        except ElasticctlError as e:
            fresh, self.trouble = str(e) != self.trouble, str(e)
        else:
            fresh, self.trouble = bool(self.trouble), ""
            self._jobs = jobs
            fresh |= self.board.show(rows)
        if fresh or not self.looked:
            self.looked = True
            news, self._news = self._news, asyncio.Event()
            news.set()

    def _read(self) -> tuple[dict[Key, ElasticJob], list[Row]]:
        """In a thread: only one looks at a time. Of a thousand jobs most are as they were, and most have ended."""
        now, before, self._known = time.time(), self._known, {}
        for manifest in self._list_jobs():
            metadata = manifest["metadata"]
            uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
            known = before.get(uid)
            if known is None or known[0] != version:
                job = ElasticJob.from_manifest(manifest)
                known = version, job, row(job, now)
            elif not known[1].status.phase.terminal:
                known = version, known[1], row(known[1], now)
            self._known[uid] = known
        jobs = {(job.namespace, job.name): job for _, job, _ in self._known.values()}
        return jobs, [told for _, _, told in self._known.values()]
