"""`rerun`: the same job once more, and from a checkpoint of the old one."""

from __future__ import annotations

import copy
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticctl.api.codec import from_rfc3339
from elasticctl.api.spec import ANNOTATION_RERUN_OF, ANNOTATION_SCALED_BY
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.debug import debug_manifest
from elasticctl.operations.job_names import next_name
from elasticctl.operations.rerun import Rerun, original_name, rerun_manifest
from elasticctl.operations.storage_urls import child_url, sibling_url
from elasticctl.settings.contexts import Context
from elasticctl.terminal import Terminal
from elasticctl_store.checkpoints.commits import CommitWriter
from tests.support import journals
from tests.support.cli import Run
from tests.support.clouds import Cloud
from tests.support.gate import Fault
from tests.support.job_samples import job
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until


def used() -> dict[str, Any]:
    """A job that has a life behind it."""
    manifest = job()
    manifest["metadata"] |= {
        "labels": {"team": "vision"},
        "annotations": {ANNOTATION_SCALED_BY: "user", "note": "mine"},
    }
    manifest["spec"] |= {"suspend": True, "cancel": False, "removeWorkers": [{"name": "digits-worker-0"}]}
    return manifest


def environment(manifest: dict[str, Any]) -> dict[str, str]:
    (container,) = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    return {item["name"]: item["value"] for item in container["env"]}


def test_the_same_job_without_the_old_ones_history() -> None:
    old = used()
    before = copy.deepcopy(old)
    new = rerun_manifest(old, Rerun("digits-2", "file:///state/digits-2"))
    assert old == before
    assert new["metadata"] == {
        "name": "digits-2",
        "namespace": "default",
        "labels": {"team": "vision"},
        "annotations": {"note": "mine", ANNOTATION_RERUN_OF: "digits"},
    }
    assert "status" not in new
    assert new["spec"].keys() == old["spec"].keys() - {"suspend", "cancel", "removeWorkers"}
    assert environment(new) == {"ELASTICCTL_STORAGE": "file:///state/digits-2"}


def test_a_deadline_that_has_passed_is_left_out() -> None:
    old = used()
    deadline = {"finishBy": "2026-11-27T17:00:00Z"}
    old["spec"]["goal"] = {**deadline, "budget": 5}
    over = from_rfc3339(deadline["finishBy"]) or 0.0
    assert rerun_manifest(old, Rerun("digits-2", at=over))["spec"]["goal"] == {"budget": 5}
    assert rerun_manifest(old, Rerun("digits-2", at=over - 1))["spec"]["goal"] == {**deadline, "budget": 5}
    old["spec"]["goal"] = deadline
    assert "goal" not in rerun_manifest(old, Rerun("digits-2", at=over))["spec"]


def test_where_it_starts_is_this_runs_alone() -> None:
    started = rerun_manifest(used(), Rerun("digits-2", "file:///b", "file:///a#7"))
    assert environment(started)["ELASTICCTL_START_FROM"] == "file:///a#7"
    fresh = rerun_manifest(started, Rerun("digits-3", "file:///c"))
    assert environment(fresh) == {"ELASTICCTL_STORAGE": "file:///c"}
    assert original_name(fresh) == "digits"


def test_a_worker_to_look_around_in_runs_nothing_and_keeps_nothing() -> None:
    old = used()
    old["spec"] |= {"goal": {"budget": 5}, "maxReplicas": 9, "backoffLimit": 7}
    (container,) = old["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container |= {"command": ["elasticctl-launch", "--nproc-per-node", "2", "--"], "args": ["python", "train.py"]}
    made = debug_manifest(old, "digits-debug", 600)
    assert made["metadata"] == {
        "name": "digits-debug",
        "namespace": "default",
        "labels": {"team": "vision"},
        "annotations": {"note": "mine"},
    }
    spec = made["spec"]
    assert {"goal", "minReplicas", "maxReplicas", "suspend"}.isdisjoint(spec)
    assert (spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (600, 60)
    worker = spec["replicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (1, "Never")
    (idle,) = worker["template"]["spec"]["containers"]
    assert (idle["command"], idle["args"]) == ([*container["command"], "sleep", "600"], [])
    assert environment(made) == {}


def test_names_count_up_from_the_first_job() -> None:
    assert next_name("digits", {"digits"}) == "digits-2"
    assert next_name("resnet-50", {"resnet-50", "resnet-50-2"}) == "resnet-50-3"
    assert len(next_name("a" * 51, {"x"})) == 51


def test_next_to_another_url() -> None:
    assert sibling_url("s3://bucket/runs/old/", "new") == "s3://bucket/runs/new"
    minio = "?endpoint=http://minio:9000&region=r"
    assert sibling_url(f"s3://bucket/runs/old{minio}", "new") == f"s3://bucket/runs/new{minio}"
    assert child_url(f"s3://bucket/runs/{minio}", "new") == f"s3://bucket/runs/new{minio}"
    assert child_url("file:///a%3Fb/what?", "new") == "file:///a%3Fb/what?/new"


def test_a_rerun_of_a_real_job(run: Run, local_cluster: LocalCluster) -> None:
    local_cluster.create_job(shell_job("brief", "echo $ELASTICCTL_JOB", 1))
    assert run("rerun", "brief", "--name", "brief", "-d").code in (0, 3)  # it may have ended by now
    assert run("wait", "brief").code == 0
    done = run("rerun", "brief", "-d")
    assert (done.code, done.out) == (0, "brief-2\n")
    assert done.err == "brief-2: brief again, 1 worker, from step 0\n"
    assert run("rerun", "brief-2", "-d", "--set", "spec.backoffLimit=0").out == "brief-3\n"
    assert local_cluster.get_job("default", "brief-3")["spec"]["backoffLimit"] == 0
    assert run("wait", "brief-2").code == 0
    uid = local_cluster.get_job("default", "brief-2")["metadata"]["uid"]
    greedy = "spec.replicaSpecs.Worker.template.spec.containers[0].resources={limits: {nvidia.com/gpu: 99}}"
    assert run("rerun", "brief-2", "--name", "brief-2", "--set", greedy, "-d").code == 2
    assert run("rerun", "brief-2", "--name", "brief-2", "--dry-run=server", "-o", "name").out == "brief-2\n"
    assert local_cluster.get_job("default", "brief-2")["metadata"]["uid"] == uid
    replaced = run("rerun", "brief-2", "--name", "brief-2", "--wait")
    assert replaced.code == 0
    assert "the old brief-2 is deleted, with its logs\n" in replaced.err
    assert local_cluster.get_job("default", "brief-2")["metadata"]["uid"] != uid


AGENT = """
import http.client, json, os, socket, time
env = os.environ
class Service(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(env["ELASTICCTL_RDZV_ENDPOINT"].removeprefix("unix://"))
def call(verb, **body):
    service = Service("localhost", timeout=60)
    token = {"Authorization": "Bearer " + open(env["ELASTICCTL_RDZV_TOKEN_FILE"]).read().strip()}
    service.request("POST", "/v1/jobs/default/digits/" + verb, json.dumps(body), token)
    return json.loads(service.getresponse().read())
name, uid = env["ELASTICCTL_WORKER"], env["ELASTICCTL_POD_UID"]
world = call("join", uid=uid, name=name, host="127.0.0.1", port=29500, slots=1, generation=0)
reports = not os.path.exists(FOLDER + "/reruns")
step = 0
while True:
    step += 1
    if reports:
        at = {"generation": world["generation"], "step": step}
        saved = {"committed": step, "url": "file:///of/the/first", "size_bytes": 1, "duration_s": 1.0}
        loss = {"metrics": {"loss": 1.0}}
        call("report", messages=[{"kind": "progress", **at, **loss}, {"kind": "committed", **at, **saved}])
    time.sleep(0.01)
"""


def test_a_job_that_takes_the_name_of_one_just_cancelled_starts_with_nothing_of_it(
    run: Run, local_cluster: LocalCluster, tmp_path: Path
) -> None:
    """The controller may not have had a pass between the two; only the first one reports anything."""

    def seen() -> Any:
        return local_cluster.get_job("default", "digits").get("status", {})

    script = tmp_path / "agent.py"
    script.write_text(AGENT.replace("FOLDER", repr(str(tmp_path))))
    local_cluster.create_job(shell_job("digits", f"exec {shlex.quote(sys.executable)} {script}", 1))
    wait_until(lambda: seen().get("checkpoint", {}).get("committed", 0) > 5)
    (tmp_path / "reruns").touch()
    for _ in range(3):
        assert run("cancel", "digits").code == 0
        wait_until(lambda: seen()["phase"] == "Cancelled")
        assert run("rerun", "digits", "--name", "digits", "-d").code == 0
        status: dict[str, Any] = {}
        while not status.get("generations"):
            status = seen()
            assert "step" not in status.get("progress", {})
            assert "step" not in status.get("checkpoint", {})
            assert not status.get("curve", {}).get("step")
            assert status.get("generation", 0) <= 1
            assert status.get("stepsRedone", 0) == 0
            time.sleep(0.005)


def test_a_step_that_a_bucket_does_not_have_is_refused_immediately(
    run: Run, private_home: Path, gs: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    gs.name_endpoint(monkeypatch)
    storage = gs.open()
    writer = CommitWriter.take_over(storage)
    for step in (3, 5):
        journals.commit(storage, writer, step)
    manifest = job()
    container = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["env"][0]["value"] = gs.url
    place = SimpleNamespace(
        find=lambda name: manifest,
        cluster=SimpleNamespace(list_jobs=lambda namespace: [manifest]),
        namespace="default",
        context=Context("lab", "kubernetes"),
        observer=Terminal(),
    )
    monkeypatch.setattr("elasticctl.cli.verbs.start_jobs.rerun.reach", lambda where: place)
    order = ("rerun", "digits", "--same-code", "--dry-run=client", "--from-checkpoint")
    refused = run(*order, "7")
    assert (refused.code, refused.err) == (3, "error: no checkpoint of step 7 exists; there are: 5, 3\n")
    for wanted in ("3", "latest"):
        done = run(*order, wanted)
        assert done.code == 0, done.err
        assert f"{gs.url}#{wanted}" in done.out
    gs.gate.faults = lambda seen: Fault(status=403, code="AccessDenied")
    blind = run(*order, "7")
    assert (blind.code, "this machine cannot check whether" in blind.err) == (0, True)
