"""What happens to a job, and what it cost by the steps that its workers have written down."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clusterload import Missing, until
from benchmarks.peers.contenders import NAME, NAMESPACE, WORKERS, Contender
from benchmarks.timeline import Expected, Outcome, Step, outcome
from benchmarks.trials import StepsFile, is_steady
from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path

LAB = os.environ.get("ELASTICCTL_TEST_LAB", "")
KEPT, STRUCK = "node-1", "node-2"
"""The operator's pod is on the first, and what happens to a node happens to the second."""
DRAINED, SILENT = "a node is drained", "a node is silent"
STEADY_LIMIT_S, LIMIT_S = 240.0, 240.0
RECENT_S = 600.0
AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class Happened:
    """`cost` is None for a job that did not train again within the limit."""

    contender: str
    event: str
    cost: Outcome | None


class Job:
    """A contender's job on the cluster."""

    def __init__(self, api: Connection, contender: Contender, folder: Path) -> None:
        self._api, self._contender, self._folder = api, contender, folder
        self._steps = StepsFile(folder / "steps")

    def happens(self, event: str, settle_s: float) -> Happened:
        """Let the event happen once all train, and mend what is broken when it is over."""
        world = WORKERS - 1 if event == "scaled up" else WORKERS
        until(lambda: is_steady(self._recent(), world, time.time(), settle_s), STEADY_LIMIT_S, f"{world} that train")
        expected = {
            "scaled down": Expected(WORKERS - 1, smaller_counts=False),
            "scaled up": Expected(WORKERS, smaller_counts=False),
        }.get(event, Expected(WORKERS))
        at = time.time()
        EVENTS[event](self)
        cost: Outcome | None = None
        try:
            until(lambda: self._is_over(at, expected), LIMIT_S, f"steps after: {event}")
            cost = outcome(self._recent(), at, expected)
        except Missing:
            cost = None
        finally:
            self._mend(event)
        return Happened(self._contender.name, event, cost)

    def delete_pod(self) -> None:
        """A pod is gone without grace: not the first, which has the store of a PyTorchJob with its defaults."""
        pods = sorted(pod["metadata"]["name"] for pod in self._pods())
        self._api.request("DELETE", resource_path("v1", NAMESPACE, "pods", pods[1]), {"gracePeriodSeconds": 0})

    def silence_node(self) -> None:
        """A node is gone without a word."""
        subprocess.run([LAB, "kill-node", STRUCK], check=True, capture_output=True, timeout=60)

    def drain_node(self) -> None:
        """A node is drained, as for a reclaim with notice; this goes on while workers leave."""
        argv = ["kubectl", "drain", STRUCK, "--ignore-daemonsets", "--force", "--delete-emptydir-data"]
        self._draining = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def scale(self, workers: int) -> None:
        """Ask for so many."""
        path = f"{self._contender.path}/{NAME}"
        self._api.request("PATCH", path, self._contender.size(workers), content_type=MERGE_PATCH)

    def _is_over(self, at: float, expected: Expected) -> bool:
        found = outcome(self._recent(), at, expected)
        return found.first_step_s is not None and (found.last_step_s or 0.0) >= found.first_step_s + AFTER_S

    def _mend(self, event: str) -> None:
        if event == SILENT:  # a second start of a node that lives would leave the first one's processes behind
            subprocess.run([LAB, "start-node", STRUCK], check=True, capture_output=True, timeout=120)
        if event == DRAINED:
            subprocess.run(["kubectl", "uncordon", STRUCK], check=True, capture_output=True, timeout=60)
        until(self._is_ready, 90, f"{STRUCK}, ready")

    def _is_ready(self) -> bool:
        node = self._api.request("GET", resource_path("v1", None, "nodes", STRUCK))
        ready = {item["type"]: item["status"] for item in node["status"]["conditions"]}.get("Ready") == "True"
        return ready and not node["spec"].get("unschedulable")

    def _recent(self) -> list[Step]:
        since = time.time() - RECENT_S
        return [step for step in self._steps.read() if step.at > since]

    def _pods(self) -> list[Manifest]:
        params = {"labelSelector": self._contender.pods}
        found: list[Manifest] = self._api.request("GET", resource_path("v1", NAMESPACE, "pods"), None, params)["items"]
        return found

    def create(self) -> None:
        """Submit it."""
        self._api.request("POST", self._contender.path, self._contender.manifest)

    def delete(self) -> None:
        """Have nothing of it any more."""
        with suppress(NotFoundError):
            self._api.request("DELETE", f"{self._contender.path}/{NAME}", {"propagationPolicy": "Foreground"})
        until(lambda: not self._pods(), 120, "the end of the job")


EVENTS: dict[str, Callable[[Job], None]] = {
    "a pod is deleted": Job.delete_pod,
    DRAINED: Job.drain_node,
    SILENT: Job.silence_node,
    "scaled down": lambda job: job.scale(WORKERS - 1),
    "scaled up": lambda job: job.scale(WORKERS),
}


@contextmanager
def running(api: Connection, contender: Contender, folder: Path) -> Iterator[Job]:
    """The contender's job, in a folder that is empty at first."""
    for item in folder.iterdir():
        shutil.rmtree(item) if item.is_dir() else item.unlink()
    job = Job(api, contender, folder)
    job.delete()
    job.create()
    try:
        yield job
    finally:
        job.delete()
