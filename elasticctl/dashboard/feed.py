"""Looks at the cluster once for all who watch, at a calm rate, and not at all while nobody does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

from elasticctl.api.errors import ElasticctlError, ForbiddenError
from elasticctl.api.quota import JobUsage, job_usage, usage_by_job
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Cluster, Manifest
from elasticctl.dashboard.page_data import Projects, Row, VersionedRows, job_row, projects_data

T = TypeVar("T")


async def run_in_thread(call: Callable[[], T]) -> T:
    """Run `call` in a thread of its own, and return or raise what it does; left alone when this is cancelled."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on it can be left alone, but not be cancelled

    def run() -> None:
        try:
            result = call()
        except BaseException as e:  # noqa: BLE001 - handed over to who waits
            outcome.set_exception(e)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name="dashboard-call", daemon=True).start()
    return await asyncio.wrap_future(outcome)


EVERY_S = 10.0
REST_FACTOR = 9.0
"""What takes long is not asked again before so many times as long: the cluster has other things to do."""

NO_QUOTAS = "Your credentials may not list quotas: what is guaranteed, and limits, are not shown."
OWN_ONLY = "Your credentials may not list the jobs of other namespaces: only what those of {} hold is shown."
FROM_BEFORE = "{} What is shown of other projects is from before."


class ProjectPoller:
    """Asks `cluster`; `namespace` is the page's own, None: all of them. One thread at a time may use it."""

    def __init__(self, cluster: Cluster, namespace: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._namespace, self._clock = cluster, namespace, clock
        self._quotas: list[Manifest] = []
        self._others: list[JobUsage] = []
        self._own: list[JobUsage] | None = None
        self._known: dict[str, tuple[str, JobUsage | None]] = {}
        self._notes: list[str] = []
        self._all_seen, self._due_at, self._rests_until = True, 0.0, 0.0

    def look(self, jobs: Iterable[ElasticJob]) -> Projects:
        """What is to be shown; `jobs` are those of the page, as they have just been read. Never raises.

        The cluster is asked when it is time to, and at once when what these jobs hold has changed.
        """
        own, began = usage_by_job(jobs), self._clock()
        if began >= self._due_at or (own != self._own and began >= self._rests_until):
            self._own = own
            try:
                self._ask(own)
            except ElasticctlError as e:
                self._notes = [FROM_BEFORE.format(e)]
            ended = self._clock()
            self._rests_until = ended + REST_FACTOR * (ended - began)
            self._due_at = max(began + EVERY_S, self._rests_until)
        held = sorted([*own, *self._others], key=lambda item: (item.project, item.pool, item.job))
        return projects_data(self._quotas, held, self._notes, all_seen=self._all_seen)

    def _ask(self, own: list[JobUsage]) -> None:
        notes = []
        try:
            self._quotas = self._cluster.list_quotas()
        except ForbiddenError:
            self._quotas = []
            notes.append(NO_QUOTAS)
        others: list[JobUsage] = []
        self._all_seen = True
        if self._namespace is not None and (own or self._quotas):
            try:
                others = self._held_elsewhere(self._cluster.list_jobs(None))
            except ForbiddenError:
                self._all_seen = False
                notes.append(OWN_ONLY.format(self._namespace))
        self._others, self._notes = others, notes

    def _held_elsewhere(self, manifests: Iterable[Manifest]) -> list[JobUsage]:
        """Of a thousand jobs most are as they were: those are not read again."""
        before, self._known = self._known, {}
        for manifest in manifests:
            metadata = manifest["metadata"]
            if metadata.get("namespace") == self._namespace:
                continue
            uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
            known = before.get(uid)
            if known is None or known[0] != version:
                known = version, job_usage(ElasticJob.from_manifest(manifest))
            self._known[uid] = known
        return [held for _, held in self._known.values() if held is not None]


POLL_S = 2.0
SHARE = 0.1
"""At most this share of the time is spent asking: a large cluster is asked less often."""
MAX_PAUSE_S = 60.0

Key = tuple[str, str]
"""Namespace and name."""


class JobFeed:
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
        self.board, self.trouble, self.looked = VersionedRows(), "", False
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
            jobs, rows = await run_in_thread(self._read)
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
        found = await run_in_thread(lambda: self._survey(jobs))
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
                known = version, job, job_row(job, now)
            elif not known[1].status.phase.terminal:
                known = version, known[1], job_row(known[1], now)
            self._known[uid] = known
        jobs = {(job.namespace, job.name): job for _, job, _ in self._known.values()}
        return jobs, [told for _, _, told in self._known.values()]
