"""The cluster and the namespace that an operation works in, and the jobs there, which it finds and polls."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from elasticctl.api.errors import BusyError, ConflictError, NotFoundError, UnreachableError, UsageError
from elasticctl.api.objects import at
from elasticctl.api.text import did_you_mean, join_or, quote, span
from elasticctl.cluster import connect
from elasticctl.cluster.base import Cluster, Manifest
from elasticctl.operations.observer import SILENT, Observer
from elasticctl.settings.contexts import Context, check_namespace, user_config

_WORKER = re.compile(r"(?P<job>.+)-worker-(?P<number>[0-9]+)")
_ATTEMPTS = 5
_LIVE = ("Pending", "Running", "Unknown")
ENDED = ("Succeeded", "Failed", "Cancelled")
"""The phases of jobs that are over, as they are written; most verbs need no more of `elasticctl.api.status`."""


@dataclass(frozen=True, slots=True)
class Target:
    """A cluster and a namespace in it; `observer` receives what operations report there."""

    context: Context
    namespace: str
    cluster: Cluster
    observer: Observer = SILENT

    def find(self, name: str, *, whole: bool = False) -> Manifest:
        """The job called `name` or, unless the name must be `whole`, the only one with this prefix.

        Reports if a shortened name means a job that has ended. Raises NotFoundError if there is no such job.
        """
        try:
            return self.cluster.get_job(self.namespace, name)
        except NotFoundError:
            jobs = {job["metadata"]["name"]: job for job in self.cluster.list_jobs(self.namespace)}
        names = list(jobs)
        fitting = [known for known in names if known.startswith(name)]
        if len(fitting) == 1 and not whole:
            phase = phase_of(jobs[fitting[0]])
            if phase in ENDED:
                self.observer.report(f"{quote(name)} is short for {fitting[0]}, which has ended ({phase})")
            return self.cluster.get_job(self.namespace, fitting[0])
        place = f"in context {self.context.name}, namespace {self.namespace}"
        if fitting and whole:
            raise NotFoundError(
                f"no job {quote(name)} {place}. FIX: give a whole name, since this cannot be undone: {join_or(fitting)}"
            )
        if fitting:
            raise NotFoundError(f"{quote(name)} matches several jobs {place}: {', '.join(fitting)}")
        of_worker = _WORKER.fullmatch(name)
        if of_worker is not None and of_worker["job"] in jobs:
            job, number = of_worker.groups()
            raise NotFoundError(
                f"no job {quote(name)} {place}."
                f" FIX: give the worker's job, {job}, and --worker {number} where a verb takes it"
            )
        raise NotFoundError(
            f"no job {quote(name)} {place}{did_you_mean(name, names)}. FIX: list the jobs with `elasticctl list`"
        )

    def reread(self, job: Manifest) -> Manifest:
        """This very job as it is now. Raises NotFoundError once it is gone, even if another one has its name."""
        metadata = job["metadata"]
        name = metadata["name"]
        found = self.cluster.get_job(self.namespace, name)
        if found["metadata"].get("uid") != metadata.get("uid"):
            raise NotFoundError(
                f"the job {name} was deleted, and another job now has its name. Next: elasticctl status {name}"
            )
        return found

    def change(self, job: Manifest, patch_of: Callable[[Manifest], dict[str, Any] | None]) -> tuple[Manifest, Manifest]:
        """Patch this very job, again if it or its status was changed in between; returns it before and after.

        `patch_of` makes the merge patch from the job as it is; None: no change. Raises ConflictError if others keep
        changing it.
        """
        name = job["metadata"]["name"]
        for attempt in range(_ATTEMPTS):
            manifest = self.reread(job)
            patch = patch_of(manifest)
            if patch is None:
                return manifest, manifest
            version = manifest["metadata"].get("resourceVersion", "")
            patch["metadata"] = {**patch.get("metadata", {}), "resourceVersion": version}
            try:
                return manifest, self.cluster.patch_job(self.namespace, name, patch)
            except ConflictError:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")


def live_pods(cluster: Cluster, namespace: str, job: str) -> list[Manifest]:
    """The pods of a job that have not ended."""
    return [pod for pod in cluster.list_pods(namespace, job) if at(pod, "status", "phase") in _LIVE]


def phase_of(job: Manifest) -> str:
    """The phase of a job; Pending before the controller has seen it."""
    return str((job.get("status") or {}).get("phase") or "Pending")


def locate(context: str = "", namespace: str = "") -> tuple[Context, str]:
    """The context of this name, or the current one, and the namespace, or the context's own."""
    found = user_config().context(context)
    return found, check_namespace(namespace or found.namespace)


def reach(context: str = "", namespace: str = "", observer: Observer = SILENT) -> Target:
    """The cluster of a context, without connecting to it yet."""
    found, where = locate(context, namespace)
    return Target(found, where, connect(found), observer)


def full_worker_name(job: str, wanted: str) -> str:
    """`job-worker-2` for itself, `worker-2` or `2`. Raises UsageError for anything else."""
    from elasticctl.api.spec import worker_name  # not for --help and completion

    index = wanted.removeprefix(f"{job}-").removeprefix("worker-")
    if not (index.isascii() and index.isdigit()):
        raise UsageError(
            f"{quote(wanted)} is not the name of a worker. FIX: give {worker_name(job, 0)} or 0, for example"
        )
    return worker_name(job, int(index))


PATIENCE_S = 600.0
"""How long a command that waits unattended tolerates silence: an API server may be away for minutes while it is
upgraded."""
_SHARE_OF_TIME = 0.2
"""A cluster that is slow to answer is asked less often: answers are waited for in no more of the time than this."""

T = TypeVar("T")


@dataclass(slots=True)
class Poller(Generic[T]):
    """Repeats a query; while the cluster does not answer, the last answer stands.

    `until` is a time on the monotonic clock at which the last pause ends, `patience_s` how long the cluster may fail
    to answer. `observer` learns once when that begins; `trouble` says since when, or is "" while all is well.
    """

    question: Callable[[], T]
    every_s: float
    until: float = math.inf
    patience_s: float = math.inf
    observer: Observer = SILENT
    trouble: str = ""

    def each(self) -> Iterator[T]:
        """Yield answers without end. The first query must be answered; later ones may fail for a while."""
        asked_at = time.monotonic()
        last = self.question()
        heard_at = time.monotonic()
        while True:
            took_s = time.monotonic() - asked_at
            yield last
            time.sleep(self._pause_s(took_s))
            asked_at = time.monotonic()
            try:
                last = self.question()
                self.trouble, heard_at = "", time.monotonic()
            except (UnreachableError, BusyError) as e:
                silent_s = time.monotonic() - heard_at
                if silent_s > self.patience_s:
                    raise
                if not self.trouble:
                    self.observer.report(f"retrying: {e}")
                self.trouble = f"last answer {span(silent_s)} ago, retrying: {e}"

    def _pause_s(self, took_s: float) -> float:
        wanted_s = max(self.every_s, took_s * (1 / _SHARE_OF_TIME - 1))
        return max(0.0, min(wanted_s, self.until - time.monotonic()))
