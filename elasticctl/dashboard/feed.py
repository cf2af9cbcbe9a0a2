"""Polls the cluster once for all viewers, at a limited rate, and not at all without viewers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from elasticctl.api.errors import ElasticctlError, ForbiddenError
from elasticctl.api.quota import JobSlots, job_usage, usage_by_job
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Cluster, Manifest
from elasticctl.dashboard.page_data import Projects, Row, job_row, projects_data

T = TypeVar("T")


async def run_in_thread(call: Callable[[], T]) -> T:
    """Run `call` in a thread of its own and return or raise what it does; if cancelled, abandon the thread."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on it can be abandoned, but not cancelled

    def run() -> None:
        try:
            result = call()
        except BaseException as e:  # noqa: BLE001 - raised where the result is awaited
            outcome.set_exception(e)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name="dashboard-call", daemon=True).start()
    return await asyncio.wrap_future(outcome)


MAX_GONE = 1_000
"""How many deletions are remembered; a viewer that missed more is sent everything."""


@dataclass(frozen=True, slots=True)
class Update:
    """What is new up to `version`; `whole` is True if `rows` are all rows, False if only those that changed."""

    version: int
    whole: bool
    rows: tuple[Row, ...]
    gone: tuple[str, ...] = ()


class VersionedRows:
    """Rows by uid. `version` grows by one whenever something changes."""

    def __init__(self) -> None:
        self.version = 0
        self._rows: dict[str, Row] = {}
        self._changed: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        self._complete_since = 0

    def replace(self, rows: Iterable[Row]) -> bool:
        """Set the current rows; True if anything changed."""
        now = {row["uid"]: row for row in rows}
        changed = [uid for uid, row in now.items() if self._rows.get(uid) != row]
        gone = self._rows.keys() - now.keys()
        if not changed and not gone:
            return False
        self.version += 1
        for uid in gone:
            self._changed.pop(uid)
            self._gone[uid] = self.version
        for uid in changed:
            self._gone.pop(uid, None)
            self._changed[uid] = self.version
        for uid in list(self._gone)[: max(0, len(self._gone) - MAX_GONE)]:
            self._complete_since = max(self._complete_since, self._gone.pop(uid))
        self._rows = now
        return True

    def since(self, version: int | None) -> Update:
        """What is new for a viewer that has seen `version` (None: nothing yet)."""
        if version is None or not self._complete_since <= version <= self.version:
            return Update(self.version, True, tuple(self._rows.values()))
        rows = tuple(self._rows[uid] for uid, at in self._changed.items() if at > version)
        return Update(self.version, False, rows, tuple(uid for uid, at in self._gone.items() if at > version))


EVERY_S = 10.0
REST_FACTOR = 9.0
"""After a poll, wait this many times as long as it took: the cluster has other things to do."""

NO_QUOTAS = "Your credentials may not list quotas, so guarantees and limits are not shown."
OWN_ONLY = "Your credentials may not list the jobs of other namespaces: only what those of {} hold is shown."
FROM_BEFORE = "{} What is shown of other projects may be out of date."


class ProjectPoller:
    """Reads quotas and the jobs of other projects. `namespace` is the page's own (None: all). Not thread-safe."""

    def __init__(self, cluster: Cluster, namespace: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._namespace, self._clock = cluster, namespace, clock
        self._quotas: list[Manifest] = []
        self._others: list[JobSlots] = []
        self._own: list[JobSlots] | None = None
        self._known: dict[str, tuple[str, JobSlots | None]] = {}
        self._notes: list[str] = []
        self._all_seen, self._due_at, self._rests_until = True, 0.0, 0.0

    def poll(self, jobs: Iterable[ElasticJob]) -> Projects:
        """Return what the page shows; `jobs` are the page's own, just read. Never raises.

        The cluster is queried at intervals, and immediately if the usage of these jobs has changed.
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

    def _ask(self, own: list[JobSlots]) -> None:
        notes = []
        try:
            self._quotas = self._cluster.list_quotas()
        except ForbiddenError:
            self._quotas = []
            notes.append(NO_QUOTAS)
        others: list[JobSlots] = []
        self._all_seen = True
        if self._namespace is not None and (own or self._quotas):
            try:
                others = self._held_elsewhere(self._cluster.list_jobs(None))
            except ForbiddenError:
                self._all_seen = False
                notes.append(OWN_ONLY.format(self._namespace))
        self._others, self._notes = others, notes

    def _held_elsewhere(self, manifests: Iterable[Manifest]) -> list[JobSlots]:
        """The usage of other namespaces' jobs; unchanged jobs are not decoded again."""
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
"""At most this share of the time a request takes: a slow cluster is polled less often. Decoding does not count."""
MAX_PAUSE_S = 60.0

Key = tuple[str, str]
"""Namespace and name."""


class JobFeed:
    """The jobs as last listed; `trouble` is why they cannot be listed now, or "".

    `projects` is what `poll_projects` returns for these jobs; None before the first time. `polled` is True after the
    first poll. Use it on one event loop.
    """

    def __init__(
        self,
        list_jobs: Callable[[], list[Manifest]],
        poll_projects: Callable[[Iterable[ElasticJob]], Projects],
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list_jobs, self._poll_projects, self._poll_s, self._clock = list_jobs, poll_projects, poll_s, clock
        self.rows, self.trouble, self.polled = VersionedRows(), "", False
        self.projects: Projects | None = None
        self._jobs: dict[Key, ElasticJob] = {}
        self._known: dict[str, tuple[str, ElasticJob, Row]] = {}
        self._project_poll: asyncio.Task[None] | None = None
        self._viewers, self._asked_s = 0, 0.0
        self._has_viewers, self._change, self._poll_soon = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Poll the cluster while this is open."""
        if not self._viewers:
            self.poll_now()
        self._viewers += 1
        self._has_viewers.set()
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._has_viewers.clear()

    @property
    def viewers(self) -> int:
        """How many viewers there are."""
        return self._viewers

    def job(self, key: Key) -> ElasticJob | None:
        """A job as it was last seen."""
        return self._jobs.get(key)

    def poll_now(self) -> None:
        """Poll again immediately: something has changed."""
        self._poll_soon.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until anything changes, or until the timeout."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._change.wait(), timeout_s)

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            while True:
                await self._has_viewers.wait()
                self._poll_soon.clear()
                await self._poll()
                pause_s = min(max(self._poll_s, self._asked_s * (1 / SHARE - 1)), MAX_PAUSE_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._poll_soon.wait(), pause_s)
        finally:
            if self._project_poll is not None:
                self._project_poll.cancel()

    async def _poll(self) -> None:
        try:
            jobs, rows = await run_in_thread(self._read)
        except ElasticctlError as e:
            fresh, self.trouble = str(e) != self.trouble, str(e)
            if isinstance(e, ForbiddenError):  # a user who may no longer list them must not see their last state
                self._jobs, self._known = {}, {}
                self.rows.replace(())
            self._notify(fresh)
            return
        fresh, self.trouble, self._jobs = bool(self.trouble), "", jobs
        self._notify(self.rows.replace(rows) or fresh)
        if self._project_poll is None or self._project_poll.done():
            if self._project_poll is not None:
                self._project_poll.result()  # raises only if we have a bug
            self._project_poll = asyncio.create_task(self._poll_projects_in_background(list(jobs.values())))

    async def _poll_projects_in_background(self, jobs: list[ElasticJob]) -> None:
        """Poll projects separately: it may take far longer than the jobs."""
        found = await run_in_thread(lambda: self._poll_projects(jobs))
        if found != self.projects:
            self.projects = found
            self._notify(True)

    def _notify(self, fresh: bool) -> None:
        """Wake up the viewers if anything changed, or after the first poll."""
        if fresh or not self.polled:
            self.polled = True
            change, self._change = self._change, asyncio.Event()
            change.set()

    def _read(self) -> tuple[dict[Key, ElasticJob], list[Row]]:
        """List the jobs, in a thread, one at a time; unchanged jobs are not decoded again."""
        began = self._clock()
        try:
            manifests = self._list_jobs()
        finally:
            self._asked_s = self._clock() - began
        now = time.time()
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
        return jobs, [item for _, _, item in self._known.values()]
