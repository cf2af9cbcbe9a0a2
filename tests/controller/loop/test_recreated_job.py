"""A job that is deleted and created again under its name, at any point, begins with nothing of the old one.

The loop, the store and the rendezvous service are the real ones; the machine plays the workers. Whatever a worker
reports bears the mark of its job, and every call of the loop is a point at which the name may change hands.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elasticctl.api.codec import Manifest, Timestamp, from_json
from elasticctl.api.errors import ConflictError, ElasticctlError, NotFoundError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, ProgressStatus
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.local import objects
from elasticctl_controller.local.store import LocalStore
from elasticctl_controller.local.workload import LocalWorkload
from elasticctl_controller.loop.apply_actions import PodCreator
from elasticctl_controller.loop.controller import Controller
from elasticctl_controller.loop.workqueue import WorkQueue
from elasticctl_controller.rendezvous.service import RendezvousService
from elasticctl_protocol.requests import Member
from tests.support.jobs import shell_job

KEY = "default/job"
MARK = 1_000_000
"""The n-th job of the name makes steps from n * MARK on."""


class ChangingHands(LocalWorkload):
    """A workload whose job is replaced by another of its name when the loop makes its n-th call from now."""

    def __init__(self, store: LocalStore, replace_job: Any) -> None:
        super().__init__(store, "unix:///nowhere")
        self.calls_left = -1
        self._replace_job = replace_job

    def _count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            self._replace_job()

    def get_job(self, key: str) -> Any:
        found = super().get_job(key)
        self._count()  # the loop has read the old one
        return found

    def list_pods(self, job: ElasticJob) -> Any:
        self._count()
        return super().list_pods(job)

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        self._count()
        super().write_status(job, status)
        self._count()

    def pod_creator(self, job: ElasticJob) -> PodCreator:
        create_pod = super().pod_creator(job)

        def count_and_create(manifest: Manifest) -> None:
            self._count()
            create_pod(manifest)

        return count_and_create

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        self._count()
        super().delete_pod(job, name, uid, force=force)


class RecreatedJob(RuleBasedStateMachine):
    """The user, the workers and the controller, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_700_000_000.0
        self.folder = tempfile.TemporaryDirectory()
        self.store = LocalStore(Path(self.folder.name) / "state.db", lambda: self.now)
        self.workload = ChangingHands(self.store, self.replace_job)
        self.uids: list[str] = []
        self.pods: dict[str, str] = {}
        self.start_controller()

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def start_controller(self) -> None:
        self.rendezvous = RendezvousService(lambda uid, number: "t", lambda key: None, lambda: self.now)
        self.controller = Controller(self.workload, self.rendezvous, lambda: self.now, WorkQueue())

    @initialize()
    def create_job(self) -> None:
        self.uids.append(self.store.create_job(shell_job("job", "true", 2, minReplicas=1))["metadata"]["uid"])

    def replace_job(self) -> None:
        with suppress(NotFoundError):
            self.store.delete_job("default", "job")
        self.create_job()

    # The user

    @rule()
    def delete_and_create(self) -> None:
        self.replace_job()

    @rule()
    def delete(self) -> None:
        try:
            self.store.delete_job("default", "job")
        except NotFoundError:
            self.create_job()

    @rule(workers=st.integers(1, 3))
    def scale(self, workers: int) -> None:
        patch = {"spec": {"replicaSpecs": {"Worker": {"replicas": workers}}, "maxReplicas": 3}}
        with suppress(NotFoundError):
            self.store.patch_job("default", "job", patch, lambda *_: None)

    # The controller

    @rule(hand_over_at=st.none() | st.integers(1, 8), seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def make_a_pass(self, hand_over_at: int | None, seconds: float) -> None:
        self.now += seconds
        self.workload.calls_left = hand_over_at or -1
        with suppress(ConflictError, NotFoundError):  # the loop tries again
            self.controller.sync(KEY)
        self.workload.calls_left = -1

    @rule()
    def restart_the_controller(self) -> None:
        self.start_controller()

    # The workers, old and new

    @property
    def group(self) -> Group | None:
        return self.rendezvous.groups.by_key.get(KEY)

    @rule()
    def form_a_group(self) -> None:
        """What takes several passes and starts, which hardly ever come in that order by chance."""
        for _ in range(3):
            self.make_a_pass(None, 0.1)
            self.start_workers()
        self.now += 31.0  # workers that do not join are waited for no longer than this
        if self.group is not None:
            self.group.act_if_due(self.now)

    @rule()
    def start_workers(self) -> None:
        for pod in self.store.list_pods("default", "job"):
            uid = pod["metadata"]["uid"]
            if pod["status"]["phase"] == "Pending":
                self.store.update_pod(uid, lambda p: objects.mark_running(p, 1, self.now))
            if self.group is not None and uid in self.group.members.alive and not self.group.is_member(uid):
                self.now += 0.1
                self.group.join(Member(uid, pod["metadata"]["name"], "127.0.0.1", 1, 1), 0, self.now)

    @precondition(lambda self: self.group is not None and self.group.world is not None)
    @rule(steps=st.integers(1, 9), resumed=st.booleans(), commit=st.booleans())
    def train(self, steps: int, resumed: bool, commit: bool) -> None:
        group = self.group
        assert group is not None
        assert group.world is not None
        number = self.uids.index(group.job_uid) + 1
        step, generation = number * MARK + steps, group.world.generation
        self.now += 0.1
        if resumed:
            group.history.note_resumed(generation, number * MARK)
        group.note_step(generation, ProgressStatus(step=step, metrics={f"of-{number}": 1.0}), self.now)
        if commit:
            group.history.note_commit(generation, steps, step, f"s3://of/{number}", 1, 1.0, self.now)

    @rule(which=st.integers(0, 3), exit_code=st.sampled_from([0, 1, 143]))
    def end_worker(self, which: int, exit_code: int) -> None:
        pods = self.store.list_pods("default", "job")
        if which < len(pods):
            uid = pods[which]["metadata"]["uid"]
            self.rendezvous.report_loss(KEY, uid)
            self.store.update_pod(uid, lambda p: objects.mark_ended(p, objects.Exit(exit_code, self.now)))

    @rule()
    def remove_ended_pods(self) -> None:
        for pod in self.store.list_pods("default", "job"):
            if pod["metadata"].get("deletionTimestamp"):
                self.store.remove_pod(pod["metadata"]["uid"])

    @invariant()
    def nothing_of_another_job_is_in_the_status(self) -> None:
        for pod in self.store.list_pods("default", "job"):
            self.pods[pod["metadata"]["uid"]] = pod["metadata"]["ownerReferences"][0]["uid"]
        try:
            manifest = self.store.get_job("default", "job")
        except ElasticctlError:
            return
        uid, status = manifest["metadata"]["uid"], from_json(JobStatus, manifest.get("status"))
        number = self.uids.index(uid) + 1
        mine = range(number * MARK, (number + 1) * MARK)
        steps = [status.progress.step, status.checkpoint.step, *status.curve.step]
        for generation in status.generations:
            steps += [generation.last_step, generation.resumed_step]
        assert [step for step in steps if step is not None and step not in mine] == []
        assert set(status.progress.metrics) | set(status.curve.metrics) <= {f"of-{number}"}
        assert status.checkpoint.url in ("", f"s3://of/{number}")
        workers = [worker.uid for worker in (*status.workers, *status.interruptions)]
        assert [worker for worker in workers if self.pods[worker] != uid] == []
        created = Timestamp(ElasticJob.from_manifest(manifest).created_at or 0.0)
        moments = [status.start_time, status.progress.at, status.checkpoint.at, status.curve.since]
        moments += [generation.opened_at for generation in status.generations]
        moments += [item.at for item in (*status.interruptions, *status.scalings)]
        assert [moment for moment in moments if moment is not None and moment < created] == []
        assert (status.steps_redone or 0) < MARK


TestRecreatedJob = RecreatedJob.TestCase
TestRecreatedJob.settings = settings(
    max_examples=20, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
