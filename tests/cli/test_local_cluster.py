"""The verbs on a real local cluster, whose workers are short shell scripts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticctl.cluster.local.client import LocalCluster
from tests.support.cli import Run, Start
from tests.support.cluster_contract import running
from tests.support.waiting import wait_until

MANIFEST = """\
apiVersion: elastic.pytorch.org/v1alpha1
kind: ElasticJob
metadata: {{name: {name}}}
spec:
  minReplicas: 1
  maxReplicas: 4
  backoffLimit: 1
  policy: {{backoffSeconds: 0.05}}
  replicaSpecs:
    Worker:
      replicas: {workers}
      template:
        spec:
          containers:
            - name: elasticjob-worker
              command: [sh, -c]
              args: ['{script}']
"""
# Ends when the file is there, so that a test decides when.
UNTIL = "echo begun; while [ ! -e {gate} ]; do sleep 0.05; done; echo done"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Touch it and the workers end."""
    return tmp_path / "gate"


@pytest.fixture
def submit(run: Run, tmp_path: Path, home: Path, gate: Path) -> Callable[..., str]:
    """`submit(name, workers)` a job whose workers wait for the gate; returns its name."""

    def call(name: str, workers: int = 2, script: str = "") -> str:
        file = tmp_path / f"{name}.yaml"
        file.write_text(MANIFEST.format(name=name, workers=workers, script=script or UNTIL.format(gate=gate)))
        done = run("submit", "-f", str(file), "-d")
        assert (done.code, done.out) == (0, f"{name}\n"), done.err
        return name

    return call


def job(cluster: LocalCluster, name: str) -> dict[str, Any]:
    return cluster.get_job("default", name)


def worker_names(cluster: LocalCluster, name: str) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.list_pods("default", name)]


def active(cluster: LocalCluster, name: str, count: int) -> None:
    """Wait until `count` workers run."""
    wait_until(lambda: len(running(cluster, name)) == job(cluster, name).get("status", {}).get("active") == count)


def test_a_job_from_submit_to_delete(
    run: Run, submit: Callable[..., str], local_cluster: LocalCluster, gate: Path
) -> None:
    name = submit("first", 2)
    assert run("submit", "-f", str(gate.parent / "first.yaml"), "-d").code == 3
    active(local_cluster, name, 2)
    assert run("wait", name, "--for", "running", "--timeout", "120s").code == 0

    listed = run("list")
    assert listed.out.split("\n")[1].split("\t")[:3] == ["first", "Running", "2/2 (1-4)"]
    assert run("list", "-o", "name").out == "first\n"
    assert json.loads(run("list", "-o", "json").out)["items"][0]["metadata"]["name"] == "first"
    assert json.loads(run("status", "fi", "-o", "json").out)["status"]["active"] == 2
    assert "Workers\t2 of 2 running (1-4), CPU" in run("status", "first").out

    assert run("scale", "first", "--add", "1", "--wait", "--timeout", "120s").err.endswith("3 workers are running\n")
    assert job(local_cluster, name)["metadata"]["annotations"]["elastic.pytorch.org/scaled-by"] == "user"
    assert run("scale", "first", "--to", "5").err == "error: 5 workers are more than the maximum of first, 4\n"
    assert run("scale", "first", "--remove-worker", "0", "--wait").code == 0
    wait_until(lambda: worker_names(local_cluster, name) == ["first-worker-1", "first-worker-2"])
    assert run("wait", "first", "--timeout", "0s").code == 124
    assert run("delete", "first").err.startswith("error: first is still Running. FIX: add --yes")

    gate.touch()
    waited = run("wait", "first", "--timeout", "120s")
    assert waited.code == 0
    assert "first succeeded after " in waited.err
    assert run("scale", "first", "--to", "2").err == "error: first has ended (Succeeded) and cannot be scaled\n"
    assert run("logs", "first", "--worker", "1").out == "worker-1 | begun\nworker-1 | done\n"
    assert "scaling" in run("history", "first").out
    assert run("delete", "first").code == 0
    assert run("list").err == "no jobs in namespace default of context local. Next: elasticctl submit train.py\n"
    assert run("status", "first").code == 3


def test_a_failing_job_is_named_after_its_budget(run: Run, submit: Callable[..., str]) -> None:
    name = submit("bad", 1, "echo no such data >&2; exit 7")
    done = run("wait", name, "--timeout", "120s")
    assert done.code == 1
    assert "bad failed after " in done.err
    # A retry takes another index while the pod before it is still being deleted.
    assert re.search(r"bad-worker-[01]: exit code 7", done.err)
    lines = [line.split(" | ") for line in run("logs", name).out.splitlines()]
    assert lines[0] == ["worker-0", "no such data"]
    assert {text for _, text in lines} == {"no such data"}


def test_cancelling_is_an_exit_code(run: Run, submit: Callable[..., str], local_cluster: LocalCluster) -> None:
    name = submit("unwanted", 1)
    active(local_cluster, name, 1)
    assert run("cancel", name).code == 0
    assert run("wait", name, "--timeout", "120s").code == 4
    assert run("cancel", name).err == "error: unwanted has ended (Cancelled) and cannot be cancelled\n"


def test_suspending_and_resuming(run: Run, submit: Callable[..., str], local_cluster: LocalCluster, gate: Path) -> None:
    name = submit("paused", 2)
    active(local_cluster, name, 2)
    assert run("resume", name).err == "paused: not suspended, nothing to resume\n"
    assert run("suspend", name).code == 0
    wait_until(lambda: job(local_cluster, name)["status"]["phase"] == "Suspended")
    assert run("resume", name).code == 0
    assert run("wait", name, "--for", "running", "--timeout", "120s").code == 0
    gate.touch()
    assert run("wait", name, "--timeout", "120s").code == 0


def test_names_may_be_shortened_while_they_are_unique(run: Run, submit: Callable[..., str], gate: Path) -> None:
    gate.touch()
    submit("digits-one", 1)
    submit("digits-two", 1)
    assert run("wait", "digits-o", "--timeout", "120s").code == 0
    assert run("status", "digits").err == (
        'error: "digits" matches several jobs in context local, namespace default: digits-one, digits-two\n'
    )
    assert "did you mean" in run("status", "digit-one").err


def test_logs_are_followed_to_the_end(submit: Callable[..., str], start: Start, gate: Path) -> None:
    name = submit("talker", 2)
    follower = start("logs", "-f", name)
    assert follower.stdout is not None
    begun = {follower.stdout.readline() for _ in range(2)}
    assert begun == {"worker-0 | begun\n", "worker-1 | begun\n"}
    gate.touch()
    out, err = follower.communicate(timeout=240)
    assert sorted(out.splitlines()) == ["worker-0 | done", "worker-1 | done"]
    assert (follower.returncode, err) == (0, "")


def test_ctrl_c_lets_go_of_a_job_and_leaves_it_running(
    start: Start, home: Path, tmp_path: Path, gate: Path, local_cluster: LocalCluster
) -> None:
    file = tmp_path / "kept.yaml"
    file.write_text(MANIFEST.format(name="kept", workers=1, script=UNTIL.format(gate=gate)))
    attached = start("submit", "-f", str(file))
    assert attached.stdout is not None
    assert attached.stdout.readline() == "worker-0 | begun\n"
    attached.send_signal(signal.SIGINT)
    _, err = attached.communicate(timeout=240)
    assert attached.returncode == 130
    assert err.endswith("detached: kept keeps running. Next: elasticctl logs -f kept, or elasticctl cancel kept\n")
    assert job(local_cluster, "kept")["status"]["active"] == 1
    gate.touch()
    again = start("wait", "kept")
    assert again.wait(timeout=240) == 0


def test_watching_in_a_pipe_prints_changes_only(submit: Callable[..., str], start: Start, gate: Path) -> None:
    name = submit("seen", 1)
    watcher = start("status", "-w", name)
    assert watcher.stdout is not None
    assert watcher.stdout.readline().startswith("NAME\tPHASE\t")
    lines = [watcher.stdout.readline()]
    while "\tRunning\t" not in lines[-1]:
        lines.append(watcher.stdout.readline())
    gate.touch()
    out, _ = watcher.communicate(timeout=240)
    lines += out.splitlines()
    assert lines[-1].split("\t")[:2] == ["seen", "Succeeded"]
    assert len(lines) < 12
    assert "\x1b" not in "".join(lines)


def test_a_reader_that_leaves_is_no_error(submit: Callable[..., str], gate: Path) -> None:
    gate.touch()
    name = submit("chatty", 1, "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); echo line $i; done")
    command = f"{__import__('sys').executable} -m elasticctl.cli logs -f {name} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "worker-0 | line 1\n"
    assert done.stderr == ""


def test_a_taken_name_of_our_own_making_gets_a_suffix(run: Run, home: Path, tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/bin/sh\ntrue\n")
    script.chmod(0o755)
    plain = tmp_path / "plain.yaml.j2"
    plain.write_text(
        "apiVersion: elastic.pytorch.org/v1alpha1\nkind: ElasticJob\nmetadata: {name: {{ job.name }}}\n"
        "spec: {replicaSpecs: {Worker: {template: {spec: {containers: [\n"
        "  {name: elasticjob-worker, command: {{ job.command }}, workingDir: {{ job.working_dir }}}]}}}}}\n"
    )
    first = run("submit", str(script), "--template", str(plain), "-d")
    second = run("submit", str(script), "--template", str(plain), "-d")
    assert first.out == "train\n"
    assert second.out.startswith("train-")
    assert f"the name train is taken: this job is named {second.out}" in second.err
    assert second.err.count("context local, state in") == 1
    third = run("submit", str(script), "--template", str(plain), "-d", "--name", "train")
    assert third.code == 3
    assert third.err.splitlines()[-1].startswith("error: ")
    assert run("wait", "train", "--timeout", "120s").code == 0
    assert run("wait", second.out.strip(), "--timeout", "120s").code == 0


def test_the_local_cluster_can_be_asked_and_ended(run: Run, submit: Callable[..., str], gate: Path) -> None:
    assert "not running" in run("local", "status").out
    gate.touch()
    submit("brief", 1)
    assert json.loads(run("local", "status", "-o", "json").out)["running"] is True
    assert run("local", "down").err.endswith("the local cluster is down\n")
    assert "not running" in run("local", "status").out


def test_completion_knows_jobs_workers_and_contexts(
    local_cluster: LocalCluster,
    submit: Callable[..., str],
    gate: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate.touch()
    submit("digits", 1)
    wait_until(lambda: worker_names(local_cluster, "digits"))
    monkeypatch.setenv("_ELASTICCTL_COMPLETE", "complete_bash")
    wanted = {"elasticctl status d": "digits", "elasticctl list --context l": "local", "elasticctl su": "submit"}
    wanted |= {f"elasticctl {verb} digits --worker d": "digits-worker-0" for verb in ("logs", "exec", "preempt")}
    wanted |= {"elasticctl scale digits --remove-worker ": "digits-worker-0"}
    for words, found in wanted.items():
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        out, _ = start().communicate(timeout=240)
        assert found in out
