"""The files that identify the workers of this machine to the rendezvous service, and to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elasticctl.api.objects import as_mapping
from elasticctl.api.spec import LABEL_JOB, ElasticJob
from elasticctl.cluster.base import Manifest
from elasticctl_controller.core.group.tokens import derive_peer_key, derive_token
from elasticctl_controller.local.command import PEER_KEY_NAME, TOKEN_NAME
from elasticctl_controller.local.objects import owner_uid


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
