"""Deadlines on machines that Karpenter brings and a trace takes away, an hour of it in ten seconds."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from elasticctl.api.goal import SPOT
from elasticctl.api.spec import ElasticJob
from elasticctl.api.yamltext import dump_yaml
from elasticctl.kubeapi.connection import Connection
from elasticctl.planning.situation import Costs
from elasticctl.simulation.traces import parse_trace
from tests.on_cluster.commands import LAB, elasticctl, kubectl
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.spot_market import (
    CAPACITY,
    HOUR_S,
    KIND,
    MACHINE,
    ON_DEMAND_USD,
    SPOT_USD,
    Cloud,
    Tape,
    plan_of,
)
from tests.on_cluster.trainer import HOST_FOLDER, IMAGE, Trainer
from tests.on_cluster.waiting import wait_until

TRACES = Path(os.environ.get("ELASTICCTL_TEST_TRACES") or "/nowhere")
"""A folder with the traces published with "Can't Be Late"."""
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="$ELASTICCTL_TEST_TRACES is not set: no traces")
STAYS = "karpenter.sh/do-not-disrupt"
SCRIPT = Path(__file__).with_name("deadline_train.py")
MOST, STEP_S, WORK_S = 3, 0.4, 120
EXPONENT = 0.92
"""n workers are n^0.92 times as fast as one."""
GRACE_S = 10
POD = "spec.replicaSpecs.Worker.template.spec"
FIRST_WORK_S = 16
"""Of the job that runs before: the forecast is based on what it measures."""
RUNS = (
    ("availability-1-aws-02-15-2023-us-east-2a_v100_1", 877, 6),
    ("availability-1-aws-10-26-2022-us-west-2a_v100_1", 248, 7),
    ("availability-1-aws-02-15-2023-us-east-2b_v100_1", 248, 8),
)
"""A trace, from which hour on, and minutes until the deadline."""


@pytest.fixture(params=RUNS, ids=[name[13:] for name, _, _ in RUNS])
def run(request: pytest.FixtureRequest) -> tuple[Tape, int]:
    """A tape and a deadline, in minutes."""
    name, from_h, minutes = request.param
    trace = parse_trace((TRACES / f"{name}.json").read_text("utf-8"), name)
    return Tape.of(trace, MOST, from_h), minutes


def submit(name: str, minutes: int, work_s: int, folder: Path, least: int = 1) -> float:
    """As a user does, with what the lab's images and nodes need; returns when."""
    binaries = Path(sys.executable).parent
    prices = {"onDemand": ON_DEMAND_USD * 3600 / HOUR_S, "spot": SPOT_USD * 3600 / HOUR_S}
    fields = {
        "spec.goal.prices": prices,
        f"{POD}.nodeSelector": {CAPACITY: "spot", KIND: MACHINE},
        f"{POD}.terminationGracePeriodSeconds": GRACE_S,
        f"{POD}.volumes": [{"name": "state", "hostPath": {"path": str(folder), "type": "Directory"}}],
        f"{POD}.containers[0].volumeMounts": [{"name": "state", "mountPath": str(folder)}],
        f"{POD}.containers[0].command[0]": str(binaries / "elasticctl-launch"),
        f"{POD}.containers[0].resources": {"limits": {"nvidia.com/gpu": 1}},
    }
    settings = [word for path, value in fields.items() for word in ("--set", f"{path}={dump_yaml(value).strip()}")]
    words = ["--name", name, "--finish-by", f"{minutes}m", "--work", f"{work_s}s"]
    words += ["--min-workers", str(least), "--max-workers", str(MOST)]
    words += ["--image", IMAGE, "--storage", folder.as_uri(), "--annotation", f"{STAYS}=true", "--no-workspace"]
    words += ["--env", f"PATH={binaries}{os.pathsep}/usr/local/bin:/usr/bin:/bin", "--env", "OMP_NUM_THREADS=1"]
    args = ["--steps", str(round(work_s / STEP_S)), "--most", str(MOST), "--step-s", str(STEP_S)]
    args += ["--exponent", str(EXPONENT)]
    began = time.time()
    done = elasticctl("submit", str(SCRIPT), *words, *settings, "-d", "--", *args)
    assert done.code == 0, done
    print(done.err)
    return began


@pytest.fixture
def folder() -> Path:
    """A folder that this machine and all nodes have at the same path."""
    made = HOST_FOLDER / "deadlines"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for one in ("first", "due"):
        (made / one).mkdir()
        (made / one).chmod(0o777)  # workers run as any user
    return made


@pytest.mark.usefixtures("cli_home", "karpenter")
def test_the_deadline_is_met(api: Connection, replicas: Replicas, run: tuple[Tape, int], folder: Path) -> None:
    """The cost is printed next to the forecast."""
    tape, minutes = run
    rates = {size: (size / MOST) ** EXPONENT / STEP_S for size in range(1, MOST + 1)}
    cloud = Cloud(api, [LAB], tape, MOST)
    cloud.prepare()
    costs = measured(Trainer(api, "first"), tape, folder)
    forecast = tape.forecast(plan_of(WORK_S / STEP_S, rates, costs, minutes * 60.0))
    print("costs:", costs, "forecast:", forecast)
    trainer = Trainer(api, "due")
    trainer.delete()
    cloud.start()
    began = submit(trainer.name, minutes, WORK_S, folder / trainer.name)
    try:
        job = wait_until(lambda: over(trainer), minutes * 60 + 120, every_s=1)
        assert job is not None
    finally:
        cloud.stop()
        said = elasticctl("status", trainer.name), elasticctl("history", trainer.name)
        print(*(one.out for one in said), sep="\n")
        print(kubectl("get", "elasticjob", trainer.name, "-o", "json"))
        print("killed:", cloud.killed, "forecast:", forecast)
    plan = job.status.plan
    assert plan is not None
    took_s = (job.status.completion_time or 0.0) - began
    print(
        f"deadline {minutes * 60} s, done after {took_s:.0f} s; forecast ${forecast.usd:.2f}, {forecast.finished_s} s"
    )
    print(f"machines ${cloud.usd:.2f}; the status {job.status.worker_seconds} ${plan.spent}")
    assert took_s <= minutes * 60
    trainer.delete()


def measured(first: Trainer, tape: Tape, folder: Path) -> Costs:
    """What changes cost on this machine today, from a short job on demand.

    All its workers start together, which takes longer than one alone. It hands on what was seen of the tape up to now.
    """
    first.delete()
    submit(first.name, 5, FIRST_WORK_S, folder / first.name, MOST)
    job = wait_until(lambda: over(first), every_s=1)
    assert job is not None
    assert job.status.plan is not None
    start_s, reform_s, loss_s, save_every_s = job.status.plan.costs
    first.patch({"status": {"plan": {"pools": [tape.seen(SPOT, time.time())]}}})
    return Costs(start_s, reform_s, loss_s, save_every_s, billed_s=GRACE_S)


def over(trainer: Trainer) -> ElasticJob | None:
    """The job once it has ended."""
    job = trainer.job()
    return job if job.status.phase.terminal else None
