"""What a job's workers print, a page at a time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from elasticctl.api.errors import UsageError
from elasticctl.api.observed.workers import known_workers
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Cluster, LogLine, LogQuery

MAX_LINES = 1000
MAX_TEXT = 4000
MAX_SOUGHT = 200
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,20}[@-~]")


@dataclass(frozen=True, slots=True)
class Page:
    """Which lines: of `worker` ("": all), with the text `find`, from `since` to `until` (seconds since the epoch).

    Without `since` the newest; with `until` the last ones before it, else the first ones.
    """

    worker: str = ""
    find: str = ""
    since: float | None = None
    until: float | None = None
    everything: bool = False

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Page:
        """From the query of an address. Raises UsageError."""
        try:
            since, until = (float(query[name]) if name in query else None for name in ("since", "until"))
        except ValueError as e:
            raise UsageError(f"not a moment: {e}") from e
        find = query.get("find", "")[:MAX_SOUGHT].casefold()
        return cls(query.get("worker", ""), find, since, until, query.get("all", "") == "1")

    def read(self, cluster: Cluster, job: ElasticJob) -> dict[str, Any]:
        """The lines, in order of time; `more`: there are others beyond. Blocks. Raises ClusterError."""
        if self.worker and self.worker not in known_workers(job):
            raise UsageError(f"{job.name} has no such worker")
        only_newest = self.since is None and not self.find
        query = LogQuery(
            workers=(self.worker,) if self.worker else (),
            tail=MAX_LINES if only_newest else None,
            since=self.since,
            everything=self.everything,
        )
        lines = self._wanted(cluster.logs(job.namespace, job.name, query))
        if self.since is None or self.until is not None:
            kept: Iterable[LogLine] = deque(lines, maxlen=MAX_LINES + 1)
            more, shown = len(list(kept)) > MAX_LINES, list(kept)[-MAX_LINES:]
        else:
            first = list(islice(lines, MAX_LINES + 1))
            more, shown = len(first) > MAX_LINES, first[:MAX_LINES]
        return {"lines": [[line.worker, line.at, line.text[:MAX_TEXT]] for line in shown], "more": more}

    def _wanted(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        since, until, find = self.since, self.until, self.find
        if since is not None:  # which a cluster may know by the second only
            lines = (line for line in lines if line.at >= since)
        if until is not None:
            lines = takewhile(lambda line: line.at <= until, lines)
        if not find:
            return iter(lines)
        return (line for line in lines if find in _ESCAPES.sub("", line.text).casefold())
