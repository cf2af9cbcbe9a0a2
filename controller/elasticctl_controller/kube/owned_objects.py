"""What a job needs in the cluster beside its pods: headless Services, the token's Secret, a PodDisruptionBudget.

All of it is owned by the job object, so that the cluster removes it with the job. Nothing that is somebody else's is
touched: an object of the same name is left alone unless an earlier job of this name has left it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ClusterError, ConflictError, ElasticctlError, NotFoundError
from elasticctl.api.spec import KIND, ElasticJob
from elasticctl.kubeapi.connection import MERGE_PATCH, resource_path
from elasticctl_controller.kube.limiter import LimitedApi

TRUST_S = 600.0
"""How long something that was made is taken to be there still: somebody may have deleted it."""
PLURALS = {
    "Service": "services",
    "Secret": "secrets",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PodGroup": "podgroups",
}

_MUTABLE = ("PodDisruptionBudget", "PodGroup")
"""What changes with the job's bounds."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectBuilders:
    """The manifests: `companions` of one pod, to be there before it, and the `budget` of a job."""

    companions: Callable[[ElasticJob, Manifest], list[Manifest]]
    budget: Callable[[ElasticJob], Manifest]


@dataclass(slots=True)
class _Created:
    """What is known to be there of one job: (kind, name) -> (as it was made, when)."""

    objects: dict[tuple[str, str], tuple[Manifest, float]] = field(default_factory=dict)


class OwnedObjects:
    """Creates them when they are missing; thread-safe. `clock` is monotonic seconds."""

    def __init__(self, api: LimitedApi, makers: ObjectBuilders, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._makers, self._clock = api, makers, clock
        self._lock = threading.Lock()
        self._jobs: dict[str, _Created] = {}
        self._budgets_served: bool | None = None

    def ensure(self, job: ElasticJob, pod: Manifest) -> None:
        """Have there what `pod` needs; ConflictError while an earlier job's things are in the way."""
        for manifest in self._makers.companions(job, pod):
            self._keep(job, manifest)

    def keep_budget(self, job: ElasticJob) -> None:
        """Have the job's PodDisruptionBudget say what it should now; failing to is logged, for no job depends on it."""
        if job.deleting:
            return
        try:
            if self._serves_budgets():
                self._keep(job, self._makers.budget(job))
        except ElasticctlError as e:
            log.warning("job %s: no PodDisruptionBudget: %s", job.key, e)

    def forget(self, job_uid: str) -> None:
        """The job is gone, and all it had with it."""
        with self._lock:
            self._jobs.pop(job_uid, None)

    def _serves_budgets(self) -> bool:
        if self._budgets_served is None:
            try:
                self._api.request("GET", "/apis/policy/v1")
                self._budgets_served = True
            except NotFoundError:
                self._budgets_served = False
                log.info("this cluster has no policy/v1 (Kubernetes 1.21): jobs get no PodDisruptionBudget")
        return self._budgets_served

    def _keep(self, job: ElasticJob, manifest: Manifest) -> None:
        key = (manifest["kind"], manifest["metadata"]["name"])
        with self._lock:
            kept = self._jobs.setdefault(job.uid, _Created()).objects.get(key)
        if kept is not None and kept[0] == manifest and self._clock() < kept[1] + TRUST_S:
            return
        path = resource_path(manifest["apiVersion"], job.namespace, PLURALS[manifest["kind"]])
        try:
            self._api.request("POST", path, manifest)
        except ConflictError:
            self._take_over(job, manifest, f"{path}/{manifest['metadata']['name']}")
        with self._lock:
            self._jobs.setdefault(job.uid, _Created()).objects[key] = (manifest, self._clock())

    def _take_over(self, job: ElasticJob, manifest: Manifest, path: str) -> None:
        """Something of that name is there: bring it up to date if it is this job's own."""
        if manifest["kind"] == "Secret":
            return  # its name is this job's alone, and the controller may not read Secrets
        found = self._api.request("GET", path)
        owners = found["metadata"].get("ownerReferences", ())
        what = f"{manifest['kind']} {manifest['metadata']['name']} in namespace {job.namespace}"
        if any(owner.get("uid") == job.uid for owner in owners):
            if manifest["kind"] in _MUTABLE and not _contains(found["spec"], manifest["spec"]):
                self._api.request("PATCH", path, {"spec": manifest["spec"]}, content_type=MERGE_PATCH)
            return
        if not any((owner.get("kind"), owner.get("name")) == (KIND, job.name) for owner in owners):
            raise ClusterError(f"{what} is not this job's, and its name is needed: rename the job, or remove it")
        uid = found["metadata"]["uid"]
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        self._api.request("DELETE", path, options)
        raise ConflictError(f"{what} was left by an earlier job {job.name}: it is being removed")


def _contains(found: Manifest, wanted: Manifest) -> bool:
    return all(found.get(name) == value for name, value in wanted.items())
