"""Kueue's objects on an API server: Workloads of ours, flavors and priority classes, read and written raw.

Nothing of it is asked for until a job names a queue. From then on two watches, of our own Workloads and of the few
flavors, keep what is read here; every write's answer is believed at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from elasticctl.cluster.kube.connection import MERGE_PATCH, resource_path
from elasticctl.cluster.kube.limiter import LimitedApi
from elasticctl.cluster.kube.pruning import prune_flavor, prune_workload
from elasticctl.cluster.kube.reflector import Reflector, Resource
from elasticctl.cluster.kube.store import ObjectStore
from elasticctl.codec import Manifest
from elasticctl.errors import ClusterError, ConflictError, NotFoundError
from elasticctl.spec import GROUP, KIND, KUEUE, LABEL_GROUP

VERSIONS = ("v1beta1", "v1beta2")
"""In the order in which they are looked for: the first is served by most clusters, and by all that are not new."""
RECHECK_S = 60.0
"""A cluster without Kueue is asked again after this time."""
FIRST_LIST_S = 5.0
WORKLOADS, FLAVORS = "workloads", "resourceflavors"

log = logging.getLogger(__name__)


class KueueObjects:
    """Thread-safe; `on_change(key)` hears of each job whose Workload has changed. `clock` is monotonic seconds."""

    def __init__(
        self, api: LimitedApi, on_change: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._on_change, self._clock = api, on_change, clock
        self._lock = threading.Lock()
        self._version, self._look_at = "", 0.0
        self._workloads, self._flavors = ObjectStore(prune_workload), ObjectStore(prune_flavor)
        self.reflectors: tuple[Reflector, ...] = ()

    def version(self) -> str:
        """The version of Kueue's API that is used; "" where it is not served.

        Raises ClusterError until what there is has been listed.
        """
        with self._lock:
            if not self._version and self._clock() >= self._look_at:
                self._version = next(filter(self._serves, VERSIONS), "")
                self._look_at = self._clock() + RECHECK_S
                if self._version:
                    self._watch()
        if not all(reflector.wait_synced(0) for reflector in self.reflectors):
            raise ClusterError(f"Kueue's {WORKLOADS} and {FLAVORS} are not listed yet; see the controller's log")
        return self._version

    @property
    def api_version(self) -> str:
        """`GROUP/VERSION` of Kueue's objects."""
        return f"{KUEUE}/{self._version}"

    def stop(self) -> None:
        """End the watches, if there are any."""
        with self._lock:
            for reflector in self.reflectors:
                reflector.stop()

    def workload(self, namespace: str, name: str) -> Manifest | None:
        """A Workload of ours; None when there is none."""
        return self._workloads.get(f"{namespace}/{name}")

    def flavor(self, name: str) -> Manifest | None:
        """A ResourceFlavor; None when there is none."""
        return self._flavors.get(name)

    def priority(self, name: str, *, of_pods: bool) -> int:
        """The value of a priority class, of pods' or of Kueue's own; NotFoundError when there is none."""
        api, plural = (self.api_version, "workloadpriorityclasses")
        if of_pods:
            api, plural = ("scheduling.k8s.io/v1", "priorityclasses")
        value = self._api.request("GET", resource_path(api, None, plural, name)).get("value")
        return value if isinstance(value, int) else 0

    def create(self, workload: Manifest) -> None:
        """Create a Workload; ConflictError when it is there."""
        path = resource_path(self.api_version, workload["metadata"]["namespace"], WORKLOADS)
        self._workloads.learn(self._api.request("POST", path, workload))

    def patch(self, workload: Manifest, patch: Manifest) -> None:
        """Change a Workload; ConflictError when it is another one by now, or gone."""
        self._patch(workload, patch, "")

    def patch_status(self, workload: Manifest, patch: Manifest) -> None:
        """Change its status; ConflictError when it has changed since the version that the patch names."""
        self._patch(workload, patch, "status")

    def delete(self, workload: Manifest) -> None:
        """Delete this very Workload; fine when it is gone."""
        metadata = workload["metadata"]
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": metadata["uid"]}}
        with suppress(NotFoundError, ConflictError):
            self._api.request("DELETE", self._path(workload), options)
        self._workloads.forget(f"{metadata['namespace']}/{metadata['name']}", metadata["uid"])

    def _patch(self, workload: Manifest, patch: Manifest, part: str) -> None:
        body = {**patch, "metadata": {"uid": workload["metadata"]["uid"], **patch.get("metadata", {})}}
        try:
            answer = self._api.request("PATCH", self._path(workload, part), body, content_type=MERGE_PATCH)
        except NotFoundError as e:
            raise ConflictError(f"Workload {workload['metadata']['name']} is gone") from e
        self._workloads.learn(answer)

    def _path(self, workload: Manifest, part: str = "") -> str:
        metadata = workload["metadata"]
        return resource_path(self.api_version, metadata["namespace"], WORKLOADS, metadata["name"], part)

    def _serves(self, version: str) -> bool:
        try:
            self._api.request("GET", f"/apis/{KUEUE}/{version}")
        except NotFoundError:
            return False
        return True

    def _watch(self) -> None:
        log.info("a job names a queue: Kueue's %s are watched", self.api_version)
        root = f"/apis/{self.api_version}"
        reflectors = (
            Reflector(self._api, Resource(f"{root}/{WORKLOADS}", f"{LABEL_GROUP}={GROUP}"), self._workloads),
            Reflector(self._api, Resource(f"{root}/{FLAVORS}"), self._flavors),
        )
        for reflector in reflectors:
            reflector.start()
        until = self._clock() + FIRST_LIST_S
        for reflector in reflectors:
            reflector.wait_synced(max(0.0, until - self._clock()))
        self.reflectors = reflectors
        self._workloads.subscribe(self._changed)

    def _changed(self, old: Manifest | None, new: Manifest | None) -> None:
        metadata = (new or old or {})["metadata"]
        for owner in metadata.get("ownerReferences", ()):
            if owner.get("kind") == KIND:
                self._on_change(f"{metadata['namespace']}/{owner.get('name')}")
