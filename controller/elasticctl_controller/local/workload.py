"""The jobs and pods of the local cluster, as the controller's loop reads and changes them.

`LocalWorkload` implements `loop.apply_actions.Workload` and `loop.allocator.SharedCluster` over the store.
`WorkerTokens` holds the files that identify the workers of this machine to the rendezvous service, and to each other.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

from elasticctl.api.codec import to_json
from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.objects import as_mapping
from elasticctl.api.quota import KIND as QUOTA
from elasticctl.api.spec import LABEL_JOB, ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.capacity import SHARING_KIND as SHARING
from elasticctl.cluster.local.capacity import LocalSharing, build_node
from elasticctl_controller.core.group.worker_tokens import derive_peer_key, derive_token
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.core.workers import owner_uid
from elasticctl_controller.local.command import PEER_KEY_NAME, TOKEN_NAME
from elasticctl_controller.local.store import LocalStore, StoreChange
from elasticctl_controller.loop.apply_actions import PodCreator


class LocalWorkload:
    """Reads and writes jobs and pods in `store`; `rendezvous_endpoint` is the URL at which workers meet.

    `gpus` is how many GPUs this machine has; `deliver(job)` puts the job's current token into the workers' files.
    """

    def __init__(
        self,
        store: LocalStore,
        rendezvous_endpoint: str,
        gpus: int = 0,
        deliver: Callable[[ElasticJob], None] = lambda job: None,
    ) -> None:
        self._store, self._gpus, self._deliver = store, gpus, deliver
        self.rendezvous_endpoint = rendezvous_endpoint

    def subscribe(self, callback: Callable[[str], None]) -> None:
        """Call `callback(key)` for every job there is, and from now on whenever a job or a pod of it changes."""

        def changed(change: StoreChange) -> None:
            if change.job:
                callback(f"{change.namespace}/{change.job}")

        self._store.subscribe(changed)
        for job in self._store.list_jobs():
            callback(f"{job['metadata']['namespace']}/{job['metadata']['name']}")

    def get_job(self, key: str) -> Manifest | None:
        """Return the job, or None when it is gone."""
        namespace, _, name = key.partition("/")
        try:
            return self._store.get_job(namespace, name)
        except NotFoundError:
            return None

    def list_pods(self, job: ElasticJob) -> list[Manifest]:
        """Return the pods with the job's label, of any owner."""
        return self._store.list_pods(job.namespace, job.name)

    def list_pod_events(self, job: ElasticJob, uid: str) -> list[Manifest]:
        """Return none: the pod itself shows what keeps its process from starting."""
        return []

    def node_notices(self) -> Mapping[str, LeaveNotice]:
        """Return none: the only node is never taken away."""
        return {}

    def nodes_may_be_named(self) -> bool:
        """Return True: no autoscaler adds nodes."""
        return True

    def lost_nodes(self) -> frozenset[str]:
        """Return none: the only node is the one that this runs on."""
        return frozenset()

    # What is shared: `elasticctl_controller.loop.allocator.SharedCluster`.

    def sharing(self) -> LocalSharing:
        """Return how this machine is shared."""
        return LocalSharing.from_manifest(next(iter(self._store.list_objects(SHARING)), None))

    def cpu_slots(self) -> int:
        """Return how many ranks without GPUs may run at a time; 0: any number."""
        return self.sharing().slots(self._gpus, os.cpu_count() or 1)

    def all_jobs(self) -> list[Manifest]:
        """Return every job."""
        return self._store.list_jobs()

    def healthy_nodes(self) -> list[Manifest]:
        """Return this machine."""
        return [build_node(platform.node(), self._gpus, self.cpu_slots())]

    def quotas(self) -> list[Manifest]:
        """Return every ElasticQuota."""
        return self._store.list_objects(QUOTA)

    def quota_of(self, project: str) -> Manifest | None:
        """Return a project's ElasticQuota; None if it has none."""
        return next((quota for quota in self.quotas() if quota["metadata"]["name"] == project), None)

    def pod_creator(self, job: ElasticJob) -> PodCreator:
        """Return what creates the job's pods; it raises ConflictError when a name is taken."""

        def create_pod(manifest: Manifest) -> None:
            self._store.create_pod(manifest, job.uid)

        return create_pod

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        """Delete this very pod, without its grace period when forced; a pod that is gone is no error."""
        self._store.delete_pod(uid, grace_s=0.0 if force else None)

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        """Store the status; ConflictError when the job has changed since it was read, or is gone."""
        try:
            self._store.write_job_status(job.namespace, job.name, to_json(status), job.resource_version)
        except NotFoundError as e:
            raise ConflictError(f"job {job.key} is gone") from e

    def deliver_token(self, job: ElasticJob) -> None:
        """Put the job's current token into its workers' files; the kubelet writes them with its next check."""
        self._deliver(job)

    def delete_job(self, job: ElasticJob) -> None:
        """Delete this very job and all that it owns; a job that is gone is no error."""
        try:
            self._store.delete_job(job.namespace, job.name, uid=job.uid)
        except NotFoundError:
            return

    def record_event(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        """Record an event about the job."""
        about = {"kind": "ElasticJob", "metadata": {"namespace": job.namespace, "name": job.name, "uid": job.uid}}
        self._store.record_event(job.uid, about, type_, reason, message)


class WorkerTokens:
    """The contents of each worker's files; thread-safe. `find_job(key)` returns a job's manifest, or None."""

    def __init__(self, key: bytes, find_job: Callable[[str], Mapping[str, Any] | None]) -> None:
        self._key, self._find_job = key, find_job
        self._numbers: dict[str, int] = {}

    def deliver(self, job: ElasticJob) -> None:
        """Put the job's current token into the files from now on."""
        if job.status.token is not None:
            self._numbers[job.uid] = job.status.token.number

    def files_of(self, pod: Manifest) -> Mapping[str, str]:
        """The files of a worker: their names in its folder, and their contents."""
        metadata = pod["metadata"]
        uid = owner_uid(pod)
        if uid not in self._numbers:
            job = self._find_job(f"{metadata['namespace']}/{as_mapping(metadata.get('labels')).get(LABEL_JOB, '')}")
            if job is None or job["metadata"]["uid"] != uid:
                return {TOKEN_NAME: derive_token(self._key, uid), PEER_KEY_NAME: derive_peer_key(self._key, uid)}
            status = ElasticJob.from_manifest(job).status
            self._numbers[uid] = status.token.number if status.token is not None else 0
        token = derive_token(self._key, uid, self._numbers[uid])
        return {TOKEN_NAME: token, PEER_KEY_NAME: derive_peer_key(self._key, uid)}
