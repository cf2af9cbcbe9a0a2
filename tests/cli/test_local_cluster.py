"""The verbs on a real local cluster, whose workers are short shell scripts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticctl.cli.main import main
from elasticctl.cluster.local.client import LocalCluster
from tests.support.cli import Run, Start
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


def worker_names(cluster: LocalCluster, name: str) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.list_pods("default", name)]


def test_ctrl_c_detaches_from_a_job_and_leaves_it_running(
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
    assert local_cluster.get_job("default", "kept")["status"]["active"] == 1
    gate.touch()
    again = start("wait", "kept")
    assert again.wait(timeout=240) == 0


def test_a_taken_generated_name_gets_a_suffix(run: Run, home: Path, tmp_path: Path) -> None:
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
    assert "train succeeded after " in run("wait", "train").err
    assert run("wait", second.out.strip()).code == 0


def test_a_reader_that_leaves_is_no_error(submit: Callable[..., str], start: Start, gate: Path) -> None:
    gate.touch()
    name = submit("chatty", 1, "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); echo line $i; done")
    follower = start("logs", "-f", name)
    assert follower.stdout is not None
    assert follower.stderr is not None
    assert follower.stdout.readline() == "worker-0 | line 1\n"
    follower.stdout.close()
    assert (follower.stderr.read(), follower.wait()) == ("", 141)


def test_completion_knows_jobs_workers_and_contexts(
    local_cluster: LocalCluster,
    submit: Callable[..., str],
    gate: Path,
    capsys: pytest.CaptureFixture[str],
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
        with pytest.raises(SystemExit):
            main([])
        assert found in capsys.readouterr().out
