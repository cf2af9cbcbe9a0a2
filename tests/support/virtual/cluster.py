"""Nodes, pods and the job's object in virtual time: an API server, a scheduler and kubelets in memory.

The controller sees the cluster through a cache that lags behind (`lag_s`), but believes its own writes at once. While
the API server is `away`, nothing can be written and nothing new is seen.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticctl.api.codec import to_json, to_rfc3339
from elasticctl.api.errors import ConflictError, UnreachableError
from elasticctl.api.spec import WORKER_CONTAINER, ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.loop.apply_actions import PodCreator
from tests.support.virtual.clock import EPOCH, VirtualLoop

Manifest = dict[str, Any]


class Process(Protocol):
    """What runs in a pod."""

    def start(self) -> None:
        """The container starts."""

    def terminate(self) -> None:
        """SIGTERM."""

    def die(self, *, silently: bool) -> None:
        """SIGKILL; `silently`: together with its node."""


@dataclass(eq=False, slots=True)
class Pod:
    """A pod as it really is. `reclaimed_at`: its machine's end, as its launcher was notified."""

    name: str
    uid: str
    job_uid: str
    manifest: Manifest
    node: str = ""
    process: Process | None = None
    exit_code: int | None = None
    deleting: bool = False
    gone: bool = False
    timer: asyncio.TimerHandle | None = None
    reclaimed_at: float | None = None


@dataclass(eq=False, slots=True)
class Node:
    """A machine for one worker. `lost`: the cluster knows that it is gone; `cut`: its kubelet has no network."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    up: bool = True
    lost: bool = False
    cut: bool = False
    pod: Pod | None = None


@dataclass(slots=True)
class Cluster:
    """The cluster, and the loop's `Workload`. `launch(pod)` makes the process of a pod that has been placed."""

    loop: VirtualLoop
    dice: random.Random
    launch: Callable[[Pod], Process]
    lag_s: float = 0.05
    start_s: float = 3.0
    grace_s: float = 30.0
    away: bool = False
    changed: Callable[[str], None] = lambda key: None
    on_write: Callable[[ElasticJob, JobStatus], None] = lambda job, status: None
    on_delete: Callable[[ElasticJob, str, str], None] = lambda job, name, uid: None
    on_end: Callable[[Pod], None] = lambda pod: None
    nodes: dict[str, Node] = field(default_factory=dict)
    jobs: dict[str, Manifest] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    waiting: list[Pod] = field(default_factory=list)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    _made: int = 0
    _version: int = 0
    _seen_pods: dict[str, Manifest] = field(default_factory=dict)
    _seen_jobs: dict[str, Manifest] = field(default_factory=dict)
    _seen_lost: frozenset[str] = frozenset()
    _seen_at: float = 0.0
    _shown: int = 0
    _seen: dict[str, int] = field(default_factory=dict)
    _unseen: list[Callable[[], None]] = field(default_factory=list)

    # The controller's side: `elasticctl_controller.loop.apply_actions.Workload`

    @property
    def rendezvous_endpoint(self) -> str:
        return "http://service:7777"

    def subscribe(self, callback: Callable[[str], None]) -> None:
        self.changed = callback

    def get_job(self, key: str) -> Mapping[str, Any] | None:
        return self._seen_jobs.get(key)

    def list_pods(self, job: ElasticJob) -> list[Mapping[str, Any]]:
        return list(self._seen_pods.values())

    def node_notices(self) -> Mapping[str, LeaveNotice]:
        """Launchers report notices here, not machines."""
        return {}

    def nodes_may_be_named(self) -> bool:
        """There is no autoscaler."""
        return True

    def lost_nodes(self) -> frozenset[str]:
        return self._seen_lost

    def pod_creator(self, job: ElasticJob) -> PodCreator:
        return functools.partial(self.create_pod, job)

    def create_pod(self, job: ElasticJob, manifest: Mapping[str, Any]) -> None:
        self._check_answers()
        name = manifest["metadata"]["name"]
        if name in self.pods:
            raise ConflictError(f"pod {name} exists")
        self._made += 1
        uid = f"{name}-{self._made}"
        metadata = {**manifest["metadata"], "uid": uid, "creationTimestamp": self._stamp()}
        made = {**manifest, "metadata": metadata, "status": {"phase": "Pending"}}
        pod = self.pods[name] = Pod(name, uid, job.uid, made)
        self._seen_pods[name], self._seen[name] = made, self._shown
        self.waiting.append(pod)
        self.loop.after(0.01, self.place_pods)

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        self._check_answers()
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid:
            return
        self.on_delete(job, name, uid)
        self.remove_pod(pod, force=force)
        self._seen[name] = self._shown
        if pod.gone:
            self._seen_pods.pop(name, None)
        else:
            self._seen_pods[name] = pod.manifest

    def list_pod_events(self, job: ElasticJob, uid: str) -> list[Manifest]:
        return []

    def deliver_token(self, job: ElasticJob) -> None:
        self._check_answers()

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        self._check_answers()
        stored = self.jobs.get(job.key)
        if stored is None or stored["metadata"]["uid"] != job.uid:
            raise ConflictError(f"job {job.key} is gone")
        if stored["metadata"]["resourceVersion"] != job.resource_version:
            raise ConflictError(f"job {job.key} has changed")
        self.on_write(job, status)
        self._put_job(job.key, {**stored, "status": to_json(status)})
        self._seen_jobs[job.key] = self.jobs[job.key]

    def delete_job(self, job: ElasticJob) -> None:
        self._check_answers()
        self.drop_job(job.key)

    def record_event(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        self.events.append((self.loop.time(), reason, message))

    # What users do

    def put_job(self, manifest: Manifest, uid: str) -> str:
        """Create a job; returns its key."""
        metadata = {**manifest["metadata"], "uid": uid, "generation": 1, "creationTimestamp": self._stamp()}
        key = f"{metadata['namespace']}/{metadata['name']}"
        self._put_job(key, {**copy.deepcopy(manifest), "metadata": metadata, "status": {}})
        self._show(lambda: self._see_job(key))
        return key

    def edit_job(self, key: str, change: Callable[[Manifest], None]) -> None:
        """Change a job's spec."""
        stored = copy.deepcopy({name: self.jobs[key][name] for name in ("metadata", "spec")})
        change(stored["spec"])
        stored["metadata"]["generation"] += 1
        self._put_job(key, {**self.jobs[key], **stored})
        self._show(lambda: self._see_job(key))

    def drop_job(self, key: str) -> None:
        """Delete a job and all that it owns."""
        job = self.jobs.pop(key, None)
        if job is None:
            return
        for pod in list(self.pods.values()):
            if pod.job_uid == job["metadata"]["uid"]:
                self.remove_pod(pod)
        self._show(lambda: self._see_job(key))

    # Nodes

    def add_node(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        """A machine comes."""
        self.nodes[name] = Node(name, labels or {})
        self.place_pods()

    def lose_node(self, name: str, known_s: float) -> None:
        """A machine dies; the cluster knows of it after `known_s`."""
        node = self.nodes[name]
        node.up = False
        if node.pod is not None and node.pod.process is not None:
            node.pod.process.die(silently=True)
        self.loop.after(known_s, self._know_lost, node)

    def isolate(self, name: str, lost_s: float) -> None:
        """A machine loses its network; the cluster considers it lost after `lost_s`."""
        node = self.nodes[name]
        node.cut = True
        self.loop.after(lost_s, self._know_lost, node)

    def rejoin(self, name: str) -> None:
        """Its network is back: its kubelet ends pods that were deleted meanwhile, and reports those that ended."""
        node = self.nodes.get(name)
        if node is None or not node.up:
            return
        node.cut, node.lost = False, False
        self._show_lost()
        pod = node.pod
        if pod is not None and pod.gone:
            if pod.process is not None:
                pod.process.die(silently=False)
            node.pod = None
        elif pod is not None:
            self._show_pod(pod)
            if pod.deleting and pod.exit_code is None:
                self._end_deleted(pod)
        self.loop.after(0.01, self.place_pods)

    def notice(self, name: str, gone_s: float) -> None:
        """Notify the launcher that the machine will be taken away after `gone_s`."""
        node = self.nodes[name]
        if node.pod is not None and node.pod.process is not None and node.pod.exit_code is None:
            node.pod.reclaimed_at = self.loop.time() + gone_s
            node.pod.process.terminate()
        self.loop.after(gone_s, self._reclaim, node)

    def _reclaim(self, node: Node) -> None:
        if node.up:
            self.lose_node(node.name, self.dice.uniform(0.5, 3.0))

    def _know_lost(self, node: Node) -> None:
        if node.up and not node.cut:
            return
        node.lost = True
        self._show_lost()

    def _show_lost(self) -> None:
        lost = frozenset(node.name for node in self.nodes.values() if node.lost)

        def see() -> None:
            self._seen_lost = lost
            for key in self.jobs:
                self.changed(key)

        self._show(see)

    # Pods

    def place_pods(self) -> None:
        """Act as the scheduler: the first waiting pods get free machines that suit them."""
        if self.away:
            return
        free = [n for n in self.nodes.values() if n.up and not n.cut and not n.lost and n.pod is None]
        for pod in tuple(self.waiting):
            avoided = _avoided(pod.manifest)
            node = next((n for n in free if n.name not in avoided and _suits(pod.manifest, n.labels)), None)
            if node is None:
                continue
            free.remove(node)
            self.waiting.remove(pod)
            node.pod, pod.node = pod, node.name
            pod.manifest = {**pod.manifest, "spec": {**pod.manifest["spec"], "nodeName": node.name}}
            pod.process = self.launch(pod)
            pod.timer = self.loop.after(self.start_s * self.dice.uniform(0.5, 1.5), self._run, pod)
            self._show_pod(pod)

    def remove_pod(self, pod: Pod, *, force: bool = False) -> None:
        """Delete a pod, as the API server does."""
        node = self.nodes.get(pod.node)
        runs = pod.process is not None and pod.exit_code is None
        if node is None or not runs or force:
            self._drop(pod)
            if runs and pod.process is not None and node is not None and node.up and not node.cut:
                pod.process.die(silently=False)
                node.pod = None
            return
        if pod.deleting:
            return
        pod.deleting = True
        metadata = {**pod.manifest["metadata"], "deletionTimestamp": self._stamp(self.grace_s)}
        pod.manifest = {**pod.manifest, "metadata": metadata}
        self._show_pod(pod)
        if not node.cut and node.up:
            self._end_deleted(pod)

    def _end_deleted(self, pod: Pod) -> None:
        """What the kubelet does with a pod that has been deleted."""
        if pod.timer is not None:  # it has not started yet
            self._ended(pod, 137, "")
        elif pod.process is not None:
            pod.process.terminate()
            self.loop.after(self.grace_s, self.kill, pod)

    def kill(self, pod: Pod, code: int = 137) -> None:
        """SIGKILL to what runs in a pod."""
        node = self.nodes.get(pod.node)
        if pod.exit_code is None and pod.process is not None and node is not None and node.up:
            pod.process.die(silently=False)
            self._ended(pod, code, "")

    def exit(self, pod: Pod, code: int, message: str) -> None:
        """What ran in a pod has ended by itself."""
        self._ended(pod, code, message)

    def _run(self, pod: Pod) -> None:
        pod.timer = None
        node = self.nodes[pod.node]
        if pod.gone or not node.up or pod.process is None:
            return
        self._set_status(pod, {"phase": "Running", "startTime": self._stamp()})
        pod.process.start()

    def _ended(self, pod: Pod, code: int, message: str) -> None:
        if pod.exit_code is not None:
            return
        pod.exit_code = code
        if pod.timer is not None:
            pod.timer.cancel()
        node = self.nodes[pod.node]
        if node.pod is pod:
            node.pod = None
        ended = {"exitCode": code, "finishedAt": self._stamp(), "message": message}
        state = {"name": WORKER_CONTAINER, "state": {"terminated": ended}}
        phase = "Failed" if code else "Succeeded"
        before = pod.manifest["status"].get("startTime")
        status = {"phase": phase, "containerStatuses": [state], **({"startTime": before} if before else {})}
        self._set_status(pod, status)
        self.on_end(pod)
        if pod.deleting:
            self._drop(pod)
        self.loop.after(0.01, self.place_pods)

    def _set_status(self, pod: Pod, status: Manifest) -> None:
        pod.manifest = {**pod.manifest, "status": status}
        if not self.nodes[pod.node].cut:
            self._show_pod(pod)

    def _drop(self, pod: Pod) -> None:
        """Drop the object; its process may still run on a machine without network."""
        pod.gone = True
        if self.pods.get(pod.name) is pod:
            del self.pods[pod.name]
        if pod in self.waiting:
            self.waiting.remove(pod)
        if pod.timer is not None:
            pod.timer.cancel()
        node = self.nodes.get(pod.node)
        if node is not None and node.pod is pod and (pod.exit_code is not None or not node.up or pod.timer is not None):
            node.pod = None
        self._show_pod(pod)
        self.loop.after(0.01, self.place_pods)

    # The API server

    def come_back(self) -> None:
        """The API server answers again."""
        self.away = False
        while self._unseen:
            self._see_next()
        for key in self.jobs:
            self.changed(key)  # the watches start again
        self.place_pods()

    def _check_answers(self) -> None:
        if self.away:
            raise UnreachableError("the API server does not answer")

    def _put_job(self, key: str, manifest: Manifest) -> None:
        self._version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self._version)}
        self.jobs[key] = {**manifest, "metadata": metadata}

    def _see_job(self, key: str) -> None:
        if key in self.jobs:
            self._seen_jobs[key] = self.jobs[key]
        else:
            self._seen_jobs.pop(key, None)
        self.changed(key)

    def _show_pod(self, pod: Pod) -> None:
        self._shown += 1
        manifest, gone, number = pod.manifest, pod.gone, self._shown

        def see() -> None:
            if number <= self._seen.get(pod.name, 0):
                return  # the controller has written something newer
            self._seen[pod.name] = number
            known = self._seen_pods.get(pod.name)
            if gone:
                if known is not None and known["metadata"]["uid"] == pod.uid:
                    del self._seen_pods[pod.name]
            elif known is None or known["metadata"]["uid"] == pod.uid:
                self._seen_pods[pod.name] = manifest
            for key in self.jobs:
                self.changed(key)

        self._show(see)

    def _show(self, see: Callable[[], None]) -> None:
        """Have the controller's cache apply a change, in order."""
        self._seen_at = max(self._seen_at, self.loop.time() + self.lag_s * self.dice.uniform(0.2, 1.0))
        self._unseen.append(see)
        self.loop.at(self._seen_at, self._see_next)

    def _see_next(self) -> None:
        if not self.away and self._unseen:
            self._unseen.pop(0)()

    def _stamp(self, later_s: float = 0.0) -> str:
        return to_rfc3339(float(int(EPOCH + self.loop.time() + later_s)))


def _terms(pod: Mapping[str, Any]) -> list[Manifest]:
    """What a pod requires of nodes: any of these."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    found: list[Manifest] = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
    return found or [{}]


def _avoided(pod: Mapping[str, Any]) -> set[str]:
    """The machines that a pod must not be placed on, by name."""
    fields = [field for term in _terms(pod) for field in term.get("matchFields", [])]
    return {name for field in fields if field["operator"] == "NotIn" for name in field["values"]}


def _suits(pod: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a machine has the labels that a pod requires."""
    return any(all(_holds(one, labels) for one in term.get("matchExpressions", [])) for term in _terms(pod))


def _holds(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(one["key"])
    if one["operator"] == "In":
        return value in one["values"]
    return value is None if one["operator"] == "DoesNotExist" else value not in one["values"]
