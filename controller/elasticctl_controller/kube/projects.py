"""The projects of a Kubernetes cluster: their quotas, what they have spent, and the capacity that they share.

Where projects have a daily limit, a thread counts their spending every few seconds, on the replica that leads. The sum
is kept in the status of the ElasticQuota, which members of the project cannot change, so neither a restart nor the
deletion of a job reduces it.

The capacity is that of the nodes, without the GPUs that other pods hold. Jobs, nodes and pods with a worker's label are
read from the workload's watches. Other pods have a watch of their own, in which the API server sends those that are on
a node and have not ended, and only those with GPUs are kept. A pod that has a worker's label but is no job's worker
counts as one of these. The allocator is notified of relevant changes only, because training makes progress all the
time.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import Manifest, from_rfc3339, to_rfc3339
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.objects import as_mapping, at
from elasticctl.api.observed.cost import node_price
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import HELD, PLURAL, Quota
from elasticctl.api.spec import API_VERSION, GROUP, LABEL_GROUP
from elasticctl.kubeapi.connection import MERGE_PATCH, resource_path
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource, object_key
from elasticctl_controller.core.sharing.claims import slot_count
from elasticctl_controller.kube.limited_api import LimitedApi
from elasticctl_controller.kube.pods import is_placed, is_worker, job_key_of
from elasticctl_controller.kube.pruning import prune_holder, unfold_job
from elasticctl_controller.kube.workload import KubeWorkload

COUNT_S = 10.0
"""How often spending is counted: a project can overspend by what its workers cost in that time."""
WRITE_S = 60.0
"""How often a sum is written. After a failure, what was spent since then is counted again, at the current rate."""

log = logging.getLogger(__name__)


class KubeQuotas:
    """The ElasticQuotas by project, as a watch has them."""

    def __init__(self, api: LimitedApi) -> None:
        self.store = ObjectStore()
        self.reflector = Reflector(api, Resource(f"/apis/{API_VERSION}/{PLURAL}"), self.store, optional=True)

    def subscribe(self, on_change: Callable[[str], None]) -> None:
        """Call `on_change(project)` whenever the limits of a project's jobs change."""

        def changed(old: Manifest | None, new: Manifest | None) -> None:
            if at(old, "spec", "allowed") != at(new, "spec", "allowed"):
                on_change(str(at(new or old, "metadata", "name")))

        self.store.subscribe(changed)

    def of(self, project: str) -> Manifest | None:
        """Return a project's quota; None if it has none."""
        return self.store.get(project)

    def all(self) -> list[Manifest]:
        """Return every quota."""
        return self.store.items()


class Spending:
    """Counts what projects spend; `on_change(project)` is called when one may run jobs again, or no longer may."""

    def __init__(
        self,
        api: LimitedApi,
        quotas: KubeQuotas,
        workload: KubeWorkload,
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api, self._quotas, self._workload, self._clock = api, quotas, workload, clock
        self._on_change = on_change
        self._spent: dict[str, Spent] = {}
        self._written: dict[str, Spent] = {}
        self._over: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spending", daemon=True)

    def start(self) -> None:
        """Count, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and write what has been counted."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """True between `start` and `stop`; False if the thread has died, which is an error."""
        return self._thread.is_alive()

    def today(self, project: str) -> float:
        """US dollars that a project has spent today, as far as is known. Thread-safe."""
        found = self._spent.get(project) or Spent.from_status(self._quotas.of(project) or {})
        now = self._clock()
        return found.usd if found is not None and found.at >= now - now % DAY_S else 0.0

    def count(self) -> None:
        """Count once, write the sums that are due, and report the projects that have crossed their limits."""
        now = self._clock()
        limited = {quota.project: quota.allowed.usd_per_day for quota in map(Quota.from_manifest, self._quotas.all())}
        limited = {project: usd for project, usd in limited.items() if usd is not None}
        paid = rates(self._places(limited), self._workload.nodes.items(), limited) if limited else {}
        stored = {project: Spent.from_status(self._quotas.of(project) or {}) for project in limited}
        self._spent = {
            project: spend(self._spent.get(project) or stored[project], paid[project], now) for project in limited
        }
        over = {project for project, usd in limited.items() if usd is not None and self._spent[project].usd >= usd}
        changed, self._over = self._over ^ over, over
        for project in changed:
            self._on_change(project)
        for project, spent in self._spent.items():
            last = self._written.get(project)
            if project in changed or last is None or (spent.at >= last.at + WRITE_S and spent.usd != last.usd):
                self._write(project, spent)

    def _places(self, projects: dict[str, float | None]) -> Iterator[tuple[str, str, int]]:
        """The project, the node and the GPUs of each worker that holds a place on a node."""
        for manifest in self._workload.pods.cache.items():
            project = str(at(manifest, "metadata", "namespace"))
            if project in projects and is_placed(manifest):
                yield project, manifest["spec"]["nodeName"], manifest["gpus"]

    def _write(self, project: str, spent: Spent) -> None:
        path = resource_path(API_VERSION, None, PLURAL, project, "status")
        try:
            self._api.request("PATCH", path, {"status": {"spent": spent.to_status()}}, content_type=MERGE_PATCH)
        except NotFoundError:
            return  # removed just now
        self._written[project] = spent

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.count()
            except ElasticctlError as e:
                log.warning("spending: %s; retrying", e)
            except Exception:  # the edge of the thread: log, go on
                log.exception("spending: it could not be counted; retrying")
            self._stopping.wait(COUNT_S)


def jobs_of(workload: KubeWorkload, project: str) -> list[str]:
    """The keys of a project's jobs."""
    found = (as_mapping(job.get("metadata")) for job in workload.jobs.items())
    return [f"{project}/{meta.get('name')}" for meta in found if meta.get("namespace") == project]


HOUR_S, DAY_S = 3600.0, 86_400.0


@dataclass(frozen=True, slots=True)
class Spent:
    """US dollars that a project has spent on the day (UTC) of `at`, up to `at`, in seconds since the epoch."""

    usd: float
    at: float

    @classmethod
    def from_status(cls, quota: Mapping[str, Any]) -> Spent | None:
        """Read the status of an ElasticQuota; None if it is missing or invalid."""
        usd, when = at(quota, "status", "spent", "usd"), from_rfc3339(at(quota, "status", "spent", "at"))
        if not isinstance(usd, int | float) or isinstance(usd, bool) or not usd >= 0 or when is None:
            return None
        return cls(float(usd), when)

    def to_status(self) -> dict[str, Any]:
        """`status.spent` as it is stored."""
        stamp = to_rfc3339(self.at)
        return {"day": stamp[:10], "usd": round(self.usd, 4), "at": stamp}


def spend(before: Spent | None, usd_per_hour: float, now: float) -> Spent:
    """What has been spent by `now`, at this rate since `before`. Each day (UTC) starts at 0.

    Time in which spending was not counted, because no controller was leading, is charged at the current rate.
    """
    today = now - now % DAY_S
    if before is None:
        return Spent(0.0, now)
    carried = before.usd if before.at >= today else 0.0
    return Spent(carried + usd_per_hour * max(0.0, now - max(before.at, today)) / HOUR_S, max(now, before.at))


def rates(pods: Iterable[tuple[str, str, int]], nodes: Iterable[Manifest], projects: Iterable[str]) -> dict[str, float]:
    """US dollars per hour of each project, for `pods` of (project, node, GPUs) that hold a place on a node.

    A worker pays for its share of the node's GPUs; one without GPUs, on a machine that has a price, for all of it. No
    project pays more for a node than it costs. Nodes without a known price cost nothing.
    """
    prices = {str(at(node, "metadata", "name")): _price(node) for node in nodes}
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    found = dict.fromkeys(projects, 0.0)
    for project, node, gpus in pods:
        if project in found and node in prices:
            _, present = prices[node]
            shares[project, node] += gpus / present if gpus and present else 1.0
    for (project, node), share in shares.items():
        found[project] += min(1.0, share) * prices[node][0]
    return found


def _price(node: Manifest) -> tuple[float, int]:
    """US dollars per hour of a node, and its GPUs."""
    gpus = slot_count(at(node, "status", "allocatable", GPU_RESOURCE))
    return node_price(as_mapping(at(node, "metadata", "labels")), gpus) or 0.0, gpus


_PROGRESS_FIELDS = (
    "progress",
    "checkpoint",
    "generations",
    "curve",
    "usage",
    "usageHistory",
    "lastReconcileTime",
    "stepsRedone",
    "growth",
)
"""Fields of a status that change because training makes progress, and for no other reason."""
OTHER_PODS = Resource(
    "/api/v1/pods",
    labels=f"{LABEL_GROUP}!={GROUP}",
    fields="spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed",
)
"""Pods that are on a node and are not workers."""


class KubeCapacity:
    """`elasticctl_controller.loop.allocator.SharedCluster` over an API server."""

    def __init__(self, api: LimitedApi, workload: KubeWorkload, quotas: KubeQuotas) -> None:
        self._workload, self._quotas = workload, quotas
        self._holders = ObjectStore(prune_holder, keep=lambda pod: pod["gpus"] > 0)
        self.reflector = Reflector(api, OTHER_PODS, self._holders)

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever the division of capacity may change."""

        def job_changed(old: Manifest | None, new: Manifest | None) -> None:
            if old is None or new is None or _without_progress(old) != _without_progress(new):
                on_change()

        def pod_changed(old: Manifest | None, new: Manifest | None) -> None:
            if self._is_pretender(new or old or {}):
                on_change()

        self._workload.jobs.subscribe(job_changed)
        self._workload.nodes.subscribe(lambda old, new: on_change())
        self._quotas.store.subscribe(lambda old, new: on_change())
        self._holders.subscribe(lambda old, new: on_change())
        self._workload.pods.cache.subscribe(pod_changed)

    def all_jobs(self) -> Iterator[Manifest]:
        """Return every job, one at a time: they may be large."""
        return map(unfold_job, self._workload.jobs.items())

    def healthy_nodes(self) -> list[Manifest]:
        """Return the nodes that are not lost; `status.held` is what other pods hold of one."""
        lost = self._workload.lost_nodes()
        held = Counter[str]()
        pretenders = filter(self._is_pretender, self._workload.pods.cache.items())
        for pod in itertools.chain(self._holders.items(), filter(is_placed, pretenders)):
            held[pod["spec"].get("nodeName", "")] += pod["gpus"]
        nodes = [node for node in self._workload.nodes.items() if object_key(node) not in lost]
        return [_with_held(node, held[object_key(node)]) for node in nodes]

    def quotas(self) -> list[Manifest]:
        """Return every ElasticQuota."""
        return self._quotas.all()

    def _is_pretender(self, pod: Manifest) -> bool:
        """True for a pod that holds GPUs and has a worker's label, but is no worker of a job that there is."""
        return pod["gpus"] > 0 and not is_worker(pod, self._workload.jobs.get(job_key_of(pod)))


def _with_held(node: Manifest, gpus: int) -> Manifest:
    return {**node, "status": {**node["status"], HELD: {GPU_RESOURCE: gpus}}} if gpus else node


def _without_progress(job: Manifest) -> Mapping[str, Any]:
    """The job without its progress and its version."""
    status = {key: value for key, value in job.get("status", {}).items() if key not in _PROGRESS_FIELDS}
    metadata = {**job.get("metadata", {}), "resourceVersion": ""}
    return {"metadata": metadata, "spec": job.get("spec"), "status": status}
