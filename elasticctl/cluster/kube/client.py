"""`KubeCluster`: a Kubernetes cluster as the command line sees it, and its secrets for jobs."""

from __future__ import annotations

import base64
import heapq
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from elasticctl.api.codec import from_rfc3339, to_rfc3339
from elasticctl.api.errors import ClusterError, ConflictError, ForbiddenError, NotFoundError
from elasticctl.api.objects import as_text, at
from elasticctl.api.spec import (
    ANNOTATION_PREEMPTED,
    API_VERSION,
    GROUP,
    KIND,
    LABEL_GROUP,
    LABEL_JOB,
    PLURAL,
    ElasticJob,
    worker_name,
)
from elasticctl.api.text import shorten
from elasticctl.cluster.base import (
    LogLine,
    LogQuery,
    Manifest,
    SecretInfo,
    check_secret_name,
    pod_order,
    say_on_stderr,
)
from elasticctl.kubeapi.connection import MAX_STREAMS, MERGE_PATCH, Connection, connect, list_objects, resource_path
from elasticctl.kubeapi.responses import NoSuchApiError
from elasticctl.settings.contexts import Context

LABEL_SECRET = f"{GROUP}/secret"
"""On Secrets that `elasticctl secret` has set; others, such as tokens, are not listed."""
MOST_NAMED = 50
"""A selector that names more jobs makes URLs that proxies and load balancers refuse."""
_SYNC_S = 10.0
"""How long the first list of a watch may take."""
_OF_JOBS = "of-jobs"
_MESSAGE_CHARS = 1024
"""Kubernetes' limit for an event's message."""


class KubeCluster:
    """`elasticctl.cluster.base.Cluster` over an API server; `say` prints the occasional message."""

    def __init__(self, connection: Connection, say: Callable[[str], None] = say_on_stderr) -> None:
        self._connection, self._say = connection, say

    @classmethod
    def from_context(cls, context: Context) -> KubeCluster:
        """Return the cluster of a context, without connecting to it yet."""
        return cls(connect(context.kube_context, connections=MAX_STREAMS + 8))

    def create_job(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Store a new job; SpecError, with the field, when the server's schema refuses it."""
        metadata = manifest.get("metadata")
        namespace = metadata.get("namespace") if isinstance(metadata, dict) else None
        path = _jobs(namespace or "default")
        return self._call("POST", path, manifest, {"dryRun": "All"} if dry_run else None)

    def get_job(self, namespace: str, name: str) -> Manifest:
        """Return one job."""
        return self._call("GET", _jobs(namespace, name))

    def list_jobs(self, namespace: str | None) -> list[Manifest]:
        """Return the jobs of a namespace (None: of all), oldest first."""
        jobs = self._items(_jobs(namespace))
        for job in jobs:  # the items of a list do not name their kind
            job |= {"apiVersion": API_VERSION, "kind": KIND}
        return sorted(jobs, key=lambda job: (job["metadata"].get("creationTimestamp", ""), job["metadata"]["name"]))

    def patch_job(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """Apply a JSON merge patch to metadata and spec and return the result."""
        return self._call("PATCH", _jobs(namespace, name), patch, content_type=MERGE_PATCH)

    def delete_job(self, namespace: str, name: str) -> None:
        """Delete a job; the cluster then removes what it owns."""
        self._call("DELETE", _jobs(namespace, name), {"propagationPolicy": "Background"})

    def user(self) -> str:
        """The user that the server authenticates this client as; "" if it does not say."""
        return user_of(self._connection)

    def publish(self, job: Manifest, reason: str, message: str) -> None:
        """Publish an event about a job; ForbiddenError without the right to."""
        metadata, now = job["metadata"], to_rfc3339(time.time())
        about = {"apiVersion": API_VERSION, "kind": KIND, "name": metadata["name"], "uid": metadata.get("uid", "")}
        namespace = metadata.get("namespace") or "default"
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}-", "namespace": namespace},
            "involvedObject": {**about, "namespace": namespace},
            "type": "Normal",
            "reason": reason,
            "message": shorten(message, _MESSAGE_CHARS),
            "source": {"component": "elasticctl"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._connection.request("POST", resource_path("v1", namespace, "events"), event)

    def list_quotas(self) -> list[Manifest]:
        """Return the ElasticQuotas of all projects, by name; none where the cluster does not define them."""
        from elasticctl.api.quota import KIND as QUOTA_KIND  # few verbs need it, and all have to start fast

        try:
            quotas = self._items(_quotas())
        except NotFoundError:
            return []
        for quota in quotas:
            quota |= {"apiVersion": API_VERSION, "kind": QUOTA_KIND}
        return sorted(quotas, key=lambda quota: str(quota["metadata"]["name"]))

    def put_quota(self, manifest: Manifest) -> Manifest:
        """Store a project's ElasticQuota in place of the one it has; SpecError when it cannot be one."""
        from elasticctl.api.quota import check_quota

        wanted = check_quota(manifest).to_manifest()
        try:
            return self._call("POST", _quotas(), wanted)
        except ConflictError:
            path = _quotas(wanted["metadata"]["name"])
        found = self._call("GET", path)
        spec = dict(wanted["spec"])
        for part in ("guaranteed", "limit", "allowed"):  # a merge patch removes only what it names
            spec[part] = dict.fromkeys(found.get("spec", {}).get(part) or {}) | wanted["spec"].get(part, {})
        condition = {"resourceVersion": found["metadata"]["resourceVersion"]}
        return self._call("PATCH", path, {"metadata": condition, "spec": spec}, content_type=MERGE_PATCH)

    def delete_quota(self, project: str) -> None:
        """Remove a project's ElasticQuota; NotFoundError when it has none."""
        self._call("DELETE", _quotas(project))

    def list_pods(self, namespace: str, job: str) -> list[Manifest]:
        """Return the pods of a job, in order of index."""
        return self._pods_of(ElasticJob.from_manifest(self.get_job(namespace, job)))

    def pods_of(self, jobs: Sequence[ElasticJob]) -> dict[str, list[Manifest]]:
        """Return uid -> pods, in order of index, of jobs that have just been read: one list for each namespace."""
        found: dict[str, list[Manifest]] = {job.uid: [] for job in jobs}
        for namespace in dict.fromkeys(job.namespace for job in jobs):
            here = {job.uid: job.name for job in jobs if job.namespace == namespace}
            pods = self._items(resource_path("v1", namespace, "pods"), {"labelSelector": _labels(here.values())})
            for pod in pods:
                owners = {owner.get("uid") for owner in pod["metadata"].get("ownerReferences", [])}
                for uid in owners & here.keys():
                    found[uid].append(pod)
        return {uid: sorted(pods, key=pod_order) for uid, pods in found.items()}

    def evict_pod(self, namespace: str, name: str, *, grace_s: float) -> None:
        """Evict a worker, with `grace_s` seconds of notice, rounded up to whole ones; see `Cluster.evict_pod`."""
        from elasticctl.api.observed.workers import Pod  # listing jobs must not pay for it

        path = resource_path("v1", namespace, "pods", name)
        pod = self._call("GET", path)
        found = Pod.from_manifest(pod)
        if found.ended or found.exit_code is not None:  # a pod stays Running for a while after its worker has exited
            raise ConflictError(f"worker {name} has ended")
        uid = pod["metadata"]["uid"]
        if grace_s > 0:
            self._mark_preempted(path, uid)
        self._call("DELETE", path, {"gracePeriodSeconds": math.ceil(grace_s), "preconditions": {"uid": uid}})

    def _mark_preempted(self, path: str, uid: str) -> None:
        """Mark the coming deletion as a preemption for the controller, if the user may write to pods."""
        mark = {"uid": uid, "annotations": {ANNOTATION_PREEMPTED: "true"}}
        with suppress(ForbiddenError):  # the cause is then recorded as Deleted, which is true as well
            self._call("PATCH", path, {"metadata": mark}, content_type=MERGE_PATCH)

    def list_events(self, namespace: str, job: str) -> list[Manifest]:
        """Return the events of a job and its pods, oldest first."""
        found = ElasticJob.from_manifest(self.get_job(namespace, job))
        return _events_of(found, self._items(resource_path("v1", namespace, "events")))

    @contextmanager
    def watch_events(self, namespace: str) -> Iterator[Callable[[ElasticJob], list[Manifest]]]:
        """See `Cluster.watch_events`. Without the right to watch events, they are listed each time."""
        from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource  # listing jobs must not pay for it

        path = resource_path("v1", namespace, "events")
        reflector = Reflector(
            self._connection,
            Resource(path),
            ObjectStore(keep=lambda event: event.get("involvedObject", {}).get("kind") in ("Pod", KIND)),
        )

        def events(job: ElasticJob) -> list[Manifest]:
            if reflector.wait_synced(0.0 if reflector.refused else _SYNC_S) and not reflector.refused:
                return _events_of(job, reflector.store.items())
            return _events_of(job, self._items(path))  # says what is wrong

        reflector.start()
        try:
            yield events
        finally:
            reflector.stop()

    def list_budgets(self, namespace: str) -> list[Manifest]:
        """Return the PodDisruptionBudgets of a namespace; none if they may not be read."""
        try:
            return self._items(resource_path("policy/v1", namespace, "poddisruptionbudgets"))
        except (NotFoundError, ForbiddenError):
            return []

    def list_node_claims(self) -> list[Manifest] | None:
        """Return Karpenter's NodeClaims, the nodes requested from it; None without Karpenter or that right."""
        try:
            return self._items("/apis/karpenter.sh/v1/nodeclaims")
        except (NotFoundError, ForbiddenError):
            return None

    def logs(self, namespace: str, job: str, query: LogQuery) -> Iterator[LogLine]:
        """Yield the lines of a job's workers; see `Cluster.logs`. NotFoundError for those of earlier incarnations."""
        # Imported here, as listing jobs must not pay for it.
        from elasticctl.cluster.kube.follow_logs import LogFollower
        from elasticctl.cluster.kube.read_logs import read_logs
        from elasticctl.cluster.stored_logs import StoredLogs, someone_is_gone
        from elasticctl.kubeapi.watch import Resource

        found = ElasticJob.from_manifest(self.get_job(namespace, job))
        stored = StoredLogs(found, self._say)
        pods = self._pods_of(found)
        live = {str(pod["metadata"]["name"]): str(pod["metadata"]["uid"]) for pod in pods}
        if query.previous:
            return stored.failing_if_none(self._previous(job, stored.past(live, query)))
        asks = query.everything or someone_is_gone(found, live, query)
        past = stored.past(live, query) if asks else iter(())
        if query.follow:
            workers = Resource(resource_path("v1", found.namespace, "pods"), _labels([found.name]))
            follower = LogFollower(self._connection, found, _jobs(namespace, job), workers, query, stored)
            return stored.failing_if_none(_chain(past, follower.lines(pods)))
        live_lines = read_logs(self._connection, pods, query, stored)
        return stored.failing_if_none(heapq.merge(past, live_lines, key=lambda line: line.at))

    @staticmethod
    def _previous(job: str, past: Iterator[LogLine]) -> Iterator[LogLine]:
        first = next(past, None)
        if first is None:
            raise NotFoundError(
                f"the output of earlier incarnations of {job}'s workers is gone with their pods, and its storage has"
                f" no copy. Next: elasticctl logs -f {job} prints output as it comes"
            )
        return _chain(iter((first,)), past)

    def _pods_of(self, job: ElasticJob) -> list[Manifest]:
        return self.pods_of([job])[job.uid]

    def _items(self, path: str, params: Mapping[str, str] | None = None) -> list[Manifest]:
        with self._explain_missing_api():
            return list_objects(self._connection, path, params)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        with self._explain_missing_api():
            return self._connection.request(method, path, body, params, content_type=content_type)

    @contextmanager
    def _explain_missing_api(self) -> Iterator[None]:
        """Say what to do about a cluster without the definition of ElasticJobs."""
        try:
            yield
        except NoSuchApiError as e:
            raise NotFoundError(
                f"the cluster at {self._connection.server} has no ElasticJob resource. FIX: elasticctl install"
            ) from e


def user_of(api: Connection) -> str:
    """The user that an API server authenticates this client as; "" before Kubernetes 1.28, which does not say."""
    try:
        return ask_user(api)
    except ClusterError:
        return ""


def ask_user(api: Connection) -> str:
    """The user that an API server authenticates this client as. Raises CredentialsError for none, or a ClusterError."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    answer = api.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
    return as_text(at(answer, "status", "userInfo", "username"))


def _chain(first: Iterator[LogLine], second: Iterator[LogLine]) -> Iterator[LogLine]:
    """Yield from both. It is a generator, so closing it closes them."""
    yield from first
    yield from second


def _jobs(namespace: str | None, name: str = "") -> str:
    return resource_path(API_VERSION, namespace, PLURAL, name)


def _quotas(project: str = "") -> str:
    from elasticctl.api.quota import PLURAL as QUOTA_PLURAL

    return resource_path(API_VERSION, None, QUOTA_PLURAL, project)


def _labels(names: Collection[str]) -> str:
    """Return the label selector of the pods of these jobs; of many jobs, that of all pods of jobs."""
    if len(names) > MOST_NAMED:
        return f"{LABEL_GROUP}={GROUP}"
    return f"{LABEL_GROUP}={GROUP},{LABEL_JOB} in ({','.join(names)})"


def _events_of(job: ElasticJob, events: Collection[Manifest]) -> list[Manifest]:
    """Of the events of a namespace, those of a job and its workers, oldest first."""
    workers = {worker_name(job.name, index) for index in range(job.max)}
    return sorted((event for event in events if _is_about(event, job, workers)), key=_last_seen)


def _is_about(event: Manifest, job: ElasticJob, workers: set[str]) -> bool:
    """True for an event of this very job or a worker of it; earlier pods belonged to another job of the same name."""
    about = event.get("involvedObject", {})
    if about.get("kind") == "Pod":
        return about.get("name") in workers and _last_seen(event) >= (job.created_at or 0.0)
    return bool(about.get("uid") == job.uid)


def _last_seen(event: Manifest) -> float:
    from elasticctl.api.observed.pod_events import seen_at  # listing jobs must not pay for it

    return seen_at(event) or from_rfc3339(at(event, "metadata", "creationTimestamp")) or 0.0


class KubeSecrets:
    """`elasticctl.cluster.base.SecretStore` over an API server."""

    def __init__(self, api: Connection) -> None:
        self._api = api

    def merge(self, namespace: str, name: str, values: Mapping[str, str]) -> None:
        """See SecretStore.merge; needs the right to patch and to create, but not to read."""
        check_secret_name(name)
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        patch = {"metadata": {"labels": {LABEL_SECRET: _OF_JOBS}}, "data": data}
        with suppress(NotFoundError):
            self._api.request("PATCH", _path(namespace, name), patch, content_type=MERGE_PATCH)
            return
        metadata = {"name": name, "namespace": namespace, "labels": {LABEL_SECRET: _OF_JOBS}}
        made = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}
        self._api.request("POST", _path(namespace), made)

    def delete(self, namespace: str, name: str) -> None:
        """See SecretStore.delete."""
        check_secret_name(name)
        self._api.request("DELETE", _path(namespace, name))

    def list(self, namespace: str) -> list[SecretInfo]:
        """See SecretStore.list."""
        params = {"labelSelector": f"{LABEL_SECRET}={_OF_JOBS}"}
        found = [
            SecretInfo(
                item["metadata"]["name"],
                tuple(sorted(item.get("data") or {})),
                from_rfc3339(item["metadata"].get("creationTimestamp")),
            )
            for item in list_objects(self._api, _path(namespace), params)
        ]
        return sorted(found, key=lambda info: info.name)


def _path(namespace: str, name: str = "") -> str:
    return resource_path("v1", namespace, "secrets", name)
