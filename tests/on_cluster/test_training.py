"""Real training on real nodes, through everything that takes workers and controllers away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.codec import Manifest, from_rfc3339
from elasticctl.api.errors import ClusterError, NotFoundError
from elasticctl.api.status import Cause, GroupGeneration, Interruption, JobStatus, Phase
from elasticctl.kubeapi.connection import Connection
from tests.on_cluster.commands import (
    elasticctl,
    frozen,
    kill_processes,
    kubectl,
    lab,
    need_lab,
    restart,
    start_node,
    stopped,
)
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.trainer import Trainer
from tests.on_cluster.waiting import wait_until

SHARDED = Path(__file__).parents[1] / "support/train/sharded_worker.py"
OUTAGE_S = 20.0
"""Longer than any lease of the controller's lasts, and than the lab's Kubernetes waits for a node."""
SETTLED_S = 5.0
"""By then a node that was taken for lost would be: nodes.UNKNOWN_GRACE_S."""


def keeps_copies(trainer: Trainer, workers: int) -> GroupGeneration | None:
    """The newest generation, if it has so many workers and keeps copies on two of them."""
    newest = trainer.job().status.generations[-1:]
    if not newest or len(newest[0].workers) != workers:
        return None
    return newest[0] if newest[0].copied_every_steps and not newest[0].copies_lack else None


def resumed_after(trainer: Trainer, generation: int) -> GroupGeneration | None:
    """The first later generation that has resumed: one may be over before it has."""
    made = [item for item in trainer.job().status.generations if item.generation > generation]
    return next((item for item in made if item.resumed_from), None)


@pytest.fixture(scope="module")
def digits(api: Connection, replicas: Replicas) -> Iterator[Trainer]:
    """A job of three workers that trains for as long as it is let."""
    trainer = Trainer(api, "digits")
    trainer.delete()
    try:
        trainer.submit(3, epochs=100_000, step_delay_s=0.1)
        trainer.wait_training(3)
        yield trainer
    finally:
        trainer.delete()


def node_of(digits: Trainer, index: int) -> tuple[str, set[str]]:
    """The node that a worker is on, and all workers that are on it."""
    placed = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in digits.pods()}
    node = placed[f"{digits.name}-worker-{index}"]
    return node, {name for name, its in placed.items() if its == node}


def are_replaced(digits: Trainer, before: dict[str, str], lost: set[str]) -> bool:
    """Whether there are as many workers as before, the same except for lost ones. Replacements may have other names.

    A worker that its peers have given up before Kubernetes has noticed that its node is dead leaves a pod behind that
    cannot end yet, and so keeps its name until then.
    """
    after = digits.uids()
    stayed = {name: uid for name, uid in before.items() if name not in lost}
    gone = {before[name] for name in lost}
    return len(after) == len(before) and stayed.items() <= after.items() and not gone & set(after.values())


def is_unheard(api: Connection, node: str) -> bool:
    """Whether Kubernetes reports that this node is silent."""
    conditions = api.request("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
    return any(item["type"] == "Ready" and item["status"] == "Unknown" for item in conditions)


def test_a_job_ends_and_leaves_nothing(api: Connection, replicas: Replicas) -> None:
    trainer = Trainer(api, "short")
    trainer.delete()
    trainer.submit(2, epochs=1, step_delay_s=0.0, cleanPodPolicy="Running")
    wait_until(lambda: trainer.job().status.phase is Phase.SUCCEEDED)
    job = trainer.job()
    assert (job.status.interruptions, job.status.failures) == ((), 0)
    assert (job.status.progress.step, job.status.checkpoint.step) == (23, 23)  # an epoch: 1,438 samples by 64
    trainer.patch({"spec": {"ttlSecondsAfterFinished": 1}})
    wait_until(trainer.is_gone)
    with pytest.raises(NotFoundError):
        trainer.job()


def test_scaling_keeps_the_workers_that_stay(digits: Trainer) -> None:
    first = digits.uids()
    digits.disturbed(lambda: digits.scale(4), 4)
    grown = digits.uids()
    assert first.items() <= grown.items()
    digits.disturbed(lambda: digits.scale(3), 3)
    wait_until(lambda: len(digits.pods()) == 3)
    assert digits.uids().items() <= grown.items()
    wait_until(lambda: "Scaled" in digits.reasons())


@pytest.mark.parametrize("index", [2, 0])
def test_a_worker_that_is_killed_costs_no_step_and_no_process_of_another(digits: Trainer, index: int) -> None:
    before, starts, generation = digits.uids(), digits.starts(), digits.job().status.generation
    trains = digits.disturbed(lambda: digits.kill(index), 3)
    after = digits.uids()
    new = set(after.values()) - set(before.values())
    assert digits.starts() - starts == dict.fromkeys(new, 1)
    made = [item for item in trains.status.generations if item.generation > generation and item.first_step_at]
    assert {item.resumed_from for item in made if item.resumed_from} == {"memory"}
    lost = f"digits-worker-{index}"
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {lost}
    (last,) = wait_until(lambda: recovered(digits, {lost: before[lost]}))
    assert (last.worker, last.cause, last.steps_redone) == (lost, Cause.DELETED, 0)
    wait_until(lambda: Cause.DELETED.value in digits.reasons())
    # How long it took is for a benchmark to say: the lab shares its cores with all else.
    print(f"worker {index}: {last.recovery_s:.1f} s to the survivors' next step")


def test_sharded_training_goes_on_from_copies_in_memory_on_another_node(api: Connection, replicas: Replicas) -> None:
    """It stores nothing but on SIGTERM, which a worker whose processes are killed does not hear."""
    trainer = Trainer(api, "sharded")
    trainer.delete()
    try:
        trainer.submit_script([str(SHARDED)], 3, environment={"LAB": "/state"})
        copied = wait_until(lambda: keeps_copies(trainer, 3))
        assert copied is not None
        kill_processes(trainer.uids()[f"{trainer.name}-worker-1"])
        resumed = wait_until(lambda: resumed_after(trainer, copied.generation))
        assert resumed is not None
        assert resumed.resumed_from == "copies", resumed.resumed_because
        assert (resumed.resumed_step or 0) > 0
    finally:
        trainer.delete()


def test_the_next_controller_takes_over(digits: Trainer, replicas: Replicas) -> None:
    leader = replicas.leader()
    generation = digits.job().status.generation
    leader.process.kill()
    replicas.running.remove(leader)
    leader.process.wait()
    began = time.monotonic()
    replicas.leader()
    print(f"fail-over: {time.monotonic() - began:.1f} s")
    step = digits.job().status.progress.step or 0
    wait_until(lambda: (digits.job().status.progress.step or 0) > step + 10)
    assert digits.job().status.generation == generation  # no rank had to stop for it
    replicas.start()
    digits.disturbed(lambda: digits.kill(1), 3)


@pytest.mark.each_release
def test_a_node_that_dies_without_a_word(digits: Trainer, api: Connection) -> None:
    node, on_it = node_of(digits, 1)
    before = digits.uids()
    try:
        digits.disturbed(lambda: lab("kill-node", node), 3)
        assert are_replaced(digits, before, on_it)
        assert {item.worker for item in digits.ends_of(before)} == on_it
        wait_until(lambda: is_unheard(api, node))  # the peers may have noticed first
        wait_until(lambda: {item.cause for item in digits.ends_of(before)} == {Cause.NODE_LOST})
        wait_until(lambda: Cause.NODE_LOST.value in digits.reasons())
        wait_until(lambda: all(map(is_staying, digits.pods())))  # what cannot end on that node is gone all the same
    finally:
        start_node(node)


def test_a_node_whose_object_is_deleted(digits: Trainer, api: Connection) -> None:
    node, on_it = node_of(digits, 0)
    before = digits.uids()

    def reclaim() -> None:
        lab("kill-node", node)
        api.request("DELETE", f"/api/v1/nodes/{node}")
        began = time.monotonic()
        wait_until(lambda: are_replaced(digits, before, on_it))
        print(f"{len(on_it)} workers replaced {time.monotonic() - began:.1f} s after their node's deletion")

    with stopped("kube-proxy"):  # the lab has one for all nodes, which ends with the object of the first node
        try:
            digits.disturbed(reclaim, 3)
            assert {item.cause for item in digits.ends_of(before)} == {Cause.NODE_LOST}
        finally:
            start_node(node)


@pytest.fixture
def budget(digits: Trainer) -> Iterator[int]:
    """The job has a minimum of 2, and a disruption budget that says so; yields how many workers it protects."""
    digits.patch({"spec": {"minReplicas": 2}})
    wait_until(lambda: "2" in kubectl("get", "pdb", "-o", "jsonpath={.items[*].status.desiredHealthy}"))
    yield 2
    digits.patch({"spec": {"minReplicas": 1}})


def test_a_node_that_is_drained_costs_no_step(digits: Trainer, budget: int) -> None:
    digits.wait_training(3)
    node, on_it = node_of(digits, 1)
    before = digits.uids()
    seen, over = [], threading.Event()

    def count() -> None:
        while not over.wait(0.1):
            seen.append(sum(pod["status"]["phase"] == "Running" for pod in digits.pods() if is_staying(pod)))

    def drain() -> None:
        watching = threading.Thread(target=count)
        watching.start()
        try:
            kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s", timeout_s=300)
        finally:
            over.set()
            watching.join()

    try:
        digits.disturbed(drain, 3)
    finally:
        kubectl("uncordon", node)
    assert min(seen) >= budget
    after = digits.uids()  # a worker that takes its time to go keeps its name: another index may have come for it
    assert {(name, uid) for name, uid in before.items() if name not in on_it} <= after.items()
    assert len(after) == 3
    assert node not in {pod["spec"]["nodeName"] for pod in digits.pods() if is_staying(pod)}
    lost = wait_until(lambda: recovered(digits, before))
    assert {item.worker for item in lost} == on_it
    assert {item.cause for item in lost} == {Cause.DRAINED}
    assert [item.steps_redone for item in lost] == [0] * len(on_it)


def is_staying(pod: Manifest) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


def lost_in(status: JobStatus) -> list[str]:
    """The uids of the workers that have been lost: how that went may be written later."""
    return [item.uid for item in status.interruptions]


def recovered(digits: Trainer, uids: dict[str, str]) -> list[Interruption]:
    """The losses of these pods, once training has got over all of them."""
    lost = digits.ends_of(uids)
    return lost if all(item.recovered_at is not None for item in lost) else []


@pytest.mark.usefixtures("cli_home")
@pytest.mark.parametrize("part", ["kube-apiserver", "etcd"])
def test_training_goes_on_while_the_control_plane_says_nothing(
    digits: Trainer, api: Connection, replicas: Replicas, part: str
) -> None:
    need_lab()
    digits.wait_training(3)
    before, uids, leader = digits.job().status, digits.uids(), replicas.leader()
    with frozen(part):
        until = time.monotonic() + OUTAGE_S
        listed = elasticctl("list", patient=False)
        assert (listed.code, listed.out, listed.err.count("\n")) == (3, "", 1), listed
        assert listed.err.startswith("error: no answer from the cluster at "), listed
        while time.monotonic() < until:
            step = digits.stored_step()
            wait_until(lambda step=step: digits.stored_step() > step, every_s=0.2)  # type: ignore[misc]
        assert not leader.leads(), "it cannot know whether another leads by now"
        stored = digits.stored_step()
    wait_until(leader.leads)  # no other replica took the lease while the server did not answer
    assert leader.process.poll() is None
    wait_settled(digits, api)
    after = digits.job().status
    assert (after.progress.step or 0) >= stored
    assert (after.checkpoint.step or 0) >= stored
    assert digits.uids() == uids
    assert (after.generation, lost_in(after)) == (before.generation, lost_in(before))
    digits.disturbed(lambda: digits.kill(1), 3)


@pytest.mark.parametrize("part", ["kube-apiserver", "etcd"])
def test_a_restart_of_the_control_plane_restarts_no_worker(
    digits: Trainer, api: Connection, replicas: Replicas, part: str
) -> None:
    need_lab()
    digits.wait_training(3)
    before, uids, starts = digits.job().status, digits.uids(), digits.starts()
    controllers = [replica.process for replica in replicas.running]
    restart(part)
    wait_settled(digits, api)
    wait_until(lambda: len([replica for replica in replicas.running if replica.leads()]) == 1)
    assert [process.poll() for process in controllers] == [None] * len(controllers)
    after = digits.job().status
    assert (digits.uids(), digits.starts()) == (uids, starts)
    assert (after.generation, lost_in(after)) == (before.generation, lost_in(before))
    digits.disturbed(lambda: digits.kill(1), 3)


def wait_settled(digits: Trainer, api: Connection) -> None:
    """Wait after an outage until nothing that it has caused can still come.

    Kubernetes calls nodes silent that could not reach the server, until they have reported again. Whoever is replaced
    for that is so soon; what workers report is stored again by a leader.
    """
    back_at = time.time()
    wait_until(lambda: are_heard(api, back_at), every_s=0.5)
    heard_at = time.time()
    wait_until(lambda: is_reported_after(digits, heard_at + SETTLED_S), every_s=0.5)


def are_heard(api: Connection, since: float) -> bool:
    """Whether all nodes have reported since then, and Kubernetes considers none of them silent."""
    try:
        nodes = api.request("GET", "/api/v1/nodes")["items"]
    except ClusterError:  # a server that has just started may refuse for many reasons
        return False
    ready = [item for node in nodes for item in node["status"]["conditions"] if item["type"] == "Ready"]
    return all(item["status"] == "True" and from_rfc3339(item["lastHeartbeatTime"]) > since for item in ready)


def is_reported_after(digits: Trainer, at: float) -> bool:
    """Whether anything has been reported since, by a server that answers."""
    try:
        return (digits.job().status.progress.at or 0) > at
    except ClusterError:
        return False


def test_a_job_that_is_cancelled_saves_and_leaves_no_worker(digits: Trainer) -> None:
    digits.wait_training(3)
    committed, before = digits.wait_committed(), digits.job().status
    digits.patch({"spec": {"cancel": True}})
    wait_until(lambda: digits.job().status.phase is Phase.CANCELLED)
    wait_until(lambda: not digits.pods())
    assert digits.stored_step() >= committed
    status = digits.job().status
    assert (status.failures, lost_in(status)) == (before.failures, lost_in(before))
    wait_until(lambda: "ElasticJobCancelled" in digits.reasons())
