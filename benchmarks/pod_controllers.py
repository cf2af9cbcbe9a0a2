"""Controllers that keep many pods of one object alive: ours, the Job controller and JobSet, at the same work.

`compare` measures each in turns. Their pods wait for a scheduler that does not exist.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from benchmarks.cluster import ELASTIC_JOBS, NAMESPACE, NOBODY, Load, elastic_job, names, template, until
from benchmarks.figures import in_turns, progress
from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.api.objects import at
from elasticctl.api.spec import ElasticJob
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from elasticctl_controller.core.manifests import build_pod, harden

LIMIT_S = 300.0
OURS, JOB_CONTROLLER = "elasticctl", "the Job controller"
JOBSET_API = "jobset.x-k8s.io/v1alpha2"
_JOBS = resource_path("batch/v1", NAMESPACE, "jobs")
_JOBSETS = resource_path(JOBSET_API, NAMESPACE, "jobsets")


class PodController(Protocol):
    """One contender, and its objects in the benchmark's namespace."""

    name: str
    objects: str
    """The path of its objects on the API server."""
    backs_off: bool
    """Whether deleted pods count as failures, after which it waits 10 s, then 20 s, up to 10 minutes."""

    def create(self, name: str, pods: int) -> None:
        """Create an object that wants this number of pods."""

    def scale(self, name: str, pods: int) -> bool:
        """Have it want another number; False if such objects cannot be scaled."""

    def reported(self, name: str) -> int:
        """The number of its pods according to its status."""


class ElasticJobs:
    """Our ElasticJobs."""

    name, objects, backs_off = OURS, ELASTIC_JOBS, False

    def __init__(self, load: Load, api: Connection) -> None:
        self._load, self._api = load, api

    def create(self, name: str, pods: int) -> None:
        self._load.create_ours(name, pods, most=2 * pods, schedulerName=NOBODY)

    def scale(self, name: str, pods: int) -> bool:
        self._load.scale(name, pods)
        return True

    def reported(self, name: str) -> int:
        return int(at(self._api.request("GET", f"{ELASTIC_JOBS}/{name}"), "status", "replicas") or 0)


class Jobs:
    """Kubernetes' Jobs, with bare pods, or with pods that are as large as our workers (`alike`)."""

    objects, backs_off = _JOBS, True

    def __init__(self, load: Load, api: Connection, *, alike: bool) -> None:
        self._load, self._api, self._alike = load, api, alike
        self.name = JOB_CONTROLLER + (", pods like ours" if alike else "")

    def create(self, name: str, pods: int) -> None:
        self._load.create(_JOBS, "batch/v1", "Job", name, job_spec(pods, self._alike))

    def scale(self, name: str, pods: int) -> bool:
        self._api.request("PATCH", f"{_JOBS}/{name}", {"spec": {"parallelism": pods}}, content_type=MERGE_PATCH)
        return True

    def reported(self, name: str) -> int:
        return int(at(self._api.request("GET", f"{_JOBS}/{name}"), "status", "active") or 0)


class JobSets:
    """JobSets of one Job, with pods that are as large as our workers."""

    name, objects, backs_off = "JobSet, pods like ours", _JOBSETS, True

    def __init__(self, load: Load, api: Connection) -> None:
        self._load, self._api = load, api

    def create(self, name: str, pods: int) -> None:
        spec = {"replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job_spec(pods, True)}}]}
        self._load.create(_JOBSETS, JOBSET_API, "JobSet", name, spec)

    def scale(self, name: str, pods: int) -> bool:
        return False

    def reported(self, name: str) -> int:
        """The number of pods according to the Job's status: that of the JobSet counts Jobs."""
        return int(at(self._api.request("GET", f"{_JOBS}/{name}-workers-0"), "status", "active") or 0)


def job_spec(pods: int, alike: bool) -> Manifest:
    """The spec of a Job of so many parallel pods, which can be scaled to twice as many."""
    pod = template(schedulerName=NOBODY)["spec"]
    if alike:
        made = {"metadata": {"name": "alike", "namespace": NAMESPACE}, "spec": elastic_job(1, 1, {"spec": pod})}
        worker = harden(build_pod(ElasticJob.from_manifest(made), 0, "http://10.88.0.1:7777"))
        pod = {key: value for key, value in worker["spec"].items() if key not in ("hostname", "subdomain")}
    made_of = {"spec": {**pod, "restartPolicy": "Never"}}
    return {"parallelism": pods, "completions": 2 * pods, "template": made_of}


def contenders(load: Load, api: Connection) -> list[PodController]:
    """Ours, the Job controller with either kind of pods, and JobSet where it is installed."""
    found: list[PodController] = [ElasticJobs(load, api), Jobs(load, api, alike=False), Jobs(load, api, alike=True)]
    with suppress(NotFoundError):
        api.request("GET", _JOBSETS)
        found.append(JobSets(load, api))
    return found


def time_each(load: Load, who: PodController, jobs: int, each: int) -> Iterator[tuple[str, float]]:
    """Have one contender create pods, report them, replace a tenth of them if it does, and create some more.

    Yields each piece of work with its seconds.
    """
    wanted, title = list(names("contest", jobs)), f"{jobs} x {each}"
    began = time.monotonic()
    for name in wanted:
        who.create(name, each)
    until(lambda: len(load.pods) == jobs * each, LIMIT_S, f"the pods of {title}, {who.name}")
    yield f"{title}: all pods created", load.pods.last_created_at - began
    until(lambda: all(who.reported(name) == each for name in wanted), LIMIT_S, f"the status of {title}, {who.name}")
    yield f"{title}: until the status reports it", time.monotonic() - began
    if not who.backs_off:
        began = time.monotonic()
        gone = _delete_tenth(load)
        until(lambda: _are_back(load, jobs * each, gone), LIMIT_S, f"the lost pods of {title}, {who.name}")
        yield f"{title}: a tenth deleted, all created again", load.pods.last_created_at - began
    began, more = time.monotonic(), each + each // 10
    if all(who.scale(name, more) for name in wanted):
        until(lambda: len(load.pods) == jobs * more, LIMIT_S, f"more pods of {title}, {who.name}")
        yield f"{title}: scaled up by a tenth", load.pods.last_created_at - began
    load.clear(who.objects)


def _delete_tenth(load: Load) -> set[str]:
    former = load.pods.uids()
    lost = sorted(former)[::10]
    with ThreadPoolExecutor(16) as calls:
        list(calls.map(load.delete_pod, lost))
    return {former[name] for name in lost}


def _are_back(load: Load, count: int, gone: set[str]) -> bool:
    uids = load.pods.uids().values()
    return len(uids) == count and gone.isdisjoint(uids)


def compare(
    load: Load, api: Connection, shapes: Sequence[tuple[int, int]], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Measure all contenders in turns; return piece of work -> contender -> seconds of each round."""
    found: dict[str, dict[str, list[float]]] = {}
    for jobs, each in shapes:
        for _, who in in_turns(contenders(load, api), repeats):
            for work, took_s in time_each(load, who, jobs, each):
                progress(f"{work}, {who.name}: {took_s:.2f} s")
                found.setdefault(work, {}).setdefault(who.name, []).append(took_s)
    return found
