"""What happens to a job, and what it cost, by the steps that its workers have recorded."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import NotInTime, until
from benchmarks.recovery.timeline import ExpectedGroup, Outcome, RecordedStep, current_group, outcome
from benchmarks.recovery.trials import StepsFile, is_steady
from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from tests.on_cluster.commands import LAB

NAME, NAMESPACE, WORKERS = "peers", "default", 3
DRAINED, SILENT = "a node is drained", "a node is silent"
STEADY_LIMIT_S, LIMIT_S = 240.0, 150.0
SPREAD_LIMIT = 5
RECENT_S = 600.0
AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class JobContender:
    """`path` is where its jobs are, `replicas` returns the patch that sets their number of workers."""

    name: str
    path: str
    replicas: tuple[str, ...]
    pods: str
    manifest: Manifest = field(default_factory=dict)

    def size(self, workers: int) -> Manifest:
        """Return the patch that scales the job."""
        patch: Any = {"replicas": workers}
        for name in reversed(self.replicas):
            patch = {name: patch}
        return {"spec": patch}


class ContenderJob:
    """A contender's job on the cluster."""

    def __init__(self, api: Connection, contender: JobContender, folder: Path) -> None:
        self._api, self._contender, self._folder = api, contender, folder
        self._steps = StepsFile(folder / "steps")
        self._target = ""

    def cause(self, event: str, settle_s: float) -> Outcome | None:
        """Cause the event once all train, and repair what is broken when it is over; None: it did not recover."""
        world = WORKERS - 1 if event == "scaled up" else WORKERS
        self.scale(world)
        try:
            self._wait_steady(world, settle_s)
        except NotInTime:  # it has not recovered from the event before
            self.recreate()
            self.scale(world)
            self._wait_steady(world, settle_s)
        if event in (DRAINED, SILENT):
            self._spread(world, settle_s)
        expected = {
            "scaled down": ExpectedGroup(WORKERS - 1, smaller_counts=False),
            "scaled up": ExpectedGroup(WORKERS, smaller_counts=False),
        }.get(event, ExpectedGroup(WORKERS))
        at = time.time()
        EVENTS[event](self)
        try:
            until(lambda: self._is_over(at, expected), LIMIT_S, f"steps after: {event}")
            return outcome(self._recent(), at, expected)
        except NotInTime:
            return None
        finally:
            self._repair(event)

    def delete_pod(self) -> None:
        """Delete a pod without grace: not the first, which hosts the store of a PyTorchJob with its defaults."""
        self._delete_pod(self._staying()[1])

    def silence_node(self) -> None:
        """End a node without notice."""
        subprocess.run([LAB, "kill-node", self._target], check=True, capture_output=True, timeout=60)

    def drain_node(self) -> None:
        """Drain a node, as for a reclaim with notice; this continues while workers leave."""
        argv = ["kubectl", "drain", self._target, "--ignore-daemonsets", "--force", "--delete-emptydir-data"]
        self._draining = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def scale(self, workers: int) -> None:
        """Request that many workers."""
        self._api.request("PATCH", self._path, self._contender.size(workers), content_type=MERGE_PATCH)

    def _wait_steady(self, world: int, settle_s: float, but: str = "") -> None:
        """Wait until that many have trained for a while, in another group than `but`."""

        def steady() -> bool:
            steps = self._recent()
            return is_steady(steps, world, time.time(), settle_s) and current_group(steps)[0].group != but

        until(steady, STEADY_LIMIT_S, f"{world} that train")

    def _spread(self, world: int, settle_s: float) -> None:
        """Return a node to end: one with workers, but not with the first one (see `delete_pod`)."""
        for _ in range(SPREAD_LIMIT):
            first, *others = (pod["spec"].get("nodeName", "") for pod in self._staying())
            self._target = next((node for node in others if node and node != first), "")
            if self._target:
                return
            group = current_group(self._recent())[0].group
            self._delete_pod(self._staying()[-1])
            self._wait_steady(world, settle_s, but=group)
        raise NotInTime("a node without the first worker, but with another")

    def _delete_pod(self, pod: Manifest) -> None:
        path = resource_path("v1", NAMESPACE, "pods", pod["metadata"]["name"])
        self._api.request("DELETE", path, {"gracePeriodSeconds": 0})

    def _is_over(self, at: float, expected: ExpectedGroup) -> bool:
        found = outcome(self._recent(), at, expected)
        return found.first_step_s is not None and (found.last_step_s or 0.0) >= found.first_step_s + AFTER_S

    def _repair(self, event: str) -> None:
        if event == SILENT:  # starting a node that is alive would leave the processes of the first start running
            subprocess.run([LAB, "start-node", self._target], check=True, capture_output=True, timeout=120)
        if event == DRAINED:
            subprocess.run(["kubectl", "uncordon", self._target], check=True, capture_output=True, timeout=60)
        if self._target:
            until(self._is_ready, 90, f"{self._target}, ready")
            self._target = ""

    def _is_ready(self) -> bool:
        node = self._api.request("GET", resource_path("v1", None, "nodes", self._target))
        ready = {item["type"]: item["status"] for item in node["status"]["conditions"]}.get("Ready") == "True"
        return ready and not node["spec"].get("unschedulable")

    def _recent(self) -> list[RecordedStep]:
        since = time.time() - RECENT_S
        return [step for step in self._steps.read() if step.at > since]

    def _pods(self) -> list[Manifest]:
        params = {"labelSelector": self._contender.pods}
        found: list[Manifest] = self._api.request("GET", resource_path("v1", NAMESPACE, "pods"), None, params)["items"]
        return sorted(found, key=lambda pod: int(pod["metadata"]["name"].rpartition("-")[2]))

    def _staying(self) -> list[Manifest]:
        return [pod for pod in self._pods() if "deletionTimestamp" not in pod["metadata"]]

    def recreate(self) -> None:
        """Create the job again, in place of one that does not train any more."""
        self.delete()
        _empty(self._folder)
        self._steps = StepsFile(self._folder / "steps")
        self.create()

    def create(self) -> None:
        """Submit it."""
        self._api.request("POST", self._contender.path, self._contender.manifest)

    def delete(self) -> None:
        """Delete it and everything that belongs to it; both are gone when this returns."""
        with suppress(NotFoundError):
            self._api.request("DELETE", self._path, {"propagationPolicy": "Foreground"})
        until(lambda: not self._pods() and self._is_gone(), 120, "the end of the job")

    @property
    def _path(self) -> str:
        return f"{self._contender.path}/{NAME}"

    def _is_gone(self) -> bool:
        try:
            self._api.request("GET", self._path)
        except NotFoundError:
            return True
        return False


EVENTS: dict[str, Callable[[ContenderJob], None]] = {
    "a pod is deleted": ContenderJob.delete_pod,
    DRAINED: ContenderJob.drain_node,
    SILENT: ContenderJob.silence_node,
    "scaled down": lambda job: job.scale(WORKERS - 1),
    "scaled up": lambda job: job.scale(WORKERS),
}


@contextmanager
def running(api: Connection, contender: JobContender, folder: Path) -> Iterator[ContenderJob]:
    """Run the contender's job, in a folder that is empty at first."""
    job = ContenderJob(api, contender, folder)
    job.recreate()
    try:
        yield job
    finally:
        job.delete()


def _empty(folder: Path) -> None:
    for item in folder.iterdir():
        shutil.rmtree(item) if item.is_dir() else item.unlink()
