"""A real training job on a real cluster, and what its status says of it."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.api.spec import API_VERSION, GROUP, KIND, LABEL_GROUP, LABEL_JOB, PLURAL, WORKER_CONTAINER, ElasticJob
from elasticctl.api.status import Interruption
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from elasticctl_store import storage
from elasticctl_store.checkpoints.commits import read_commits
from tests.on_cluster.waiting import wait_until
from tests.support.jobs import LIGHT

IMAGE = os.environ.get("ELASTICCTL_TEST_IMAGE", "lab/trainer:dev")
HOST_FOLDER = Path(os.environ.get("ELASTICCTL_TEST_HOST_FOLDER", "/tmp/kubelab-host"))
"""A folder that all nodes share; for a bucket there is tests/train."""
NAMESPACE = "default"
TRAIN = Path(__file__).with_name("train.py")


@dataclass(frozen=True, slots=True)
class Trainer:
    """One job; waits give up after some minutes, which a slow machine may need."""

    api: Connection
    name: str

    def submit(self, workers: int, *, epochs: int, step_delay_s: float, **spec: Any) -> None:
        """Create the job; its state is kept in a folder of its own on the host."""
        self.submit_script([str(TRAIN), "--epochs", str(epochs), "--step-delay-s", str(step_delay_s)], workers, **spec)

    def starts(self) -> Counter[str]:
        """How often the script has been started in each pod, by the pods' uids."""
        return Counter((self.folder / "starts").read_text().split())

    def submit_script(
        self,
        script: list[str],
        workers: int,
        *,
        limits: Manifest | None = None,
        pod: Manifest | None = None,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = LIGHT,
        **spec: Any,
    ) -> None:
        """Create the job with any Python script; `limits` and `environment` are each worker's, `pod` is more of its
        template, `options` are the launcher's."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o777)  # workers run as any user
        launch = str(Path(sys.executable).parent / "elasticctl-launch")
        worker = {
            "name": WORKER_CONTAINER,
            "image": IMAGE,
            "command": [launch, *options, "--nproc-per-node", "1", "--"],
            "args": [sys.executable, *script],
            "env": [
                {"name": "ELASTICCTL_STORAGE", "value": "file:///state"},
                {"name": "OMP_NUM_THREADS", "value": "1"},
                *({"name": name, "value": value} for name, value in (environment or {}).items()),
            ],
            "volumeMounts": [{"name": "state", "mountPath": "/state"}],
            "resources": {"limits": limits or {}},
        }
        volume = {"name": "state", "hostPath": {"path": str(self.folder), "type": "Directory"}}
        more = pod or {}
        spec_of_pod = {"terminationGracePeriodSeconds": 10, "containers": [worker], "volumes": [volume]}
        template = {**more, "spec": spec_of_pod | more.get("spec", {})}
        replicas = {"Worker": {"replicas": workers, "restartPolicy": "OnFailure", "template": template}}
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": self.name, "namespace": NAMESPACE},
            "spec": {"minReplicas": 1, "maxReplicas": 4, **spec, "replicaSpecs": replicas},
        }
        self.api.request("POST", resource_path(API_VERSION, NAMESPACE, PLURAL), manifest)

    @property
    def folder(self) -> Path:
        """Where the job's state is kept on the host; its workers see it as /state."""
        return HOST_FOLDER / self.name

    def job(self) -> ElasticJob:
        """The job as it is now; NotFoundError when it is gone."""
        return ElasticJob.from_manifest(self.api.request("GET", self._path()))

    def scale(self, workers: int) -> None:
        """Ask for that many workers."""
        self.patch({"spec": {"replicaSpecs": {"Worker": {"replicas": workers}}}})

    def patch(self, patch: Manifest) -> None:
        """Change the job: its `status` alone, where the patch has one."""
        path = f"{self._path()}/status" if "status" in patch else self._path()
        self.api.request("PATCH", path, patch, content_type=MERGE_PATCH)

    def pods(self) -> list[Manifest]:
        """The job's pods."""
        labels = f"{LABEL_GROUP}={GROUP},{LABEL_JOB}={self.name}"
        answer = self.api.request("GET", resource_path("v1", NAMESPACE, "pods"), None, {"labelSelector": labels})
        pods: list[Manifest] = answer["items"]
        return pods

    def uids(self) -> dict[str, str]:
        """The pods that are not on their way out: name -> uid."""
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in self.pods()
            if "deletionTimestamp" not in pod["metadata"]
        }

    def ends_of(self, uids: Mapping[str, str]) -> list[Interruption]:
        """What the status says of the losses of these pods (name -> uid)."""
        return [item for item in self.job().status.interruptions if item.uid in uids.values()]

    def reasons(self) -> list[str]:
        """The reasons of the job's events."""
        params = {"fieldSelector": f"involvedObject.name={self.name},involvedObject.kind={KIND}"}
        events = self.api.request("GET", resource_path("v1", NAMESPACE, "events"), None, params)["items"]
        uid = self.job().uid
        return [event["reason"] for event in events if event["involvedObject"]["uid"] == uid]

    def stored_step(self) -> int:
        """The newest checkpoint's step as the storage itself has it, independently of the API; 0: there is none."""
        newest = next(read_commits(storage.open(f"file://{self.folder}")), None)
        return 0 if newest is None else newest.step

    def kill(self, position: int) -> None:
        """Delete a worker's pod without any grace: of those that are there, by the number in their names.

        Not by that number itself: a worker that took the place of one on a lost node has another.
        """
        name = sorted(self.uids(), key=lambda name: int(name.rpartition("-")[2]))[position]
        self.api.request("DELETE", resource_path("v1", NAMESPACE, "pods", name), {"gracePeriodSeconds": 0})

    def delete(self) -> None:
        """Delete the job and wait until nothing of it is left."""
        try:
            self.api.request("DELETE", self._path(), {"propagationPolicy": "Foreground"})
        except NotFoundError:
            return
        wait_until(self.is_gone)

    def is_gone(self) -> bool:
        """True once neither the job nor anything that it owned is there."""
        try:
            self.job()
        except NotFoundError:
            return not self.pods() and not any(self.belongings().values())
        return False

    def belongings(self) -> dict[str, list[str]]:
        """What there is of the job except its pods, by kind."""
        params = {"labelSelector": f"{LABEL_GROUP}={GROUP},{LABEL_JOB}={self.name}"}
        return {
            plural: [
                item["metadata"]["name"]
                for item in self.api.request("GET", resource_path("v1", NAMESPACE, plural), None, params)["items"]
            ]
            for plural in ("services", "secrets")
        }

    def wait_training(self, workers: int, after: int = 0) -> ElasticJob:
        """Wait until a generation later than `after`, of that many workers, has made a step."""

        def training() -> ElasticJob | None:
            job = self.job()
            newest = job.status.generations[-1:]
            trains = newest and newest[0].first_step_at is not None and len(newest[0].workers) == workers
            return job if trains and newest[0].generation > after else None

        found = wait_until(training)
        assert found is not None
        return found

    def wait_committed(self) -> int:
        """Wait for a fresh checkpoint; returns its step."""
        before = self.job().status.checkpoint.step or 0
        return wait_until(lambda: self._committed_after(before))

    def disturbed(self, how: Callable[[], None], workers: int) -> ElasticJob:
        """Disturb the job once it has a checkpoint; wait until `workers` train, and check that nothing was lost."""
        committed = self.wait_committed()
        before = self.job().status
        how()
        after = self.wait_training(workers, before.generation)
        for generation in after.status.generations:
            if (
                generation.generation > before.generation and generation.resumed_step is not None
            ):  # a report may be lost
                assert generation.resumed_step >= committed, (generation, committed)
        assert (after.status.progress.step or 0) >= committed
        assert after.status.failures == before.failures
        return after

    def _committed_after(self, step: int) -> int:
        found = self.job().status.checkpoint.step or 0
        return found if found > step else 0

    def _path(self) -> str:
        return resource_path(API_VERSION, NAMESPACE, PLURAL, self.name)
