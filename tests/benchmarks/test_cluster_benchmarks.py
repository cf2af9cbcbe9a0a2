"""The reckoning of the benchmarks on a cluster: what they take from metrics, logs, watches and steps."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import controller, pod_recovery, replicas
from benchmarks.clusterload import NAMESPACE, NOBODY, Load, Missing, Pods, until
from benchmarks.controller import Figure, as_json, table
from benchmarks.pod_controllers import contenders
from benchmarks.pod_recovery import Loss
from benchmarks.recoveries.timeline import Outcome
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource
from elasticctl_controller.kube.manager import LogFormatter
from elasticctl_controller.kube.metrics import Metrics
from tests.support.control import ControlApi
from tests.support.waiting import wait_until

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


def pod(name: str, node: str = "n1", phase: str = "Running") -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}


@pytest.fixture
def pods(control: ControlApi) -> Iterator[Pods]:
    found = Pods(control.connection())
    found.start()
    yield found
    found.stop()


def test_the_watch_tells_when_a_pod_has_been_created_again(control: ControlApi, pods: Pods) -> None:
    control.put(f"{PODS}/a", pod("a"))
    control.put(f"{PODS}/b", pod("b", "n2", "Pending"))
    wait_until(lambda: len(pods) == 2)
    assert (pods.running(), list(pods.on("n2"))) == (1, ["b"])
    uid = pods.uids()["a"]
    control.put(f"{PODS}/a", {**control.objects[f"{PODS}/a"], "status": {"phase": "Failed"}})
    wait_until(lambda: not pods.running())
    assert pods.replaced_at("a", uid) is None
    control.remove(f"{PODS}/a")
    wait_until(lambda: len(pods) == 1)
    assert pods.replaced_at("a", uid) is None
    before = time.monotonic()
    control.put(f"{PODS}/a", pod("a"))
    at = wait_until(lambda: pods.replaced_at("a", uid))
    assert at is not None
    assert before < at <= time.monotonic()
    assert pods.last_created_at == at


def test_ours_and_bare_pods_of_theirs_are_the_same_pods(control: ControlApi) -> None:
    api = control.connection()
    for contender in contenders(Load(api), api):
        contender.create(contender.name.replace(",", "").replace(" ", "-").lower(), 7)
    (ours,) = (item for path, item in control.objects.items() if path.endswith("elasticjobs/elasticctl"))
    bare, alike = (item for path, item in sorted(control.objects.items()) if "/jobs/" in path)
    worker = ours["spec"]["replicaSpecs"]["Worker"]
    assert worker["template"]["spec"] | {"restartPolicy": "Never"} == bare["spec"]["template"]["spec"]
    assert (worker["replicas"], bare["spec"]["parallelism"], alike["spec"]["parallelism"]) == (7, 7, 7)
    spec = alike["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert "ELASTICCTL_WORKER" in {item["name"] for item in container["env"]}
    assert len(spec["volumes"]) == len(container["volumeMounts"]) == 3
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert (spec["restartPolicy"], spec["schedulerName"], "hostname" in spec) == ("Never", NOBODY, False)


def test_what_is_not_there_in_time_is_said() -> None:
    with pytest.raises(Missing, match="not within 0 s: a miracle"):
        until(lambda: False, 0.0, "a miracle")


class Told(replicas.Replica):
    """A controller of which there is but what it tells."""

    page = ""

    def metrics(self) -> str:
        return self.page


def told(log: Path) -> Told:
    return Told(process=None, port=0, log=log)  # type: ignore[arg-type]


def test_writes_are_counted_from_the_metrics_that_a_controller_serves(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.register_gauges(lambda: [], lambda: 0, lambda: True)
    for verb, outcome in (
        ("GET", "ok"),
        ("WATCH", "ok"),
        ("POST", "ok"),
        ("POST", "409"),
        ("PUT", "ok"),
        ("PUT", "ok"),
    ):
        metrics.count_request(verb, outcome)
    replica = told(tmp_path)
    replica.page = metrics.render().decode()
    assert controller._writes(replica) == 4
    assert replica.leads()


def test_the_time_of_a_list_is_taken_from_the_log_that_a_controller_writes(
    control: ControlApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for number in range(3):
        control.put(f"{PODS}/p{number}", pod(f"p{number}"))
    reflector = Reflector(control.connection(), Resource("/api/v1/pods"), ObjectStore())
    reflector.start()
    assert reflector.wait_synced(10)
    reflector.stop()
    log = tmp_path / "log"
    log.write_text("\n".join(LogFormatter().format(record) for record in caplog.records))
    listed_s = controller.list_duration_s(told(log), 3)
    assert listed_s is not None
    assert 0 <= listed_s < 10
    assert controller.list_duration_s(told(log), 4) is None


def test_a_figure_is_held_against_its_aim_by_the_percentile_that_counts() -> None:
    values = tuple(float(number) for number in range(1, 101))
    assert Figure("losses", "s", values, aim=99.5, fraction=0.99).met is True
    assert Figure("losses", "s", values, aim=99.0, fraction=0.99).met is False
    assert Figure("creation", "s", (1.0, 2.0, 9.0), aim=2.0, fraction=0.5).met is True
    assert Figure("writes", "requests", (0.0,), aim=0.0).met is True
    assert Figure("theirs", "s", (1.0,)).met is None


def test_the_results_say_which_aims_were_missed() -> None:
    figures = [Figure("a", "s", (1.0, 3.0), aim=2.0), Figure("b", "s", (1.0,), aim=2.0), Figure("c", "s", (5.0,))]
    written = json.loads(json.dumps(as_json(figures, {"workers": "10"}, 0.0)))
    assert [item["met"] for item in written["figures"]] == [False, True, None]
    assert written["figures"][0]["values"] == [1.0, 3.0]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(figures))
    rows = [line for line in console.export_text().splitlines() if "(s)" in line]
    assert [row.strip("│ ").split()[-1] for row in rows] == ["no", "yes", "5.00"]


def loss(first_step_s: float, redone: int = 0) -> Loss:
    return Loss(0, Outcome(first_step_s=first_step_s, whole_s=9.0, steps_redone=redone), {"formed": 0.3})


def test_recoveries_are_held_against_the_aim_by_their_95th_percentile() -> None:
    quick = [loss(1.0) for _ in range(39)]
    assert pod_recovery.met([*quick, loss(60.0)])
    assert not pod_recovery.met([*quick[:30], *[loss(6.0, 12)] * 3])
    assert "worst 6.00, aim 5" in pod_recovery.line([*quick, loss(6.0, 12)])
    assert "at most 12 steps done again" in pod_recovery.line([*quick, loss(6.0, 12)])
    written = json.loads(json.dumps(pod_recovery.as_json(quick[:1], {}, 0.0)))
    assert written["losses"] == [{"worker": 0, "cost": asdict(quick[0].cost), "reached": {"formed": 0.3}}]


def test_a_recovery_is_told_from_the_steps_that_the_workers_record(control: ControlApi, tmp_path: Path) -> None:
    job = pod_recovery.Job(control.connection(), tmp_path / "state")
    job.start()
    jobs = f"/apis/elastic.pytorch.org/v1alpha1/namespaces/{pod_recovery.NAMESPACE}/elasticjobs"
    path = f"{jobs}/{pod_recovery.NAME}"
    control.put(path, {**control.objects[path], "status": {"generations": []}})
    victim = f"/api/v1/namespaces/{pod_recovery.NAMESPACE}/pods/{pod_recovery.NAME}-worker-1"
    control.put(victim, pod(f"{pod_recovery.NAME}-worker-1"))
    over = threading.Event()

    def train() -> None:
        """Three workers, until one is deleted; then two; then three again."""
        number, worlds = 0, {"before": 3}
        while not over.wait(0.05):
            number += 1
            if victim not in control.objects:
                worlds = {"smaller": 2} if "before" in worlds else {"whole": 3}
            ((group, world),) = worlds.items()
            with (tmp_path / "state" / "steps").open("a") as file:
                for rank in range(world):
                    step = {"at": time.time(), "pid": rank, "rank": rank, "world": world, "step": number}
                    file.write(json.dumps({**step, "group": group}) + "\n")

    (tmp_path / "state" / "marks").touch()
    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        found = job.lose(1, settle_s=0.5)
    finally:
        over.set()
        trainer.join()
    assert found.worker == 1
    assert 0 < (found.cost.first_step_s or 0) < (found.cost.whole_s or 0) < 10
    assert found.cost.steps_redone == 0
    job.end()
    assert path not in control.objects
