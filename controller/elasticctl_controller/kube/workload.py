"""The jobs, pods and nodes of a Kubernetes cluster, as the controller's loop reads and changes them.

Implements `loop.apply_actions.Workload`. Jobs and pods are read from caches that watches fill. What this process writes
goes into the caches as soon as the API server has answered, so that the next pass sees it. When a node is lost, the
jobs with pods on it are reported, even if the API server still shows those pods as running.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from elasticctl.api.codec import Manifest, to_json
from elasticctl.api.errors import ConflictError, ForbiddenError, NotFoundError, SpecError, TooLargeError
from elasticctl.api.spec import API_VERSION, KIND, PLURAL, ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl.kubeapi.connection import JSON_PATCH, MERGE_PATCH, resource_path
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource, object_key
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.kube.event_recorder import EventRecorder
from elasticctl_controller.kube.limited_api import LimitedApi
from elasticctl_controller.kube.nodes import UNKNOWN_GRACE_S, NodeHealth, NodeNotices
from elasticctl_controller.kube.owned_objects import OwnedObjects, delete_options
from elasticctl_controller.kube.pods import KubePods, PodFinisher, job_key_of
from elasticctl_controller.kube.pruning import prune_job, prune_node, unfold_job
from elasticctl_controller.loop.apply_actions import PodCreator

log = logging.getLogger(__name__)

EVENTS_PER_S, EVENTS_BURST = 50.0, 500
"""Events have their own rate limit: those about a thousand pods must not delay the creation of the next pods."""

MOST_EVENTS = 100
"""The most events that are read about one pod: Kubernetes counts repeated ones."""
MOST_EVENTS_BYTES = 1 << 20
"""Ten times what so many take. An event may be as large as any object."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`rendezvous_endpoint` is the URL at which workers meet, `instance` this process's name in events.

    `node_grace_s` is how long the Ready condition of a node may be Unknown before the node counts as lost. `namespace`
    limits the jobs to one namespace ("": all). Without `watch_nodes`, nothing is known about nodes and none is lost:
    workers are lost once Kubernetes says so about their pods.
    """

    rendezvous_endpoint: str
    instance: str
    node_grace_s: float = UNKNOWN_GRACE_S
    namespace: str = ""
    watch_nodes: bool = True


class KubeWorkload:
    """See the module's docstring; for `finisher`, `owned` and `on_replaced` see `KubePods`.

    `on_status` is called with the former and the new status of a job once it is stored.
    """

    def __init__(
        self,
        api: LimitedApi,
        settings: Settings,
        owned: OwnedObjects,
        finisher: PodFinisher,
        on_replaced: Callable[[float], None] = lambda seconds: None,
        on_status: Callable[[JobStatus, JobStatus], None] = lambda before, after: None,
    ) -> None:
        self.rendezvous_endpoint = settings.rendezvous_endpoint
        self._api, self._owned, self._on_status = api, owned, on_status
        self._events = EventRecorder(api.with_own_rate(EVENTS_PER_S, EVENTS_BURST), settings.instance)
        self._health, self._notices = NodeHealth(settings.node_grace_s), NodeNotices()
        self.jobs = ObjectStore(prune_job)
        self.pods = KubePods(api, owned, finisher, on_replaced, settings.namespace)
        self.nodes = ObjectStore(prune_node)
        self._watches_nodes = settings.watch_nodes
        jobs = Resource(resource_path(API_VERSION, settings.namespace or None, PLURAL))
        nodes = [Reflector(api, Resource("/api/v1/nodes"), self.nodes)] if self._watches_nodes else []
        self.reflectors = (Reflector(api, jobs, self.jobs), self.pods.reflector, *nodes)
        self._callback: Callable[[str], None] = lambda key: None
        self._nodes_changed, self._stopping = threading.Event(), False
        self._node_thread = threading.Thread(target=self._follow_nodes, name="nodes", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self.nodes.subscribe(self._node_changed)
        self.pods.cache.subscribe(self._pod_changed)
        for reflector in self.reflectors:
            reflector.start()
        self._events.start()
        self._node_thread.start()

    def stop(self) -> None:
        """Stop the watches, and write the events that are queued."""
        self._stopping = True
        self._nodes_changed.set()
        self._node_thread.join()
        self._events.stop()
        for reflector in self.reflectors:
            reflector.stop()

    @property
    def alive(self) -> bool:
        """True from `start` to `stop`, unless a thread that watches or follows nodes has died, which is an error."""
        return self._node_thread.is_alive() and all(reflector.alive for reflector in self.reflectors)

    def wait_synced(self, timeout_s: float | None = None) -> bool:
        """Wait until everything has been listed once; True once it has."""
        return all(reflector.wait_synced(timeout_s) for reflector in self.reflectors)

    def subscribe(self, callback: Callable[[str], None]) -> None:
        """Call `callback(key)` for every job there is, and from now on whenever a job or a pod of it changes."""
        self._callback = callback

        def job_changed(old: Manifest | None, new: Manifest | None) -> None:
            callback(object_key(new or old or {}))
            if new is None and old is not None:
                self._owned.drop_job(old["metadata"].get("uid", ""))

        self.jobs.subscribe(job_changed)

    def note_api_answer(self) -> None:
        """Record that the API server has answered this process; call this every few seconds while it does."""
        if self._health.note_api_answer():
            self._nodes_changed.set()

    def get_job(self, key: str) -> Manifest | None:
        """Return the job's manifest, or None when it is gone."""
        found = self.jobs.get(key)
        return None if found is None else unfold_job(found)

    def list_pods(self, job: ElasticJob) -> list[Manifest]:
        """See `KubePods.list_pods`."""
        return self.pods.list_pods(job)

    def list_pod_events(self, job: ElasticJob, uid: str) -> list[Manifest]:
        """Return some events about the pod with this uid; none if they are larger than `MOST_EVENTS_BYTES`, or if the
        controller's role is too old to read them."""
        about = {"fieldSelector": f"involvedObject.uid={uid}", "limit": str(MOST_EVENTS)}
        with suppress(ForbiddenError, TooLargeError):
            path = resource_path("v1", job.namespace, "events")
            found = self._api.request("GET", path, None, about, most_bytes=MOST_EVENTS_BYTES)
            return list(found.get("items") or ())
        return []

    def lost_nodes(self) -> frozenset[str]:
        """Return the names of nodes that are gone or NotReady for longer than their grace."""
        return self._health.lost()

    def node_notices(self) -> Mapping[str, LeaveNotice]:
        """Return the nodes that workers will have to leave, and why."""
        return self._notices.all()

    def nodes_may_be_named(self) -> bool:
        """Return False where pods that name nodes to avoid would get no machine."""
        return self._notices.may_be_named()

    def pod_creator(self, job: ElasticJob) -> PodCreator:
        """See `KubePods.pod_creator`."""
        return self.pods.pod_creator(job)

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        """See `KubePods.delete_pod`."""
        self.pods.delete_pod(job, name, uid, force=force)

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        """Store the status; ConflictError when the job has changed since it was read, or is gone."""
        metadata = {"name": job.name, "namespace": job.namespace, "uid": job.uid}
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": metadata | {"resourceVersion": job.resource_version},
            "spec": (self.get_job(job.key) or {}).get("spec", {}),  # unchanged here, but validated as well
            "status": without_empty(to_json(status)),
        }
        try:
            self.jobs.record_write(self._api.request("PUT", _job_path(job, "status"), body))
        except NotFoundError as e:
            raise ConflictError(f"job {job.key} is gone") from e
        except ConflictError:
            self._write_unless_changed(job, body["status"])
        self._on_status(job.status, status)
        self._owned.ensure_budget(replace(job, desired=status.desired))
        if not status.phase.terminal:
            self._owned.ensure_group(job, self.list_pods(job))

    def _write_unless_changed(self, job: ElasticJob, status: Manifest) -> None:
        """Store a status although the job has changed since it was read, if its spec and status have not.

        Otherwise a client that keeps changing the job's labels or annotations would prevent it from ever being written.
        Raises ConflictError if it cannot be stored.
        """
        written = to_json(job.status).get("lastReconcileTime")
        if not written:
            raise ConflictError(f"job {job.key} has changed")
        same = {"metadata/uid": job.uid, "metadata/generation": job.generation, "status/lastReconcileTime": written}
        patch = [{"op": "test", "path": f"/{path}", "value": value} for path, value in same.items()]
        patch.append({"op": "replace", "path": "/status", "value": status})
        try:
            path = _job_path(job, "status")
            self.jobs.record_write(self._api.request("PATCH", path, patch, content_type=JSON_PATCH))
        except (NotFoundError, ForbiddenError, SpecError) as e:  # it is gone, the role is too old, or a test failed
            raise ConflictError(f"job {job.key} has changed") from e

    def deliver_token(self, job: ElasticJob) -> None:
        """Put the current token into the job's Secret: kubelets bring it to the pods."""
        self._owned.put_token(job)

    def patch_job(self, job: ElasticJob, patch: Manifest) -> None:
        """Change this very job's object; ConflictError when it is gone."""
        body = {**patch, "metadata": {"uid": job.uid, **patch.get("metadata", {})}}
        try:
            self.jobs.record_write(self._api.request("PATCH", _job_path(job), body, content_type=MERGE_PATCH))
        except NotFoundError as e:
            raise ConflictError(f"job {job.key} is gone") from e

    def delete_job(self, job: ElasticJob) -> None:
        """Delete this very job and all that it owns; a job that is gone is no error."""
        options = delete_options(job.uid) | {"propagationPolicy": "Background"}
        with suppress(NotFoundError, ConflictError):
            self._api.request("DELETE", _job_path(job), options)

    def record_event(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        """Record an event about the job."""
        self._events.record(job, type_, reason, message)

    def _pod_changed(self, old: Manifest | None, new: Manifest | None) -> None:
        pod = new or old or {}
        node = new["spec"].get("nodeName", "") if new is not None and self._watches_nodes else ""
        if self._health.expect_node(node):
            self._nodes_changed.set()
        self.pods.record_change(old, new)
        self._callback(job_key_of(pod))

    def _node_changed(self, old: Manifest | None, new: Manifest | None) -> None:
        self._health.node_changed(old, new)
        self._nodes_changed.set()
        if self._notices.node_changed(old, new):
            for pod in self._pods_on({object_key(new or {})}):
                self._callback(job_key_of(pod))

    def _follow_nodes(self) -> None:
        """Report the jobs with pods on a node as soon as the node counts as lost."""
        reported: frozenset[str] = frozenset()
        while not self._stopping:
            self._nodes_changed.clear()
            lost = self._health.lost()
            if lost != reported:
                self._report_jobs_on(lost - reported)
            reported = lost
            self._nodes_changed.wait(self._health.next_loss_s())

    def _report_jobs_on(self, nodes: frozenset[str]) -> None:
        for pod in self._pods_on(nodes):
            self.pods.record_loss(pod)
            self._callback(job_key_of(pod))
        if nodes:
            log.info("lost nodes: %s", ", ".join(sorted(nodes)))
        self._health.drop_unnamed({pod["spec"].get("nodeName", "") for pod in self.pods.cache.items()})

    def _pods_on(self, nodes: Collection[str]) -> list[Manifest]:
        return [pod for pod in self.pods.cache.items() if pod["spec"].get("nodeName") in nodes]


def without_empty(data: Any) -> Any:
    """JSON data without the fields that are "": missing fields are read the same, and lists of workers are long."""
    if isinstance(data, dict):
        return {name: without_empty(value) for name, value in data.items() if value != ""}
    if isinstance(data, list):
        return [without_empty(item) for item in data]
    return data


def _job_path(job: ElasticJob, part: str = "") -> str:
    return resource_path(API_VERSION, job.namespace, PLURAL, job.name, part)
