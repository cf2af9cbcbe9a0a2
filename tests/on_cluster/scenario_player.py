"""Run random scenarios under an arrangement on a cluster, and measure how the jobs come to rest after each event."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.api.spec import GROUP, LABEL_GROUP, LABEL_JOB
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import Connection
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource
from tests.on_cluster.arrangements import FOLDER, Arrangement, manifest, stage
from tests.on_cluster.random_jobs import EVENTS, PROJECTS, Event, Job, Rest, Scenario, Stand, judge
from tests.on_cluster.waiting import wait_until

POLL_S = 0.1
CALM_S = 1.0
"""How long an ideal state has to last."""
STILL_S = 12.0
"""Jobs count as at rest after this long without a change of any pod, even if the state is not ideal."""
LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Settled:
    """How the jobs came to rest after an event: the last pod changed after `settled_s`, and pods hold `held` GPUs."""

    event: str
    settled_s: float
    rest: Rest
    held: int
    stands: str


class ScenarioPlayer:
    """One cluster under one arrangement. `still_s`: see STILL_S."""

    def __init__(self, api: Connection, arrangement: Arrangement, still_s: float = STILL_S) -> None:
        self._arrangement, self._still_s = arrangement, still_s
        self._cluster = KubeCluster(api)
        self._store = ObjectStore(_prune)
        self._changed_at = time.monotonic()
        self._store.subscribe(self._note_change)
        self._reflector = Reflector(api, Resource("/api/v1/pods", f"{LABEL_GROUP}={GROUP}"), self._store)
        self._made: set[str] = set()

    def play(self, seed: int, events: int = EVENTS) -> Iterator[Settled]:
        """Run one scenario, starting with an empty cluster; yield how jobs came to rest after each event.

        Raises TimeoutError if they never do.
        """
        self.clear()
        scenario = Scenario(seed)
        for _ in range(events):
            event = scenario.next()
            at = time.monotonic()
            self._do(event)
            yield self._come_to_rest(event, at, scenario)

    def clear(self) -> None:
        """Remove all jobs and their pods."""
        for project in PROJECTS:
            for job in self._cluster.list_jobs(project):
                self._cluster.delete_job(project, job["metadata"]["name"])
        wait_until(lambda: not self._store.items())
        self._made.clear()

    def _do(self, event: Event) -> None:
        job = event.job
        runs = self._has(job) >= job.least
        if event.kind == "submit":
            self._submit(job)
        elif event.kind == "finish" and runs:
            Path(FOLDER / f"{job.name}.over").touch()
        elif event.kind in ("delete", "finish"):
            self._delete(job)
        elif event.kind == "scale":
            size = {"maxReplicas": job.most, "replicaSpecs": {"Worker": {"replicas": job.most}}}
            self._cluster.patch_job(job.project, job.name, {"spec": size})
        elif event.kind == "suspend" and self._arrangement.queued and not runs:
            self._delete(job)  # it is suspended already; to keep it from starting, remove it from its queue
        elif event.kind == "resume" and job.name not in self._made:
            self._submit(job)
        else:
            self._cluster.patch_job(job.project, job.name, {"spec": {"suspend": job.suspended}})

    def _submit(self, job: Job) -> None:
        Path(FOLDER / f"{job.name}.over").unlink(missing_ok=True)
        self._cluster.create_job(manifest(job, self._arrangement, train=False))
        self._made.add(job.name)

    def _delete(self, job: Job) -> None:
        with suppress(NotFoundError):
            self._cluster.delete_job(job.project, job.name)
        self._made.discard(job.name)

    def _come_to_rest(self, event: Event, at: float, scenario: Scenario) -> Settled:
        self._changed_at = max(at, self._changed_at)
        ideal_since: float | None = None
        while True:
            rest, settled, stands = self._judge(scenario)
            now = time.monotonic()
            ideal_since = (ideal_since or now) if rest.is_ideal and settled else None
            still = settled and now > self._changed_at + self._still_s
            if still or (ideal_since is not None and now > max(ideal_since, self._changed_at) + CALM_S):
                held = sum(bool(pod["node"]) for pod in self._store.items())
                return Settled(str(event), self._changed_at - at, rest, held, stands)
            if now > at + LIMIT_S:
                raise TimeoutError(f"not at rest {LIMIT_S:.0f} s after {event}: {stands}")
            time.sleep(POLL_S)

    def _judge(self, scenario: Scenario) -> tuple[Rest, bool, str]:
        pods = [pod for pod in self._store.items() if not pod["over"]]
        places = Counter(pod["job"] for pod in pods if pod["node"])
        taken = Counter(pod["project"] for pod in pods if pod["node"])
        stands = {name: Stand(job, places[name]) for name, job in scenario.jobs.items()}
        going = any(pod["going"] or (pod["node"] and pod["phase"] == "Pending") for pod in pods)
        unknown = any(pod["job"] not in stands for pod in pods)
        suspended = any(one.job.suspended and one.has for one in stands.values())
        surplus = any(one.has > one.job.most for one in stands.values())
        text = ", ".join(f"{name} {one.has} of {one.job.least}-{one.job.most}" for name, one in stands.items())
        return judge(stands, taken), not (going or unknown or suspended or surplus), text

    def _has(self, job: Job) -> int:
        return sum(pod["job"] == job.name and bool(pod["node"]) for pod in self._store.items())

    def _note_change(self, old: Manifest | None, new: Manifest | None) -> None:
        self._changed_at = time.monotonic()

    def start(self) -> None:
        """Start watching the pods."""
        self._reflector.start()
        self._reflector.wait_synced()

    def stop(self) -> None:
        """Remove everything."""
        try:
            self.clear()
        finally:
            self._reflector.stop()


@contextmanager
def open_player(api: Connection, arrangement: Arrangement, still_s: float = STILL_S) -> Iterator[ScenarioPlayer]:
    """Set up the stage and the arrangement. The caller runs the controller."""
    with stage(api), arrangement.open(api):
        player = ScenarioPlayer(api, arrangement, still_s)
        player.start()
        try:
            yield player
        finally:
            player.stop()


def _prune(pod: Manifest) -> Manifest:
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    over = status.get("phase") in ("Succeeded", "Failed")
    return {
        "metadata": {name: metadata.get(name) for name in ("name", "namespace", "uid", "resourceVersion")},
        "job": metadata["labels"].get(LABEL_JOB, ""),
        "project": metadata["namespace"],
        "node": "" if over else spec.get("nodeName", ""),
        "phase": status.get("phase", ""),
        "over": over,
        "going": "deletionTimestamp" in metadata,
    }
