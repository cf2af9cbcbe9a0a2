"""`Cluster` and `SecretStore`: what the client does with a place that runs jobs, local or Kubernetes.

Two implementations, one contract test (tests/support/cluster_contract): `LocalCluster` and `KubeCluster`.
Objects are Kubernetes JSON (`Manifest`), because both use it. Every method may raise `UnreachableError`;
methods that take a job's name raise `NotFoundError` when there is no such job.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from elasticctl.api.codec import Manifest as Manifest
from elasticctl.api.errors import UsageError
from elasticctl.api.text import quote, visible

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which log lines to read; `workers` empty: of all. `since` is seconds since the epoch, `tail` lines per worker.

    These are lines of each worker's newest incarnation; with `previous` of the earlier ones, with `everything` of all.
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
        """Delete a job, its workers and its logs; returns once the request is stored, not when they are gone."""

    def list_quotas(self) -> list[Manifest]:
        """Return the ElasticQuotas of all projects, by name; none where the cluster does not define them."""

    def put_quota(self, manifest: Manifest) -> Manifest:
        """Store a project's ElasticQuota in place of the one it has, if any; SpecError when it is invalid."""

    def delete_quota(self, project: str) -> None:
        """Remove a project's ElasticQuota; NotFoundError when it has none."""

    def list_pods(self, namespace: str, job: str) -> list[Manifest]:
        """Return the pods of a job, in order of index."""

    def pods_of(self, jobs: Sequence[ElasticJob]) -> dict[str, list[Manifest]]:
        """Return uid -> pods, in order of index, of jobs that have just been read; no pods for a job that is gone."""

    def evict_pod(self, namespace: str, name: str, *, grace_s: float) -> None:
        """Evict a worker, as when its machine is reclaimed; its job creates another.

        It gets SIGTERM and, after `grace_s` seconds, SIGKILL; with 0, SIGKILL immediately. Returns once the request is
        stored. NotFoundError when there is no such pod, ConflictError when it has ended.
        """

    def list_events(self, namespace: str, job: str) -> list[Manifest]:
        """Return the events of a job and its pods, oldest first."""

    def watch_events(self, namespace: str) -> AbstractContextManager[Callable[[ElasticJob], list[Manifest]]]:
        """Watch the events of a namespace until the block ends.

        Returns a function that returns what `list_events` does of a job that has just been read, and costs the cluster
        next to nothing.
        """

    def list_budgets(self, namespace: str) -> list[Manifest]:
        """Return the PodDisruptionBudgets of a namespace; none if they may not be read."""

    def list_node_claims(self) -> list[Manifest] | None:
        """Return Karpenter's NodeClaims, the nodes requested from it; None without Karpenter or that right."""

    def logs(self, namespace: str, job: str, query: LogQuery) -> Iterator[LogLine]:
        """Yield the lines of a job's workers, in order for each worker.

        Output that the cluster no longer has is read from the job's storage, if it is there. With `follow`, waits for
        workers that will be created, after losses or by scaling, and ends when the job has ended and all lines have
        been read.
        """


def pod_order(pod: Manifest) -> tuple[int, str]:
    """A sort key that orders pods by their workers' indices."""
    from elasticctl.api.spec import LABEL_INDEX  # listing jobs must not pay for it

    text = pod["metadata"].get("labels", {}).get(LABEL_INDEX, "")
    return (int(text) if text.isascii() and text.isdigit() else 0, pod["metadata"]["name"])


def is_owned(pod: Manifest, job_uid: str) -> bool:
    """True when this very job created the pod, not an earlier one of the same name."""
    return any(owner.get("uid") == job_uid for owner in pod["metadata"].get("ownerReferences", []))


def say_on_stderr(line: str) -> None:
    """Print a message for people to stderr."""
    sys.stderr.write(visible(line) + "\n")


_SECRET_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,200}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class SecretInfo:
    """A secret without its values; `made_at` is in seconds since the epoch, None if unknown."""

    name: str
    keys: tuple[str, ...]
    made_at: float | None


def is_secret_name(name: str) -> bool:
    """True for a valid name of a secret: a DNS name, as Kubernetes requires."""
    return _SECRET_NAME.fullmatch(name) is not None


def check_secret_name(name: str) -> None:
    """Raise UsageError for an invalid name of a secret."""
    if not is_secret_name(name):
        raise UsageError(
            f"{quote(name)} is not a valid name of a secret. FIX: use lower-case letters, digits, '-' and '.'"
        )


class SecretStore(Protocol):
    """The secrets of one cluster. Every method may raise ClusterError; none returns a value."""

    def merge(self, namespace: str, name: str, values: Mapping[str, str]) -> None:
        """Set these keys and keep the secret's others; create it if there is none."""

    def delete(self, namespace: str, name: str) -> None:
        """Delete it; NotFoundError when there is none."""

    def list(self, namespace: str) -> list[SecretInfo]:
        """Return the secrets that `merge` has created or changed, by name."""
