"""`Cluster`: what a person does with a place that runs jobs, whichever place it is.

Two implementations, one contract test (tests/support/cluster_contract): `LocalCluster` and `KubeCluster`.
Objects are Kubernetes JSON (`Manifest`), because that is what both speak. Every method may raise `UnreachableError`;
methods that take a job's name raise `NotFoundError` when it is not there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from elasticctl.api.codec import Manifest as Manifest

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
import re

from elasticctl.api.errors import UsageError
from elasticctl.api.text import shown


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which log lines are wanted; `workers` empty: all. `since` is seconds since the epoch, `tail` lines per worker.

    Of each worker that is its newest incarnation; with `previous` the earlier ones, with `everything` all of them.
    """

    follow: bool = False
    workers: tuple[str, ...] = ()
    tail: int | None = None
    since: float | None = None
    previous: bool = False
    everything: bool = False


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line a worker printed, without its newline; `at` is seconds since the epoch, UTC."""

    worker: str
    at: float
    text: str


class Cluster(Protocol):
    """Jobs, their workers, their logs."""

    def create_job(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Store a new ElasticJob and return it as stored; ConflictError when the name is taken."""

    def get_job(self, namespace: str, name: str) -> Manifest:
        """Return one job."""

    def list_jobs(self, namespace: str | None) -> list[Manifest]:
        """Return all jobs of a namespace (None: of all), oldest first."""

    def patch_job(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """Apply a JSON merge patch (RFC 7386) to metadata and spec and return the result.

        A `metadata.resourceVersion` in the patch makes it conditional: ConflictError when the job has changed since.
        """

    def delete_job(self, namespace: str, name: str) -> None:
        """Delete a job, its workers and its logs; returns when the request is stored, not when they are gone."""

    def list_quotas(self) -> list[Manifest]:
        """Return the ElasticQuotas of all projects, by name; none where the cluster knows no such thing."""

    def put_quota(self, manifest: Manifest) -> Manifest:
        """Store a project's ElasticQuota in place of the one it has, if any; SpecError when it cannot be one."""

    def delete_quota(self, project: str) -> None:
        """Remove a project's ElasticQuota; NotFoundError when it has none."""

    def list_pods(self, namespace: str, job: str) -> list[Manifest]:
        """Return the pods of a job, in order of index."""

    def pods_of(self, jobs: Sequence[ElasticJob]) -> dict[str, list[Manifest]]:
        """Return uid -> pods, in order of index, of jobs that have just been read; none where one is gone since."""

    def evict_pod(self, namespace: str, name: str, *, grace_s: float) -> None:
        """Take a worker away as a reclaimed machine does; its job makes another.

        It gets SIGTERM and, after `grace_s` seconds, SIGKILL; with 0 SIGKILL at once. Returns when the request is
        stored. NotFoundError when there is no such pod, ConflictError when it has ended.
        """

    def list_events(self, namespace: str, job: str) -> list[Manifest]:
        """Return the events of a job and its pods, oldest first."""

    def logs(self, namespace: str, job: str, query: LogQuery) -> Iterator[LogLine]:
        """Yield the lines of a job's workers, in order for each worker.

        Where the cluster no longer has what a worker said, but the job's storage does, it is read from there. With
        `follow`, waits for workers that are still to come, re-created and newly scaled ones, and ends when the
        job has ended and all is said.
        """


def pod_order(pod: Manifest) -> tuple[int, str]:
    """A key by which pods are in order of their workers' indices."""
    from elasticctl.api.spec import LABEL_INDEX  # not for those who only list jobs

    text = pod["metadata"].get("labels", {}).get(LABEL_INDEX, "")
    return (int(text) if text.isascii() and text.isdigit() else 0, pod["metadata"]["name"])


def is_owned(pod: Manifest, job_uid: str) -> bool:
    """True when this very job made the pod, not one of the same name before it."""
    return any(owner.get("uid") == job_uid for owner in pod["metadata"].get("ownerReferences", []))


def say_on_stderr(line: str) -> None:
    """Where talk goes, unless somebody wants it elsewhere."""
    sys.stderr.write(line + "\n")


_SECRET_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,200}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class SecretInfo:
    """A secret without its values; `made_at` in seconds since the epoch, None where that is not known."""

    name: str
    keys: tuple[str, ...]
    made_at: float | None


def is_secret_name(name: str) -> bool:
    """Can a secret be called so? As a DNS name, which is what Kubernetes asks for."""
    return _SECRET_NAME.fullmatch(name) is not None


def check_secret_name(name: str) -> None:
    """Raise UsageError for what no secret can be called."""
    if not is_secret_name(name):
        raise UsageError(f"{shown(name)} is no name of a secret: use lower-case letters, digits, '-' and '.'")


class SecretStore(Protocol):
    """The secrets of one place. Every method may raise ClusterError; none shows a value."""

    def merge(self, namespace: str, name: str, values: Mapping[str, str]) -> None:
        """Set these keys; other keys of the secret stay. Makes it where there is none."""

    def delete(self, namespace: str, name: str) -> None:
        """Remove it; NotFoundError when it is not there."""

    def list(self, namespace: str) -> list[SecretInfo]:
        """Those that `merge` has made or changed, by name."""
