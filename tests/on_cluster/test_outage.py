"""An API server that says nothing for a minute: training goes on, and everybody finds back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks.replicas import Replicas
from elasticctl.kubeapi.connection import Connection
from elasticctl_controller.kube.manager import EXIT_LEASE_LOST
from elasticctl_controller.kube.nodes import SETTLE_S
from tests.on_cluster.commands import elasticctl, frozen_api_server, need_lab
from tests.on_cluster.trainer import Trainer
from tests.on_cluster.waiting import wait_until

OUTAGE_S = 60.0
LONGEST_PAUSE_S = 15.0
"""Between two checkpoints, of which there is one a second; a shared machine may be slow."""


@pytest.fixture
def steady(api: Connection, replicas: Replicas) -> Iterator[Trainer]:
    need_lab()
    trainer = Trainer(api, "steady")
    trainer.delete()
    try:
        trainer.submit(3, epochs=100_000, step_delay_s=0.05)
        trainer.wait_training(3)
        trainer.wait_steady()
        yield trainer
    finally:
        trainer.delete()


@pytest.mark.usefixtures("cli_home")
def test_training_goes_on_while_the_api_server_says_nothing(steady: Trainer, replicas: Replicas) -> None:
    before, uids, leader = steady.job().status, steady.uids(), replicas.leader()
    with frozen_api_server():
        until = time.monotonic() + OUTAGE_S
        listed = elasticctl("list")
        assert (listed.code, listed.out, listed.err.count("\n")) == (3, "", 1), listed
        assert listed.err.startswith("error: no answer from the cluster at "), listed
        assert listed.took_s < 10
        while time.monotonic() < until:
            step = steady.stored_step()
            wait_until(lambda step=step: steady.stored_step() > step, LONGEST_PAUSE_S, every_s=0.2)  # type: ignore[misc]
        # It cannot know whether another leads by now.
        assert leader.process.wait(10) == EXIT_LEASE_LOST
        stored = steady.stored_step()
    back_at = time.time()
    replicas.running.remove(leader)
    replicas.leader()
    replicas.start()

    # Kubernetes now calls nodes silent that could not reach the server. Nobody is replaced for it, and the status
    # tells what has happened meanwhile.
    wait_until(lambda: (steady.job().status.progress.at or 0) > back_at + SETTLE_S + 5, 120, every_s=0.5)
    after = steady.job().status
    assert (after.progress.step or 0) >= stored
    assert (after.checkpoint.step or 0) >= stored
    assert steady.uids() == uids
    assert after.generation == before.generation
    assert after.interruptions == before.interruptions
    steady.disturbed(lambda: steady.kill(1), 3)
