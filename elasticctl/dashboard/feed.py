"""Looks at the cluster once for all who watch, at a calm rate, and not at all while nobody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from elasticctl.cluster.base import Manifest
from elasticctl.dashboard.board import Board, Row
from elasticctl.dashboard.facts import row
from elasticctl.dashboard.projects import Projects
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

    `projects` is what `survey` makes of these jobs; None until it was asked. Lives on one event loop. `looked`: the
    cluster has been asked at least once.
    """

    def __init__(
        self,
        list_jobs: Callable[[], list[Manifest]],
        survey: Callable[[Iterable[ElasticJob]], Projects],
        poll_s: float = POLL_S,
    ) -> None:
        self._list_jobs, self._survey, self._poll_s = list_jobs, survey, poll_s
        self.board, self.trouble, self.looked = Board(), "", False
        self.projects: Projects | None = None
        self._jobs: dict[Key, ElasticJob] = {}
        self._known: dict[str, tuple[str, ElasticJob, Row]] = {}
        self._surveying: asyncio.Task[None] | None = None
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
        try:
            while True:
                await self._wanted.wait()
                self._hurry.clear()
                began = time.monotonic()
                await self._look()
                pause_s = min(max(self._poll_s, (time.monotonic() - began) * (1 / SHARE - 1)), MAX_PAUSE_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), pause_s)
        finally:
            if self._surveying is not None:
                self._surveying.cancel()

    async def _look(self) -> None:
        try:
            jobs, rows = await beside(self._read)
        except ElasticctlError as e:
            fresh, self.trouble = str(e) != self.trouble, str(e)
            self._tell(fresh)
            return
        fresh, self.trouble, self._jobs = bool(self.trouble), "", jobs
        self._tell(self.board.show(rows) or fresh)
        if self._surveying is None or self._surveying.done():
            if self._surveying is not None:
                self._surveying.result()  # it fails only where there is a bug of ours, which is not to be hidden
            self._surveying = asyncio.create_task(self._look_round(list(jobs.values())))

    async def _look_round(self, jobs: list[ElasticJob]) -> None:
        """Beside the looks at jobs, which are not to wait for it: it may take far longer."""
        found = await beside(lambda: self._survey(jobs))
        if found != self.projects:
            self.projects = found
            self._tell(True)

    def _tell(self, fresh: bool) -> None:
        """Wake all who wait, where there is anything new, or it is the first of all."""
        if fresh or not self.looked:
            self.looked = True
            news, self._news = self._news, asyncio.Event()
            news.set()

    def _read(self) -> tuple[dict[Key, ElasticJob], list[Row]]:
        """In a thread: only one looks at a time. Of a thousand jobs most are as they were, and most have ended."""
        manifests, now = self._list_jobs(), time.time()
        before, self._known = self._known, {}
        for manifest in manifests:
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
