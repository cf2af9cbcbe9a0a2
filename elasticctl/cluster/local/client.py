"""`LocalCluster`: the embedded cluster as the command line sees it. Starts the supervisor if it does not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from elasticctl.api.codec import to_json
from elasticctl.api.errors import NotFoundError, UnreachableError
from elasticctl.cluster.base import LogLine, LogQuery, Manifest, is_owned, pod_order, say_on_stderr
from elasticctl.cluster.local.logs import LogFiles, read_logs
from elasticctl.cluster.local.paths import LocalPaths, local_paths
from elasticctl.cluster.local.supervisor_client import (
    SHARING_PATH,
    NotSentError,
    ensure_supervisor,
    eviction_path,
    jobs_path,
    quotas_path,
    request,
)

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.local.capacity import LocalSharing

_REPEATABLE = ("GET", "PATCH", "PUT")
"""Harmless when done twice: a merge patch gives the same result, or is refused because the version has changed."""


class LocalCluster:
    """`elasticctl.cluster.base.Cluster` over the supervisor's socket; `say` prints the occasional message.

    With `starts` False, a supervisor that does not run is not started: UnreachableError. A client that polls must not
    restart what a user has stopped.
    """

    def __init__(
        self, paths: LocalPaths | None = None, say: Callable[[str], None] = say_on_stderr, *, starts: bool = True
    ) -> None:
        self.paths = paths or local_paths()
        self._say, self._starts = say, starts
        self._checked = False

    def create_job(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Store a new job; SpecError when it is invalid or requests more GPUs than this machine has."""
        namespace = _namespace_of(manifest)
        path = jobs_path(namespace) + ("?dryRun=All" if dry_run else "")
        return self._object("POST", path, manifest)

    def get_job(self, namespace: str, name: str) -> Manifest:
        """Return one job."""
        return self._object("GET", jobs_path(namespace, name))

    def list_jobs(self, namespace: str | None) -> list[Manifest]:
        """Return the jobs of a namespace (None: of all), oldest first."""
        return self._items("/v1/jobs" if namespace is None else jobs_path(namespace))

    def patch_job(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """Apply a JSON merge patch to metadata and spec and return the result."""
        return self._object("PATCH", jobs_path(namespace, name), patch)

    def delete_job(self, namespace: str, name: str) -> None:
        """Delete a job; its workers and logs follow."""
        self._call("DELETE", jobs_path(namespace, name))

    def list_quotas(self) -> list[Manifest]:
        """Return the ElasticQuotas of all projects, by name."""
        return self._items(quotas_path())

    def put_quota(self, manifest: Manifest) -> Manifest:
        """Store a project's ElasticQuota in place of the one it has; SpecError when it is invalid."""
        name = str(manifest.get("metadata", {}).get("name", ""))
        return self._object("PUT", quotas_path(name), manifest)

    def delete_quota(self, project: str) -> None:
        """Remove a project's ElasticQuota; NotFoundError when it has none."""
        self._call("DELETE", quotas_path(project))

    def sharing(self) -> LocalSharing:
        """Return how this machine is shared."""
        from elasticctl.cluster.local.capacity import LocalSharing  # few verbs need it, and all have to start fast

        return LocalSharing.from_manifest({"spec": self._object("GET", SHARING_PATH)})

    def set_sharing(self, wanted: LocalSharing) -> LocalSharing:
        """Change how this machine is shared, and return it; SpecError when it is invalid."""
        from elasticctl.cluster.local.capacity import LocalSharing

        return LocalSharing.from_manifest({"spec": self._object("PUT", SHARING_PATH, to_json(wanted))})

    def list_pods(self, namespace: str, job: str) -> list[Manifest]:
        """Return the pods of a job, in order of index."""
        return sorted(self._items(jobs_path(namespace, job, "pods")), key=pod_order)

    def pods_of(self, jobs: Sequence[ElasticJob]) -> dict[str, list[Manifest]]:
        """Return uid -> pods, in order of index, of jobs that have just been read; none where one is gone since."""
        found: dict[str, list[Manifest]] = {job.uid: [] for job in jobs}
        for job in jobs:
            with suppress(NotFoundError):
                found[job.uid] = [pod for pod in self.list_pods(job.namespace, job.name) if is_owned(pod, job.uid)]
        return found

    def evict_pod(self, namespace: str, name: str, *, grace_s: float) -> None:
        """Evict a worker, with `grace_s` seconds of notice; see `Cluster.evict_pod`."""
        self._call("POST", eviction_path(namespace, name), {"graceSeconds": grace_s})

    def list_events(self, namespace: str, job: str) -> list[Manifest]:
        """Return the events of a job and its pods, oldest first."""
        return self._items(jobs_path(namespace, job, "events"))

    @contextmanager
    def watch_events(self, namespace: str) -> Iterator[Callable[[ElasticJob], list[Manifest]]]:
        """See `Cluster.watch_events`: the supervisor is asked for those of the job alone, over a socket."""
        yield lambda job: self.list_events(namespace, job.name)

    def list_budgets(self, namespace: str) -> list[Manifest]:
        """Return none: this machine is never drained."""
        return []

    def list_node_claims(self) -> None:
        """Return None: there is one machine, and nothing adds others."""
        return None

    def logs(self, namespace: str, job: str, query: LogQuery) -> Iterator[LogLine]:
        """Yield the lines of a job's workers; see `Cluster.logs`."""
        from elasticctl.api.spec import ElasticJob
        from elasticctl.cluster.stored_logs import StoredLogs  # listing jobs must not pay for it

        found = ElasticJob.from_manifest(self.get_job(namespace, job))

        def files() -> LogFiles:
            answer = self._object("GET", jobs_path(namespace, job, "logs"))
            if answer.get("jobUid", found.uid) != found.uid:  # an older supervisor does not say
                raise NotFoundError(f"the job {job} was deleted, and another job now has its name")
            return LogFiles.from_json(answer)

        stored = StoredLogs(found, self._say)
        return stored.failing_if_none(read_logs(files(), files, self.paths.log_file, query, stored))

    def _items(self, path: str) -> list[Manifest]:
        items: list[Manifest] = self._object("GET", path)["items"]
        return items

    def _object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = self._call(method, path, body)
        return answer

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if not self._starts:
            return self._call_if_there(method, path, body)
        if not self._checked:
            ensure_supervisor(self.paths, self._say)
            self._checked = True
        try:
            return request(self.paths.api_socket, method, path, body)
        except NotSentError:
            pass
        except UnreachableError:
            if method not in _REPEATABLE:
                raise
        ensure_supervisor(self.paths, self._say)
        return request(self.paths.api_socket, method, path, body)

    def _call_if_there(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            return request(self.paths.api_socket, method, path, body)
        except NotSentError as e:
            message = "the local cluster is not running. Next: elasticctl submit train.py starts it"
            raise UnreachableError(message) from e


def _namespace_of(manifest: Mapping[str, Any]) -> str:
    metadata = manifest.get("metadata")
    namespace = metadata.get("namespace") if isinstance(metadata, dict) else None
    return namespace if isinstance(namespace, str) and namespace else "default"
