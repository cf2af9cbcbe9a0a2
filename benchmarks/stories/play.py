"""Play stories with an arrangement on a cluster, and measure how the jobs come to rest after each event."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.clusterload import Missing, until
from benchmarks.stories.arrangements import FOLDER, Arrangement, manifest, stage
from benchmarks.stories.requests import Requests
from benchmarks.stories.settle import Rest, Stand, judge
from benchmarks.stories.story import EVENTS, PROJECTS, Event, Job, Story
from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.api.spec import GROUP, LABEL_GROUP, LABEL_JOB, ElasticJob
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import Connection
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource

POLL_S = 0.1
CALM_S = 1.0
"""How long an ideal state has to last."""
STILL_S = 12.0
"""Jobs count as at rest after this long without a change of any pod, even if the state is not ideal."""
LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Came:
    """How the jobs came to rest after an event: the last pod changed after `settled_s`, and pods hold `held` GPUs."""

    event: str
    settled_s: float
    rest: Rest
    held: int
    stands: str


@dataclass(slots=True)
class Told:
    """A story that was played. `requests` are those of the controller and of Kueue, `steps_redone` those of all
    jobs."""

    seed: int
    came: list[Came] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    steps_redone: int | None = None
    steps: int = 0


class Teller:
    """One cluster under one arrangement; `train`: jobs make steps. `still_s`: see STILL_S."""

    def __init__(
        self, api: Connection, arrangement: Arrangement, *, train: bool = False, still_s: float = STILL_S
    ) -> None:
        self._api, self._arrangement, self._train, self._still_s = api, arrangement, train, still_s
        self._cluster = KubeCluster(api)
        self._store = ObjectStore(_prune)
        self._changed_at = time.monotonic()
        self._store.subscribe(self._note)
        self._reflector = Reflector(api, Resource("/api/v1/pods", f"{LABEL_GROUP}={GROUP}"), self._store)
        self._made: set[str] = set()

    def tell(self, seed: int, events: int = EVENTS, at_rest: Callable[[Came], None] = lambda came: None) -> Told:
        """Play one story, starting with an empty cluster. Raises Missing if jobs never come to rest."""
        self.clear()
        story, told, requests = Story(seed), Told(seed), Requests()
        redone: dict[str, tuple[int, int]] = {}
        for _ in range(events):
            event = story.next()
            at = time.monotonic()
            self._do(event)
            told.came.append(self._come_to_rest(event, at, story))
            at_rest(told.came[-1])
            for job in story.jobs.values():
                redone[job.name] = self._steps(job) or redone.get(job.name, (0, 0))
        told.requests = dict(requests.count())
        if self._train:
            told.steps_redone = sum(again for again, _ in redone.values())
            told.steps = sum(steps for _, steps in redone.values())
        return told

    def clear(self) -> None:
        """Remove all jobs and their pods."""
        for project in PROJECTS:
            for job in self._cluster.list_jobs(project):
                self._cluster.delete_job(project, job["metadata"]["name"])
        until(lambda: not self._store.items(), 90, "the end of all pods")
        self._made.clear()

    def _do(self, event: Event) -> None:
        job = event.job
        runs = self._has(job) >= job.least
        if event.kind == "submit":
            self._submit(job)
        elif event.kind == "finish" and runs and not self._train:
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
        self._cluster.create_job(manifest(job, self._arrangement, train=self._train))
        self._made.add(job.name)

    def _delete(self, job: Job) -> None:
        with suppress(NotFoundError):
            self._cluster.delete_job(job.project, job.name)
        self._made.discard(job.name)

    def _come_to_rest(self, event: Event, at: float, story: Story) -> Came:
        self._changed_at = max(at, self._changed_at)
        ideal_since: float | None = None
        while True:
            rest, settled, stands = self._look(story)
            now = time.monotonic()
            ideal_since = (ideal_since or now) if rest.is_ideal and settled else None
            still = settled and now > self._changed_at + self._still_s
            if still or (ideal_since is not None and now > max(ideal_since, self._changed_at) + CALM_S):
                held = sum(bool(pod["node"]) for pod in self._store.items())
                return Came(str(event), self._changed_at - at, rest, held, stands)
            if now > at + LIMIT_S:
                raise Missing(f"rest after {event}: {stands}")
            time.sleep(POLL_S)

    def _look(self, story: Story) -> tuple[Rest, bool, str]:
        pods = [pod for pod in self._store.items() if not pod["over"]]
        places = Counter(pod["job"] for pod in pods if pod["node"])
        taken = Counter(pod["project"] for pod in pods if pod["node"])
        stands = {name: Stand(job, places[name]) for name, job in story.jobs.items()}
        going = any(pod["going"] or (pod["node"] and pod["phase"] == "Pending") for pod in pods)
        strange = any(pod["job"] not in stands for pod in pods)
        suspended = any(one.job.suspended and one.has for one in stands.values())
        surplus = any(one.has > one.job.most for one in stands.values())
        text = ", ".join(f"{name} {one.has} of {one.job.least}-{one.job.most}" for name, one in stands.items())
        return judge(stands, taken), not (going or strange or suspended or surplus), text

    def _has(self, job: Job) -> int:
        return sum(pod["job"] == job.name and bool(pod["node"]) for pod in self._store.items())

    def _steps(self, job: Job) -> tuple[int, int] | None:
        if not self._train or job.name not in self._made:
            return None
        status = ElasticJob.from_manifest(self._cluster.get_job(job.project, job.name)).status
        return status.steps_redone or 0, status.progress.step or 0

    def _note(self, old: Manifest | None, new: Manifest | None) -> None:
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
def telling(
    api: Connection, arrangement: Arrangement, *, train: bool = False, still_s: float = STILL_S
) -> Iterator[Teller]:
    """Set up the stage and the arrangement. The caller runs the controller."""
    with stage(api), arrangement.open(api):
        teller = Teller(api, arrangement, train=train, still_s=still_s)
        teller.start()
        try:
            yield teller
        finally:
            teller.stop()


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
