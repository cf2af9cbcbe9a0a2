"""Kubernetes' own gangs, where the API server serves them: the minimum of a job is placed together, or not at all.

A PodGroup of `scheduling.k8s.io` says how many pods of a group have to find a place before any of them gets one. Pods
name it in their spec, so they are of a group from the start or never.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.objects import as_mapping, at
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.core.manifests import owned_metadata
from elasticctl_controller.core.sharing.claims import DEFAULT_SCHEDULERS
from elasticctl_controller.kube.limited_api import LimitedApi

RECHECK_S = 600.0
"""After this time a cluster without PodGroups is asked again."""

log = logging.getLogger(__name__)


class Gangs:
    """Puts pods into their job's gang; thread-safe. `clock` is monotonic seconds."""

    def __init__(self, api: LimitedApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._lock = threading.Lock()
        self._served, self._ask_at = False, 0.0

    def takes(self, job: ElasticJob, pods: Iterable[Mapping[str, Any]]) -> bool:
        """True if new pods of the job, which has these `pods`, join its gang."""
        return self._is_served() and is_gang(job, pods)

    def _is_served(self) -> bool:
        with self._lock:
            if not self._served and self._clock() >= self._ask_at:
                self._ask_at = self._clock() + RECHECK_S
                self._served = self._ask_server()
            return self._served

    def _ask_server(self) -> bool:
        try:
            found = self._api.request("GET", f"/apis/{GANG_API}").get("resources", ())
        except NotFoundError:
            return False
        except ElasticctlError as e:
            log.warning("cannot find out whether the cluster has PodGroups: %s", e)
            return False
        served = any(resource.get("name") == "podgroups" for resource in found)
        if served:
            log.info("the cluster schedules gangs: the minimum of a job is placed together")
        return served


GANG_API = "scheduling.k8s.io/v1beta1"
GANG_FIELD = "schedulingGroup"


def is_gang(job: ElasticJob, pods: Iterable[Mapping[str, Any]]) -> bool:
    """True if a new pod of the job should join its gang, given the `pods` that it has.

    It should not if another scheduler places the pods, if one pod is enough, or if the template names a group. Nor
    should it while there are live pods without a group: a gang with too few members would never be placed.
    """
    spec = as_mapping(job.template.get("spec"))
    ours = str(spec.get("schedulerName") or "") in DEFAULT_SCHEDULERS
    if not ours or job.min < 2 or GANG_FIELD in spec:
        return False
    own = (pod for pod in pods if any(at(ref, "uid") == job.uid for ref in pod["metadata"].get("ownerReferences", ())))
    return all(group_of(pod) for pod in own if at(pod, "status", "phase") not in ("Succeeded", "Failed"))


def group_of(pod: Mapping[str, Any]) -> str:
    """The PodGroup of Kubernetes that a pod names; "" if it names none."""
    return str(at(pod, "spec", GANG_FIELD, "podGroupName") or "")


def join_gang(job: ElasticJob, pod: Manifest) -> Manifest:
    """The pod as a member of its job's gang."""
    return {**pod, "spec": {**pod["spec"], GANG_FIELD: {"podGroupName": gang_name(job)}}}


def gang_name(job: ElasticJob) -> str:
    """The name of the job's PodGroup, which no other job has: pods of an earlier one may still exist."""
    return f"{job.name}-{job.uid[:8]}"


def build_gang(job: ElasticJob) -> Manifest:
    """The PodGroup of the job's minimum."""
    return {
        "apiVersion": GANG_API,
        "kind": "PodGroup",
        "metadata": owned_metadata(job, gang_name(job)),
        "spec": {"schedulingPolicy": {"gang": {"minCount": max(1, job.min)}}},
    }
