"""Real training on real nodes, through everything that takes workers and controllers away."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from elasticctl.cluster.kube.connection import Connection
from elasticctl.errors import NotFoundError
from elasticctl.status import Cause, Phase
from tests.cluster.conftest import Replicas
from tests.cluster.trainer import Trainer
from tests.waiting import wait_until

LAB = os.environ.get("ELASTICCTL_TEST_LAB", "")
"""The command that takes nodes away and brings them back: LAB kill-node NAME, LAB start-node NAME."""


@pytest.fixture(scope="module")
def digits(api: Connection, replicas: Replicas) -> Iterator[Trainer]:
    """A job of three workers that trains for as long as it is let."""
    trainer = Trainer(api, "digits")
    trainer.delete()
    trainer.submit(3, epochs=100_000, step_delay_s=0.05)
    trainer.wait_training(3)
    yield trainer
    trainer.delete()


def lab(*words: str) -> None:
    if not LAB:
        pytest.skip("$ELASTICCTL_TEST_LAB is not set: nobody to take nodes away")
    subprocess.run([LAB, *words], check=True, timeout=120)


def test_scaling_keeps_the_workers_that_stay(digits: Trainer) -> None:
    first = digits.uids()
    digits.disturbed(lambda: digits.scale(4), 4)
    grown = digits.uids()
    assert first.items() <= grown.items()
    digits.disturbed(lambda: digits.scale(2), 2)
    wait_until(lambda: len(digits.pods()) == 2, 60)
    assert digits.uids().items() <= grown.items()
    digits.disturbed(lambda: digits.scale(3), 3)


@pytest.mark.parametrize("index", [2, 1, 0])
def test_a_worker_that_is_killed_costs_a_few_steps(digits: Trainer, index: int) -> None:
    before = digits.uids()
    digits.wait_steady()
    digits.disturbed(lambda: digits.kill(index), 3)
    after = digits.uids()
    lost = f"digits-worker-{index}"
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {lost}
    last = digits.job().status.interruptions[-1]
    assert (last.worker, last.cause) == (lost, Cause.DELETED)
    assert last.recovery_s is not None  # how long is for a benchmark to say: the lab shares its cores with all else
    print(f"worker {index}: {last.recovery_s:.1f} s to the survivors' next step, {last.steps_redone} steps redone")


def test_the_next_controller_takes_over(digits: Trainer, replicas: Replicas) -> None:
    leader = replicas.leader()
    generation = digits.job().status.generation
    leader.process.kill()
    replicas.running.remove(leader)
    leader.process.wait()
    began = time.monotonic()
    replicas.leader()
    print(f"fail-over: {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < 20
    step = digits.job().status.progress.step or 0
    wait_until(lambda: (digits.job().status.progress.step or 0) > step + 10, 60)
    assert digits.job().status.generation == generation  # nobody had to stop for it
    replicas.start()
    digits.disturbed(lambda: digits.kill(1), 3)


def test_a_node_that_dies_without_a_word(digits: Trainer, api: Connection) -> None:
    node = next(pod["spec"]["nodeName"] for pod in digits.pods() if pod["metadata"]["name"] == "digits-worker-1")
    on_it = {pod["metadata"]["name"] for pod in digits.pods() if pod["spec"]["nodeName"] == node}
    before = digits.uids()
    try:
        digits.disturbed(lambda: lab("kill-node", node), 3, 180)
        ready = api.request("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
        assert next(item["status"] for item in ready if item["type"] == "Ready") == "Unknown"
        assert {name for name, uid in digits.uids().items() if before.get(name) != uid} == on_it
        causes = {item.worker: item.cause for item in digits.job().status.interruptions[-len(on_it) :]}
        assert causes == dict.fromkeys(on_it, Cause.NODE_LOST)
    finally:
        lab("start-node", node)


def test_a_node_whose_object_is_deleted(digits: Trainer, api: Connection) -> None:
    node = next(pod["spec"]["nodeName"] for pod in digits.pods() if pod["metadata"]["name"] == "digits-worker-0")
    on_it = {pod["metadata"]["name"] for pod in digits.pods() if pod["spec"]["nodeName"] == node}
    before = digits.uids()

    def reclaim() -> None:
        lab("kill-node", node)
        api.request("DELETE", f"/api/v1/nodes/{node}")
        began = time.monotonic()
        wait_until(lambda: all(digits.uids().get(name) not in (None, before[name]) for name in on_it), 60)
        print(f"{len(on_it)} workers replaced {time.monotonic() - began:.1f} s after their node's deletion")

    try:
        digits.disturbed(reclaim, 3, 180)
    finally:
        lab("start-node", node)


def test_a_job_ends_and_leaves_nothing(api: Connection, replicas: Replicas) -> None:
    trainer = Trainer(api, "short")
    trainer.delete()
    trainer.submit(2, epochs=1, step_delay_s=0.0, cleanPodPolicy="Running", ttlSecondsAfterFinished=5)
    wait_until(lambda: trainer.job().status.phase is Phase.SUCCEEDED, 120)
    job = trainer.job()
    assert (job.status.interruptions, job.status.failures) == ((), 0)
    assert (job.status.progress.step, job.status.checkpoint.step) == (23, 23)  # an epoch: 1,438 samples by 64
    wait_until(trainer.is_gone, 120)
    with pytest.raises(NotFoundError):
        trainer.job()
