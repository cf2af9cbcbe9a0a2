"""The output of a job's workers, one page at a time."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

from elasticctl.api.errors import UsageError
from elasticctl.api.observed.workers import known_workers, rank_prefix, worker_of_rank
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Cluster, LogLine, LogQuery

MAX_LINES = 1000
MAX_TEXT = 4000
MAX_SOUGHT = 200
MAX_SKIPPED = 20_000
"""More lines than this of one moment are not kept apart: they are held in memory, perhaps for many people."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,20}[@-~]")


@dataclass(frozen=True, slots=True)
class Page:
    """Which lines: of `worker` ("": all) or of `rank`, with the text `find`, from `since` to `until`, in seconds since
    the epoch.

    Without `since` the newest; with `until` the last ones up to it, else the first ones. `skip` lines of that moment
    are known already: many lines may have the same time.
    """

    worker: str = ""
    find: str = ""
    since: float | None = None
    until: float | None = None
    everything: bool = False
    rank: int | None = None
    skip: int = 0

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Page:
        """Parse the query of a URL. Raises UsageError."""
        try:
            since, until = (float(query[name]) if name in query else None for name in ("since", "until"))
            rank, skip = int(query["rank"]) if "rank" in query else None, int(query.get("skip", 0))
        except ValueError as e:
            raise UsageError(f"not a time, a rank or a number: {e}") from e
        if not all(math.isfinite(moment) for moment in (since, until) if moment is not None):
            raise UsageError("since, until: must be finite numbers of seconds")
        if not 0 <= skip <= MAX_SKIPPED:
            raise UsageError(f"skip: must be between 0 and {MAX_SKIPPED}")
        find = query.get("find", "")[:MAX_SOUGHT].casefold()
        return cls(query.get("worker", ""), find, since, until, query.get("all", "") == "1", rank, skip)

    def read(self, cluster: Cluster, job: ElasticJob) -> dict[str, Any]:
        """The lines, in chronological order; `more`: there are others. Blocks. Raises ClusterError, NotFoundError."""
        worker = self.worker if self.rank is None else worker_of_rank(job, self.rank)
        if worker and worker not in known_workers(job):
            raise UsageError(f"{job.name} has no such worker")
        only_newest = self.since is None and not self.find
        each = 1 if self.rank is None else hardware(job).ranks_per_worker
        query = LogQuery(
            workers=(worker,) if worker else (),
            tail=MAX_LINES * each if only_newest else None,
            since=self.since,
            everything=self.everything,
        )
        prefix = "" if self.rank is None else rank_prefix(job, self.rank)
        lines = self._wanted(cluster.logs(job.namespace, job.name, query), prefix)
        if self.since is None or self.until is not None:
            last = list(deque(lines, maxlen=MAX_LINES + 1 + self.skip))
            kept = last[: len(last) - self.skip] if self.skip else last
            more, shown = len(kept) > MAX_LINES, kept[-MAX_LINES:]
        else:
            first = list(islice(lines, self.skip, self.skip + MAX_LINES + 1))
            more, shown = len(first) > MAX_LINES, first[:MAX_LINES]
        return {"lines": [[line.worker, line.at, line.text] for line in shown], "more": more}

    def _wanted(self, lines: Iterable[LogLine], prefix: str) -> Iterator[LogLine]:
        since, until, find = self.since, self.until, self.find
        if since is not None:  # which a cluster may know by the second only
            lines = (line for line in lines if line.at >= since)
        if until is not None:
            lines = takewhile(lambda line: line.at <= until, lines)
        if prefix:
            lines = (line for line in lines if line.text.startswith(prefix))
        if find:
            lines = (line for line in lines if find in _plain(line.text))
        return (replace(line, text=line.text[:MAX_TEXT]) if len(line.text) > MAX_TEXT else line for line in lines)


def _plain(text: str) -> str:
    """The line as it is searched: in lower case, without control sequences, which most lines do not have."""
    return (_ESCAPES.sub("", text) if "\x1b" in text else text).casefold()
