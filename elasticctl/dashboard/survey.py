"""Finds out who holds what of a cluster that is shared, for a page that may show one namespace of it only.

Quotas, and the jobs of other namespaces, are asked for seldom, and the latter only where something is shared at all.
Who may not see them is shown the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from elasticctl.cluster.base import Cluster, Manifest
from elasticctl.dashboard.projects import Projects, projects
from elasticctl.errors import ElasticctlError, ForbiddenError
from elasticctl.holdings import Held, held_by, held_of
from elasticctl.spec import ElasticJob

EVERY_S = 10.0
REST_FACTOR = 9.0
"""What takes long is not asked again before so many times as long: the cluster has other things to do."""

NO_QUOTAS = "Your credentials may not list quotas: what is guaranteed, and limits, are not shown."
OWN_ONLY = "Your credentials may not list the jobs of other namespaces: only what those of {} hold is shown."
FROM_BEFORE = "{} What is shown of other projects is from before."


class Survey:
    """Asks `cluster`; `namespace` is the page's own, None: all of them. One thread at a time may use it."""

    def __init__(self, cluster: Cluster, namespace: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._namespace, self._clock = cluster, namespace, clock
        self._quotas: list[Manifest] = []
        self._others: list[Held] = []
        self._own: list[Held] | None = None
        self._known: dict[str, tuple[str, Held | None]] = {}
        self._notes: list[str] = []
        self._all_seen, self._due_at, self._rests_until = True, 0.0, 0.0

    def look(self, jobs: Iterable[ElasticJob]) -> Projects:
        """What is to be shown; `jobs` are those of the page, as they have just been read. Never raises.

        The cluster is asked when it is time to, and at once when what these jobs hold has changed.
        """
        own, began = held_by(jobs), self._clock()
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
        return projects(self._quotas, held, self._notes, all_seen=self._all_seen)

    def _ask(self, own: list[Held]) -> None:
        notes = []
        try:
            self._quotas = self._cluster.list_quotas()
        except ForbiddenError:
            self._quotas = []
            notes.append(NO_QUOTAS)
        others: list[Held] = []
        self._all_seen = True
        if self._namespace is not None and (own or self._quotas):
            try:
                others = self._held_elsewhere(self._cluster.list_jobs(None))
            except ForbiddenError:
                self._all_seen = False
                notes.append(OWN_ONLY.format(self._namespace))
        self._others, self._notes = others, notes

    def _held_elsewhere(self, manifests: Iterable[Manifest]) -> list[Held]:
        """Of a thousand jobs most are as they were: those are not read again."""
        before, self._known = self._known, {}
        for manifest in manifests:
            metadata = manifest["metadata"]
            if metadata.get("namespace") == self._namespace:
                continue
            uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
            known = before.get(uid)
            if known is None or known[0] != version:
                known = version, held_of(ElasticJob.from_manifest(manifest))
            self._known[uid] = known
        return [held for _, held in self._known.values() if held is not None]
