"""A cluster of a few dictionaries, for what is tested without a real one: refusals, races, a thousand jobs."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elasticctl.api.errors import ConflictError, ElasticctlError, ForbiddenError, NotFoundError
from elasticctl.api.quota import Quota
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.worker_access import Streams
from tests.support.job_samples import job


class Jobs:
    """The part of `Cluster` that the dashboard uses. `trouble` is raised by every call; `asked` counts the lists.

    What is in `forbidden` ("quotas", "all jobs") must not be listed.
    """

    def __init__(self, *manifests: Manifest, quotas: Sequence[Quota] = (), forbidden: Collection[str] = ()) -> None:
        self.jobs = {manifest["metadata"]["name"]: manifest for manifest in manifests}
        self.quotas, self.forbidden = list(quotas), set(forbidden)
        self.trouble: ElasticctlError | None = None
        self.asked = 0
        self.in_between: Manifest | None = None
        self.pods: list[Manifest] = []

    def change(self, name: str, **status: Any) -> None:
        """Give these fields of a job's status other values."""
        changed = copy.deepcopy(self.jobs[name])
        changed["status"] |= status
        changed["metadata"]["resourceVersion"] += "1"
        self.jobs[name] = changed

    def list_jobs(self, namespace: str | None) -> list[Manifest]:
        self.asked += 1
        if self.trouble:
            raise self.trouble
        if namespace is None and "all jobs" in self.forbidden:
            raise ForbiddenError("jo may not list elasticjobs")
        jobs = [found for found in list(self.jobs.values()) if namespace in (None, found["metadata"]["namespace"])]
        return jobs

    def list_quotas(self) -> list[Manifest]:
        if self.trouble:
            raise self.trouble
        if "quotas" in self.forbidden:
            raise ForbiddenError("jo may not list elasticquotas")
        return [quota.to_manifest() for quota in self.quotas]

    def get_job(self, namespace: str, name: str) -> Manifest:
        if name not in self.jobs or self.jobs[name]["metadata"]["namespace"] != namespace:
            raise NotFoundError(f"there is no job {name}")
        return copy.deepcopy(self.jobs[name])

    def patch_job(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        if self.in_between:
            self.jobs[name], self.in_between = self.in_between, None
        stored = self.jobs[name]
        if patch["metadata"]["resourceVersion"] != stored["metadata"]["resourceVersion"]:
            raise ConflictError(f"{name} has changed since")
        stored["metadata"]["resourceVersion"] += "1"
        stored["metadata"].setdefault("annotations", {}).update(patch["metadata"].get("annotations", {}))
        spec = dict(patch["spec"])
        stored["spec"]["replicaSpecs"]["Worker"] |= spec.pop("replicaSpecs", {}).get("Worker", {})
        stored["spec"] |= spec
        return copy.deepcopy(stored)

    def list_pods(self, namespace: str, job: str) -> list[Manifest]:
        return []

    def pods_of(self, jobs: Sequence[ElasticJob]) -> dict[str, list[Manifest]]:
        return {job.uid: self.pods for job in jobs}


class Looked:
    """The inside of workers whose launchers see one rank each, with a thread of its own; `worker-1` cannot look."""

    def run(self, worker: Manifest, argv: Sequence[str], streams: Streams) -> int:
        name = worker["metadata"]["name"]
        assert list(argv) == ["elasticctl-launch", "--stacks"]
        if name.endswith("-1"):
            os.write(streams.stderr, b"Yama says no")
            return 1
        frames = [{"function": "step", "file": "train.py", "line": 7}]
        threads = [{"pid": 5, "thread": name, "frames": frames} for name in ("feeder", "MainThread")]
        os.write(streams.stdout, json.dumps({"ranks": [{"rank": 0, "stacks": threads}]}).encode())
        return 0


def launched(name: str = "digits") -> Manifest:
    """A job that runs under the launcher."""
    found = job(name)
    worker = found["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    worker["command"] = ["elasticctl-launch", "--", "python", "train.py"]
    return found


def pod(name: str, phase: str = "Running") -> Manifest:
    """A pod as far as its phase."""
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "status": {"phase": phase}}


def sharing(name: str, project: str, workers: int, message: str, **share: Any) -> Manifest:
    """A job of a namespace that has so many of eight T4 with what `message` says of it; with none it waits."""
    status = {"workers": workers, "pool": "t4", "poolSlots": 8 if workers else 0, "message": message, **share}
    found = job(name, phase="Running" if workers else "Pending", active=workers, share=status)
    found["metadata"]["namespace"] = project
    return found


def many(number: int) -> list[Manifest]:
    """So many jobs, every other of which has ended."""
    return [job(f"job-{n:04}", **({"phase": "Succeeded"} if n % 2 else {})) for n in range(number)]
