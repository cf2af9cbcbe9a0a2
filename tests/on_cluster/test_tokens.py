"""A job's token changes while real kubelets, launchers and a controller go on with it."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.replicas import ADDRESS, RENDEZVOUS_PORT, Replicas
from elasticctl.kubeapi.connection import Connection
from tests.on_cluster.commands import kubectl
from tests.on_cluster.conftest import tell
from tests.on_cluster.trainer import Trainer
from tests.on_cluster.waiting import wait_until

EVERY_S = 300
KUBELET_S = 180
"""Kubelets look at a pod's files every minute or so."""


@pytest.fixture
def trainer(api: Connection, crd: None, tmp_path: Path) -> Iterator[Trainer]:
    replicas, found = Replicas(tmp_path), Trainer(api, "tokens")
    try:
        replicas.start(flags=["--rotate-tokens-s", str(EVERY_S)])
        replicas.leader()
        found.delete()
        yield found
        found.delete()
    finally:
        try:
            replicas.stop()
        finally:
            tell(replicas)


def answer(token: str) -> int:
    """What the service says to whoever shows a token."""
    url = f"http://{ADDRESS}:{RENDEZVOUS_PORT}/v1/jobs/default/tokens/heartbeat"
    try:
        urllib.request.urlopen(urllib.request.Request(url, b"?", {"Authorization": f"Bearer {token}"}), timeout=10)
    except urllib.error.HTTPError as refused:
        return refused.code
    raise AssertionError("no body is an answer")


@pytest.mark.timeout(1200)
def test_a_jobs_token_changes_and_its_workers_train_on(trainer: Trainer) -> None:
    def tokens() -> set[str]:
        pods = [f"{trainer.name}-worker-{index}" for index in range(2)]
        return {kubectl("exec", pod, "--", "cat", "/var/run/secrets/elasticctl/token") for pod in pods}

    def former_until() -> float | None:
        token = trainer.job().status.token
        return token.former_until if token is not None and token.number == 2 else None

    trainer.submit(2, epochs=1_000_000, step_delay_s=0.1)
    trainer.wait_training(2)
    before, uids, generation = tokens(), trainer.uids(), trainer.job().status.generation
    (first,) = before
    wait_until(lambda: former_until() is not None, EVERY_S + 60)
    assert answer(first) == 400, "it is good until the workers have the next"
    wait_until(lambda: not before & tokens(), KUBELET_S)
    (second,) = tokens()
    assert answer(second) == 400
    time.sleep(max(0.0, (former_until() or 0.0) - time.time()) + 1)
    assert (answer(second), answer(first), answer("0" * 64)) == (400, 503, 401)
    step = trainer.job().status.progress.step or 0
    wait_until(lambda: (trainer.job().status.progress.step or 0) > step + 20, 60)
    assert (trainer.uids(), trainer.job().status.generation) == (uids, generation)
    assert trainer.job().status.restarts == {}
    trainer.patch({"spec": {"cancel": True}})
    wait_until(lambda: answer(second) == 410, 60)
