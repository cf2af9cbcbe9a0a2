"""How workers and jobs end by their own doing: what status, events and the command line say, and what is left over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.errors import NotFoundError
from elasticctl.api.spec import API_VERSION, PLURAL
from elasticctl.api.status import Cause, Phase
from elasticctl.kubeapi.connection import Connection, resource_path
from tests.on_cluster.commands import elasticctl
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.trainer import NAMESPACE, Trainer
from tests.on_cluster.waiting import wait_until

HUNGRY = Path(__file__).with_name("hungry.py")
BROKEN = 'print("reading the data", flush=True); raise ValueError("the learning rate is a banana")'


@pytest.fixture
def trainer(api: Connection, replicas: Replicas, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """A job of the test's own."""
    found = Trainer(api, request.node.name.removeprefix("test_").replace("_", "-")[:40].strip("-"))
    found.delete()
    yield found
    found.delete()


@pytest.mark.usefixtures("cli_home")
def test_memory_that_runs_out_is_counted_and_said(trainer: Trainer) -> None:
    script = [str(HUNGRY), "/state/hungry", "--epochs", "100000", "--step-delay-s", "0.1"]
    trainer.submit_script(script, 2, limits={"memory": "1Gi"}, options=())
    trainer.wait_training(2)
    committed, before = trainer.wait_committed(), trainer.uids()
    worker = f"{trainer.name}-worker-1"
    (trainer.folder / "hungry").write_text(worker)
    generation = trainer.job().status.generation
    after = trainer.wait_training(2, generation).status
    assert (after.restarts, after.failures) == ({"OOMKilled": 1}, 1)
    last = after.interruptions[-1]
    assert (last.worker, last.cause) == (worker, Cause.OOM_KILLED)
    assert trainer.uids() == before, "its rank is started again where it was"
    assert all((item.resumed_step or committed) >= committed for item in after.generations)
    assert trainer.uids()[f"{trainer.name}-worker-0"] == before[f"{trainer.name}-worker-0"]
    wait_until(lambda: "OOMKilled" in trainer.reasons())
    said = elasticctl("explain", trainer.name)
    assert said.code == 0
    assert "memory" in said.out, said
    assert "OOMKilled" in elasticctl("history", trainer.name).out


@pytest.mark.usefixtures("cli_home")
def test_a_budget_that_is_used_up_fails_the_job(trainer: Trainer, tmp_path: Path) -> None:
    policy = {"backoffSeconds": 0.1, "backoffMaxSeconds": 0.5}
    trainer.submit_script(["-c", BROKEN], 1, backoffLimit=1, policy=policy)
    waited = elasticctl("wait", trainer.name)
    assert waited.code == 1, waited
    assert f"rank 0 of {trainer.name}-worker-0" in waited.err
    assert "ValueError: the learning rate is a banana" in waited.err
    assert "reading the data" in waited.err
    status = trainer.job().status
    assert (status.phase, status.reason, status.failures) == (Phase.FAILED, "BackoffLimitExceeded", 2)
    assert status.restarts == {"ApplicationError": 2}
    said = elasticctl("explain", trainer.name).out
    assert "the learning rate is a banana" in said
    wait_until(lambda: "ElasticJobFailed" in trainer.reasons())
    trainer.patch({"spec": {"ttlSecondsAfterFinished": 1}})
    wait_until(trainer.is_gone)
    with pytest.raises(NotFoundError):
        trainer.job()


def test_a_job_whose_deletion_a_finalizer_holds_up_leaves_no_worker(trainer: Trainer, api: Connection) -> None:
    trainer.submit_script(["-c", "import time; time.sleep(3600)"], 2)
    wait_until(lambda: trainer.job().status.phase is Phase.RUNNING)
    trainer.patch({"metadata": {"finalizers": ["test.elasticctl.dev/held"]}})
    try:
        path = resource_path(API_VERSION, NAMESPACE, PLURAL, trainer.name)
        api.request("DELETE", path, {"propagationPolicy": "Background"})
        wait_until(lambda: not trainer.pods())
        status = trainer.job().status
        assert (status.phase, status.message) == (Phase.CANCELLED, "the job is being deleted")
        assert (status.failures, status.interruptions) == (0, ())
    finally:
        trainer.patch({"metadata": {"finalizers": None}})
    wait_until(trainer.is_gone)
