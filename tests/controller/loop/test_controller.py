"""The loop over a real store and a real rendezvous service; tests set the pods' phases, in place of processes."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Timestamp, from_json
from elasticctl.api.errors import ClusterError, ConflictError, ForbiddenError, UnreachableError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, ProgressStatus, TokenStatus
from elasticctl.cluster.base import Manifest
from elasticctl_controller.core.group.worker_tokens import EVERY_S, OVERLAP_S
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.local import objects
from elasticctl_controller.local.store import LocalStore
from elasticctl_controller.local.workload import LocalWorkload
from elasticctl_controller.loop.apply_actions import (
    PARALLEL_CALLS,
    NameTakenError,
    PodCreator,
    call_all,
    slow_start,
)
from elasticctl_controller.loop.controller import REFUSED_RETRY_S, Controller, Listeners
from elasticctl_controller.loop.workqueue import WorkQueue
from elasticctl_controller.rendezvous.service import RendezvousService
from elasticctl_protocol.requests import Member
from tests.support.controller.samples import Clock
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

KEY, CAPACITY = "default/job", "karpenter.sh/capacity-type"


class Failing(LocalWorkload):
    """A workload of which the next calls of one kind fail, and nodes are lost."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store, "unix:///nowhere")
        self.errors: dict[str, list[Exception]] = {}
        self.calls: list[str] = []
        self.delivered: list[int] = []
        self.lost: frozenset[str] = frozenset()
        self.notices: dict[str, LeaveNotice] = {}
        self.namable = True

    def nodes_may_be_named(self) -> bool:
        return self.namable

    def lost_nodes(self) -> frozenset[str]:
        return self.lost

    def node_notices(self) -> Mapping[str, LeaveNotice]:
        return self.notices

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.errors.get(call):
            raise self.errors[call].pop(0)

    def pod_creator(self, job: ElasticJob) -> PodCreator:
        create_pod = super().pod_creator(job)

        def note_and_create(manifest: Manifest) -> None:
            self._note("create")
            create_pod(manifest)

        return note_and_create

    def deliver_token(self, job: ElasticJob) -> None:
        self._note("deliver")
        assert job.status.token is not None
        self.delivered.append(job.status.token.number)

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        self._note("write")
        super().write_status(job, status)

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        self._note("delete")
        super().delete_pod(job, name, uid, force=force)


class Bench:
    """A controller and what it works on."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock(1_700_000_000.0)
        self.store = LocalStore(path / "state.db", self.clock)
        self.workload = Failing(self.store)
        self.rendezvous = RendezvousService(lambda uid, number: "t", lambda key: None, self.clock)
        self.queue = WorkQueue()
        self.delivered = self.workload.delivered
        self.restart()

    def restart(self) -> None:
        """A controller that remembers nothing."""
        self.controller = Controller(self.workload, self.rendezvous, self.clock, self.queue)

    def settle(self, key: str = KEY) -> None:
        """Pass after pass until one changes nothing."""
        for _ in range(20):
            before = [self.store.list_jobs(), self.store.list_pods()]
            self.controller.sync(key)
            if before == [self.store.list_jobs(), self.store.list_pods()]:
                return
        raise AssertionError("the loop does not come to rest")

    def run_job(self, manifest: Manifest) -> Manifest:
        """Create a job whose pods all run."""
        job = self.store.create_job(manifest)
        self.settle()
        self.run_pods()
        self.settle()
        return job

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.store.get_job("default", "job").get("status", {})
        return status

    def pods(self) -> list[Manifest]:
        return self.store.list_pods("default", "job")

    def run_pods(self) -> None:
        for pod in self.pods():
            if pod["status"]["phase"] == "Pending":
                self.store.update_pod(pod["metadata"]["uid"], lambda p: objects.mark_running(p, 1, self.clock()))

    def place_pods(self) -> None:
        """Each on a node of its own."""
        for index, pod in enumerate(self.pods()):
            self.store.update_pod(pod["metadata"]["uid"], lambda p, n=f"node-{index}": objects.mark_scheduled(p, n, ()))

    def end_pod(self, index: int, exit_code: int) -> None:
        how = objects.Exit(exit_code, self.clock())
        self.store.update_pod(self.pods()[index]["metadata"]["uid"], lambda p: objects.mark_ended(p, how))

    def alive(self) -> set[str]:
        return set(self.rendezvous.groups.by_key[KEY].members.alive.values())

    def leaving(self) -> set[str]:
        group = self.rendezvous.groups.by_key[KEY]
        return {group.members.alive[uid] for uid in group.members.leaving}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.store.close()


def test_workers_are_made_and_the_job_comes_to_rest(bench: Bench) -> None:
    bench.run_job(shell_job("job", "true", 3))
    assert bench.status()["phase"] == "Running"
    names = sorted(pod["metadata"]["name"] for pod in bench.pods())  # they were created at the same time
    assert names == [f"job-worker-{index}" for index in range(3)]
    version = bench.store.get_job("default", "job")["metadata"]["resourceVersion"]
    bench.controller.sync(KEY)
    assert bench.store.get_job("default", "job")["metadata"]["resourceVersion"] == version


def test_nothing_is_done_before_it_is_written(bench: Bench) -> None:
    bench.store.create_job(shell_job("job", "true", 2))
    bench.workload.errors["write"] = [ConflictError("changed")]
    with pytest.raises(ConflictError):
        bench.controller.sync(KEY)
    assert bench.workload.calls == ["write"]
    assert bench.pods() == []
    bench.settle()
    assert len(bench.pods()) == 2


def test_a_pod_is_deleted_only_once_the_reason_is_stored(bench: Bench) -> None:
    bench.run_job(shell_job("job", "true", 2, minReplicas=1, maxReplicas=2))
    patch = {"spec": {"replicaSpecs": {"Worker": {"replicas": 1}}}}
    bench.store.patch_job("default", "job", patch, check=lambda *_: None)
    bench.workload.calls.clear()
    bench.settle()
    assert bench.workload.calls.index("write") < bench.workload.calls.index("delete")
    assert [worker["removal"] for worker in bench.status()["workers"]] == ["", "ScaledIn"]


def token(bench: Bench) -> TokenStatus:
    found = from_json(TokenStatus, bench.status()["token"])
    assert isinstance(found, TokenStatus)
    return found


def test_a_jobs_token_changes_while_it_runs(bench: Bench) -> None:
    """The status says so before the worker has it, and that it has it only when that is so."""
    bench.run_job(shell_job("job", "true", 2))
    assert (token(bench).number, bench.delivered) == (1, [])
    bench.clock.now += EVERY_S
    bench.workload.errors["deliver"] = [ForbiddenError("not yours")]
    bench.controller.sync(KEY)
    assert (token(bench).number, token(bench).former_until, bench.delivered) == (2, None, [])
    bench.clock.now += 10 * EVERY_S
    bench.settle()
    assert token(bench).former_until is None
    assert bench.queue.get(0) == KEY, "the status is to report it immediately"
    bench.settle()
    assert (token(bench).number, bench.delivered) == (2, [2])
    assert token(bench).former_until == bench.clock.now + OVERLAP_S
    assert len(bench.alive()) == 2


def test_a_controller_that_starts_delivers_again_what_may_not_have_been(bench: Bench) -> None:
    bench.store.create_job(shell_job("job", "true", 1))
    bench.settle()
    bench.clock.now += EVERY_S
    bench.workload.errors["deliver"] = [ClusterError("killed here")]
    bench.controller.sync(KEY)
    bench.restart()
    bench.settle()
    assert (token(bench).number, bench.delivered) == (2, [2])


def test_workers_are_not_locked_out_when_the_status_is_removed(bench: Bench) -> None:
    bench.run_job(shell_job("job", "true", 1))
    bench.clock.now += EVERY_S
    bench.settle()
    before = token(bench)
    for older in ({}, {"token": {"number": 1}}):
        stored = bench.store.get_job("default", "job")["metadata"]["resourceVersion"]
        bench.store.write_job_status("default", "job", older, stored)
        bench.settle()
        assert token(bench).number == before.number == 2
        assert bench.status()["phase"] == "Running"


def test_a_jobs_token_ends_with_it(bench: Bench) -> None:
    """Not before its last worker, which still hears that it is over."""
    bench.run_job(shell_job("job", "true", 2))
    bench.store.patch_job("default", "job", {"spec": {"cancel": True}}, check=lambda *_: None)
    bench.controller.sync(KEY)
    assert KEY in bench.rendezvous.groups.by_key
    for index in range(2):
        bench.end_pod(index, 0)
    bench.settle()
    assert bench.status()["phase"] == "Cancelled"
    assert KEY not in bench.rendezvous.groups.by_key


def waiting(bench: Bench) -> tuple[str, str, str]:
    """The status, reason and message of the condition that says what workers wait for."""
    found = next(item for item in bench.status()["conditions"] if item["type"] == "WorkersWaiting")
    return found["status"], found.get("reason", ""), found.get("message", "")


QUOTA = 'pods "job-worker-0" is forbidden: exceeded quota: team, requested: pods=1, used: pods=3, limited: pods=3'


def test_a_worker_that_is_refused_becomes_a_condition_and_an_event_in_the_servers_words(bench: Bench) -> None:
    job = bench.store.create_job(shell_job("job", "true", 1))
    refusal = ForbiddenError(f"{QUOTA} (POST /api/v1/namespaces/default/pods)")
    bench.workload.errors["create"] = [refusal, refusal]
    bench.controller.sync(KEY)
    assert bench.queue.get(0) == KEY, "the status is to report it immediately"
    bench.controller.sync(KEY)
    assert waiting(bench) == ("True", "FailedCreate", QUOTA)
    events = [event for event in bench.store.list_events(job["metadata"]["uid"]) if event["reason"] == "FailedCreate"]
    assert [event["message"] for event in events] == [QUOTA]
    bench.settle()
    assert len(bench.pods()) == 1
    assert waiting(bench)[0] == "False"


def test_a_name_that_a_foreign_pod_has_delays_no_other_worker(bench: Bench) -> None:
    bench.store.create_job(shell_job("job", "true", 2, maxReplicas=2))
    bench.workload.errors["create"] = [NameTakenError("pod job-worker-0 exists, and it does not belong to this job")]
    bench.settle()
    assert [pod["metadata"]["name"] for pod in bench.pods()] == ["job-worker-1"]
    assert waiting(bench)[:2] == ("True", "NameTaken")
    assert bench.workload.calls.count("create") == 2
    bench.clock.now += REFUSED_RETRY_S
    bench.settle()
    assert (len(bench.pods()), waiting(bench)[0]) == (2, "False")


def test_a_missing_mount_is_reported_in_the_status(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{"reason": "FailedMount", "message": "no such claim"}]
    monkeypatch.setattr(bench.workload, "list_pod_events", lambda job, uid: events)
    bench.restart()
    bench.store.create_job(shell_job("job", "true", 1))
    bench.settle()
    bench.place_pods()
    bench.clock.now += 60
    bench.settle()
    assert waiting(bench) == ("True", "FailedMount", "job-worker-0: no such claim")
    bench.run_pods()
    bench.settle()
    assert waiting(bench)[0] == "False"


def test_a_worker_that_its_liveness_probe_kills_uses_up_the_budget(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = shell_job("job", "true", 1, backoffLimit=2)
    container = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["livenessProbe"] = {"exec": {"command": ["false"]}}
    events = [{"reason": "Killing", "message": f"Container {container['name']} failed liveness probe"}]
    monkeypatch.setattr(bench.workload, "list_pod_events", lambda job, uid: events)
    bench.restart()
    bench.store.create_job(manifest)
    for _ in range(3):
        bench.settle()
        bench.run_pods()
        bench.clock.now += 100
        bench.end_pod(0, 137)
        bench.settle()
        bench.store.remove_pod(bench.pods()[0]["metadata"]["uid"])
        bench.clock.now += 100
    assert (bench.status()["phase"], bench.status()["reason"]) == ("Failed", "BackoffLimitExceeded")
    assert bench.status()["lastFailure"]["error"] == "its liveness probe failed"


def test_a_worker_that_is_refused_is_tried_again_within_seconds_each_time(bench: Bench) -> None:
    now = [0.0]
    bench.queue = WorkQueue(clock=lambda: now[0], jitter=lambda: 0.999)
    bench.controller = Controller(bench.workload, bench.rendezvous, bench.clock, bench.queue)
    bench.store.create_job(shell_job("job", "true", 1))
    bench.workload.errors["create"] = [ForbiddenError(QUOTA) for _ in range(1000)]
    bench.queue.add(KEY)
    tries = []
    for second in range(120):
        now[0] = float(second)
        while bench.queue.get(0) == KEY:
            bench.workload.calls.clear()
            bench.controller.sync(KEY)
            tries += [second] * bench.workload.calls.count("create")
            bench.queue.reset_failures(KEY)
            bench.queue.done(KEY)
    assert max(after - before for before, after in itertools.pairwise(tries)) <= 4
    assert len(tries) <= 120 / 3 + 3, "and not more often"


def test_many_refused_jobs_share_the_rate_at_which_one_alone_is_tried_again(bench: Bench) -> None:
    now = [0.0]
    bench.queue = WorkQueue(clock=lambda: now[0])
    bench.controller = Controller(bench.workload, bench.rendezvous, bench.clock, bench.queue)
    keys = [f"default/job-{number}" for number in range(80)]
    for key in keys:
        bench.store.create_job(shell_job(key.partition("/")[2], "true", 1))
        bench.workload.errors["create"] = [ForbiddenError(QUOTA) for _ in range(3)]
        bench.controller.sync(key)
        assert bench.queue.get(0) == key
        bench.controller.sync(key)
        bench.queue.done(key)
    now[0] = 3.5
    assert bench.queue.get(0) is not None, "the first jobs, when they were few"
    early = 1 + sum(bench.queue.get(0) is not None for _ in keys)
    assert early < 75


def test_a_server_that_is_away_is_no_refusal(bench: Bench) -> None:
    bench.store.create_job(shell_job("job", "true", 1))
    bench.workload.errors["create"] = [UnreachableError("no answer")]
    with pytest.raises(UnreachableError):
        bench.controller.sync(KEY)
    bench.settle()
    assert not any(item["type"] == "WorkersWaiting" for item in bench.status()["conditions"])


def test_the_group_is_who_is_alive_and_stays(bench: Bench) -> None:
    bench.run_job(shell_job("job", "true", 3, minReplicas=1, maxReplicas=3))
    assert bench.alive() == {"job-worker-0", "job-worker-1", "job-worker-2"}
    bench.end_pod(2, 137)
    bench.controller.sync(KEY)
    assert bench.alive() == {"job-worker-0", "job-worker-1"}
    bench.settle()
    scale = {"spec": {"replicaSpecs": {"Worker": {"replicas": 1}}}}
    bench.store.patch_job("default", "job", scale, check=lambda *_: None)
    bench.controller.sync(KEY)
    # A member until it has gone, so that all of them can commit one last step together.
    assert bench.alive() == {"job-worker-0", "job-worker-1"}
    assert bench.leaving() == {"job-worker-1"}
    bench.store.patch_job("default", "job", {"spec": {"suspend": True}}, check=lambda *_: None)
    bench.controller.sync(KEY)
    assert bench.leaving() == {"job-worker-0", "job-worker-1"}
    bench.store.patch_job("default", "job", {"spec": {"cancel": True}}, check=lambda *_: None)
    bench.controller.sync(KEY)
    assert bench.alive() == set()


def test_the_group_of_an_automatic_job_does_not_wait_for_workers_without_a_place(bench: Bench) -> None:
    bench.store.create_job(shell_job("job", "true", 3, minReplicas=2, maxReplicas=3, sharing={"automatic": True}))
    bench.settle()
    for pod in bench.pods()[:2]:
        bench.store.update_pod(pod["metadata"]["uid"], lambda p: objects.mark_scheduled(p, "here", ()))
    bench.settle()
    assert bench.alive() == {"job-worker-0", "job-worker-1"}
    bench.store.update_pod(bench.pods()[2]["metadata"]["uid"], lambda p: objects.mark_scheduled(p, "here", ()))
    bench.settle()
    assert len(bench.alive()) == 3


def test_a_worker_that_others_delete_is_a_member_until_it_is_gone(bench: Bench) -> None:
    bench.run_job(shell_job("job", "true", 2, minReplicas=1))
    bench.store.evict_pod(bench.pods()[1]["metadata"]["uid"], grace_s=30.0)
    bench.settle()
    assert bench.status()["restarts"] == {"Preempted": 1}
    assert (bench.alive(), bench.leaving()) == ({"job-worker-0", "job-worker-1"}, {"job-worker-1"})
    bench.end_pod(1, 143)
    bench.controller.sync(KEY)
    assert bench.alive() == {"job-worker-0"}


def test_peers_may_miss_a_worker_before_its_node_is_found_dead(bench: Bench) -> None:
    job = bench.store.create_job(shell_job("job", "true", 2, minReplicas=1, maxReplicas=3))
    bench.settle()
    bench.place_pods()
    bench.run_pods()
    bench.settle()
    bench.clock.now += 60
    lost = bench.pods()[1]["metadata"]["uid"]
    bench.rendezvous.groups.by_key[KEY].signs.silent.add(lost)
    bench.settle()
    gone = bench.pods()[1]["metadata"]
    # A pod on a dead node never ends: it keeps its name, and its replacement has another.
    assert gone["uid"] == lost
    assert gone["deletionGracePeriodSeconds"] > 0
    assert len(bench.pods()) == 3
    assert bench.status()["restarts"] == {"Unresponsive": 1}
    bench.workload.lost = frozenset({"node-1"})
    bench.settle()
    assert bench.pods()[1]["metadata"]["deletionGracePeriodSeconds"] == 0
    assert bench.status()["restarts"] == {"NodeLost": 1}
    assert [(item["uid"], item["cause"]) for item in bench.status()["interruptions"]] == [(lost, "NodeLost")]
    reasons = [event["reason"] for event in bench.store.list_events(job["metadata"]["uid"])]
    assert (reasons.count("Unresponsive"), reasons.count("NodeLost")) == (1, 1)


def test_a_job_with_a_rendezvous_of_its_own_gets_none_of_ours(bench: Bench) -> None:
    bench.store.create_job(shell_job("job", "true", rdzvEndpoint="etcd:2379"))
    bench.settle()
    assert bench.rendezvous.groups.by_key == {}


def test_a_job_that_is_gone_is_dropped(bench: Bench) -> None:
    bench.store.create_job(shell_job("job", "true"))
    bench.settle()
    bench.store.delete_job("default", "job")
    bench.controller.sync(KEY)
    assert bench.rendezvous.groups.by_key == {}


def test_a_job_past_its_time_to_live_is_deleted(bench: Bench) -> None:
    bench.store.create_job(shell_job("job", "true", ttlSecondsAfterFinished=60))
    bench.settle()
    bench.run_pods()
    bench.end_pod(0, 0)
    bench.settle()
    assert bench.status()["phase"] == "Succeeded"
    bench.clock.now += 61
    bench.controller.sync(KEY)
    assert bench.store.list_jobs() == []


@pytest.mark.parametrize(
    ("selector", "closed", "brought"),
    [({}, True, False), ({CAPACITY: "spot"}, False, False), ({}, False, True), ({}, False, False)],
)
def test_a_node_to_leave_is_named_to_new_workers_only_where_that_is_needed(
    bench: Bench, selector: dict[str, str], closed: bool, brought: bool
) -> None:
    """Karpenter brings no machine for a pod that names nodes, neither by field nor by label."""
    job = shell_job("job", "true", 2)
    job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["nodeSelector"] = selector
    bench.store.create_job(job)
    bench.settle()
    bench.place_pods()
    bench.run_pods()
    bench.workload.notices, bench.workload.namable = {"node-0": LeaveNotice("it goes", closed=closed)}, not brought
    bench.settle()
    bench.workload.lost = frozenset({"node-1"})
    bench.settle()
    (new,) = (pod for pod in bench.pods() if pod["status"]["phase"] == "Pending")
    named = "node-0" in json.dumps(new["spec"].get("affinity", {}))
    assert named == (not selector and not closed and not brought)


def test_progress_alone_is_written_once_a_second(bench: Bench) -> None:
    bench.run_job(shell_job("job", "true"))
    pod = bench.pods()[0]["metadata"]
    group = bench.rendezvous.groups.by_key[KEY]
    group.join(Member(pod["uid"], pod["name"], "127.0.0.1", 1, 1), 0, bench.clock())
    bench.clock.now += 2
    group.note_step(1, ProgressStatus(step=1), bench.clock())
    bench.settle()
    bench.workload.calls.clear()
    for step in range(2, 40):  # four seconds
        bench.clock.now += 0.1
        group.note_step(1, ProgressStatus(at=Timestamp(bench.clock()), step=step), bench.clock())
        bench.controller.sync(KEY)
    assert bench.status()["progress"]["step"] >= 30
    assert 3 <= bench.workload.calls.count("write") <= 4


def test_a_job_that_fails_to_be_worked_on_does_not_hold_up_the_others(bench: Bench, caplog: Any) -> None:
    bench.workload.errors["write"] = [ClusterError("disk on fire"), RuntimeError("a bug"), ConflictError("raced")]
    for name in ("job", "other"):
        bench.store.create_job(shell_job(name, "true"))
    bench.controller.start()
    try:
        wait_until(lambda: len(bench.store.list_pods()) == 2)
    finally:
        bench.controller.stop()
    assert "disk on fire" in caplog.text
    assert "a bug" in caplog.text


def test_a_slow_job_holds_up_no_other_where_there_are_threads(bench: Bench) -> None:
    reached, go_on, outcomes = threading.Event(), threading.Event(), []

    class Slow(LocalWorkload):
        def write_status(self, job: ElasticJob, status: JobStatus) -> None:
            if job.name == "job" and not go_on.is_set():
                reached.set()
                go_on.wait()
            super().write_status(job, status)

    def note(seconds: float, outcome: str) -> None:
        outcomes.append(outcome)

    workload = Slow(bench.store, "unix:///nowhere")
    controller = Controller(workload, None, bench.clock, threads=2, listeners=Listeners(on_pass=note))
    bench.store.create_job(shell_job("job", "true"))
    controller.start()
    try:
        assert reached.wait()
        bench.store.create_job(shell_job("other", "true"))
        wait_until(lambda: bench.store.list_pods("default", "other"))
        assert bench.pods() == []
        go_on.set()
        wait_until(bench.pods)
        assert controller.alive
    finally:
        go_on.set()
        controller.stop()
    assert not controller.alive
    assert "ok" in outcomes


def test_a_change_in_the_rendezvous_service_leads_to_a_pass(bench: Bench) -> None:
    bench.store.create_job(shell_job("job", "true"))
    bench.controller.start()
    try:
        wait_until(bench.pods)
        bench.run_pods()
        wait_until(lambda: bench.status().get("phase") == "Running")
        pod = bench.pods()[0]["metadata"]
        group = bench.rendezvous.groups.by_key[KEY]
        group.join(Member(pod["uid"], pod["name"], "127.0.0.1", 1, 1), 0, bench.clock())
        bench.clock.now += 2
        bench.controller.enqueue_soon(KEY)
        wait_until(lambda: bench.status().get("generation") == 1)
    finally:
        bench.controller.stop()


def test_batches_grow_and_end_with_the_first_failure() -> None:
    batches: list[list[int]] = []

    def call(batch: list[int]) -> None:
        batches.append(batch)
        if 9 in batch:
            raise ClusterError("no more room")

    with pytest.raises(ClusterError):
        slow_start(call, list(range(100)))
    assert batches == [[0], [1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13, 14]]
    batches.clear()
    slow_start(call, [])
    assert batches == []


def test_a_job_with_many_calls_lets_those_of_another_come_between() -> None:
    made: list[str] = []
    may_go, began = threading.Event(), threading.Event()

    def call(name: str) -> None:
        began.set()
        may_go.wait()
        made.append(name)

    with ThreadPoolExecutor(1) as calls:
        flood = threading.Thread(target=call_all, args=(calls, call, [f"flood-{number}" for number in range(500)]))
        flood.start()
        assert began.wait()
        wait_until(lambda: calls._work_queue.qsize() == PARALLEL_CALLS - 1)
        other = calls.submit(call, "other")
        may_go.set()
        other.result()
        flood.join()
    assert made.index("other") == PARALLEL_CALLS
    assert len(made) == 501
