"""A job's token changes while real kubelets, launchers and a controller go on with it."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.spec import LABEL_JOB
from elasticctl.kubeapi.connection import Connection
from elasticctl_controller.core.group.worker_tokens import EVERY_S
from tests.on_cluster.commands import kubectl
from tests.on_cluster.conftest import stopping
from tests.on_cluster.replicas import ADDRESS, RENDEZVOUS_PORT, Replicas
from tests.on_cluster.trainer import Trainer
from tests.on_cluster.waiting import wait_until


@pytest.fixture
def trainer(api: Connection, crd: None, tmp_path: Path) -> Iterator[Trainer]:
    found = Trainer(api, "tokens")
    with stopping(Replicas(tmp_path)) as replicas:
        replicas.start()
        replicas.leader()
        found.delete()
        yield found
        found.delete()


def answer(token: str) -> int:
    """What the service answers to a token."""
    url = f"http://{ADDRESS}:{RENDEZVOUS_PORT}/v1/jobs/default/tokens/heartbeat"
    try:
        urllib.request.urlopen(urllib.request.Request(url, b"?", {"Authorization": f"Bearer {token}"}), timeout=60)
    except urllib.error.HTTPError as refused:
        return refused.code
    raise AssertionError("no body is an answer")


def test_a_jobs_token_changes_and_its_workers_train_on(trainer: Trainer) -> None:
    def tokens() -> set[str]:
        pods = [f"{trainer.name}-worker-{index}" for index in range(2)]
        return {kubectl("exec", pod, "--", "cat", "/var/run/secrets/elasticctl/token") for pod in pods}

    def is_delivered() -> bool:
        token = trainer.job().status.token
        return token is not None and token.number == 2 and token.former_until is not None

    def bring_tokens() -> set[str]:
        """Have the kubelets update files immediately, and return what the workers have."""
        looked_at = f"test.elasticctl.dev/looked-at={time.time()}"
        kubectl("annotate", "pods", "--overwrite", "-l", f"{LABEL_JOB}={trainer.name}", looked_at)
        return tokens()

    def put(moment: str, shift_s: float) -> None:
        """Have the job's status say that this was, or will be, so long from now: hours pass immediately.

        A status that the controller is about to write does not replace this one: it has another time of writing.
        """
        now = time.time()
        changed = {"token": {moment: to_rfc3339(now + shift_s)}, "lastReconcileTime": to_rfc3339(now)}
        trainer.patch({"status": changed})

    trainer.submit(2, epochs=1_000_000, step_delay_s=0.1)
    trainer.wait_training(2)
    before, uids, generation = tokens(), trainer.uids(), trainer.job().status.generation
    (first,) = before
    put("since", -EVERY_S)
    wait_until(is_delivered)
    assert answer(first) == 400, "it is good until the workers have the next"
    wait_until(lambda: not before & bring_tokens(), every_s=1)
    (second,) = tokens()
    assert answer(second) == 400
    put("formerUntil", -1.0)
    wait_until(lambda: answer(first) == 503)
    assert (answer(second), answer("0" * 64)) == (400, 401)
    step = trainer.job().status.progress.step or 0
    wait_until(lambda: (trainer.job().status.progress.step or 0) > step + 20)
    assert (trainer.uids(), trainer.job().status.generation) == (uids, generation)
    assert trainer.job().status.restarts == {}
    trainer.patch({"spec": {"cancel": True}})
    wait_until(lambda: answer(second) == 410)
