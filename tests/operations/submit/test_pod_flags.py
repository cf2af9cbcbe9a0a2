"""Flags about the pods of a job: parsed, refused, and where they end up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import UsageError
from elasticctl.operations.option_values import Assignment
from elasticctl.operations.submit.job_flags import JobFlags, parse_toleration
from elasticctl.operations.submit.job_request import job_spec, read_env_file, request_of, unused_note
from elasticctl.settings.contexts import Context
from elasticctl.templates import find_template, render_manifest
from tests.support.cli import Run

FLAGS = JobFlags(
    cpus="4", memory="16Gi", shm="2Gi", node_selector=(Assignment("pool", "gpu"),),
    tolerations=(parse_toleration("spot=yes:NoSchedule"),), labels=(Assignment("team", "vision"),),
    annotations=(Assignment("example.com/note", "any text: at all"),), setup="pip install -r requirements.txt",
    gpus=2, name="train",
)  # fmt: skip


def manifest(context: Context, flags: JobFlags = FLAGS) -> dict[str, Any]:
    spec = job_spec(request_of(flags, context, 2, name="train"))
    return render_manifest(spec, find_template("default", Path("/nowhere")))


def test_everything_is_in_the_pods_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_USER", "Ada Lovelace")
    made = manifest(Context("lab", "kubernetes", image="image"))
    assert made["metadata"]["labels"] == {"team": "vision", "elastic.pytorch.org/user": "Ada-Lovelace"}
    assert made["metadata"]["annotations"] == {"example.com/note": "any text: at all"}
    template = made["spec"]["replicaSpecs"]["Worker"]["template"]
    assert template["metadata"] == {"labels": {"team": "vision"}, "annotations": made["metadata"]["annotations"]}
    pod = template["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"][-1] == {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi"},
        "limits": {"nvidia.com/gpu": 1, "memory": "16Gi"},
    }
    assert {"name": "ELASTICCTL_SETUP", "value": "pip install -r requirements.txt"} in container["env"]


def test_on_this_machine_a_note_names_unused_flags() -> None:
    local = Context("local", "local")
    pod = manifest(local)["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert not {"nodeSelector", "tolerations"} & {*pod}
    assert unused_note(FLAGS, local).startswith("--cpus, --memory, --shm, --node-selector and --toleration: not used")
    assert unused_note(JobFlags(labels=FLAGS.labels), local) == ""


def test_variables_from_a_file_come_before_those_that_are_typed(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# keys\nexport A=1\nB = 'two words' \n\nC=3 # three\nD=\"#\"\nURL=http://x/?a=b#c\n")
    read = read_env_file(str(path))
    assert read == {"A": "1", "B": "two words", "C": "3", "D": "#", "URL": "http://x/?a=b#c"}
    flags = JobFlags(env_file=str(path), env=(Assignment("A", "typed"),))
    context = Context("lab", "kubernetes", image="image")
    assert job_spec(request_of(flags, context, 0, name="train")).env == {**read, "A": "typed"}


@pytest.mark.parametrize("text", ["A", "1=2", "export", "A B=3", "=x"])
def test_other_lines_are_refused_by_their_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "env"
    path.write_text(f"OK=1\n{text}\n")
    with pytest.raises(UsageError, match="env:2 is not of the form NAME=VALUE"):
        read_env_file(str(path))


@pytest.mark.parametrize(
    "words",
    [
        ("--cpus", "0"), ("--cpus", "many"), ("--memory", "16Q"), ("--memory", "0"), ("--shm", "2 Gi"),
        ("--toleration", "spot:Sometimes"), ("--toleration", "=x"), ("--node-selector", "pool"),
        ("--label", "job-name=x"), ("--label", "elastic.pytorch.org/user=root"), ("--label", "a b=c"),
        ("--annotation", "note"), ("--env-file", "nothing.env"),
    ],
)  # fmt: skip
def test_meaningless_values_are_refused(words: tuple[str, str], run: Run, private_home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = run("submit", str(tmp_path / "train.py"), "--dry-run", *words)
    assert done.code == 2
    assert done.err.count("error: ") == 1


def test_a_job_file_can_set_them(run: Run, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()  # what a job file names lies in its repository
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    Path("train.py").touch()
    (tmp_path / "keys.env").write_text("A=1\n")
    words = ("--label", "team=x", "--toleration", "spot:NoSchedule", "--env-file", "../keys.env", "--setup", "true")
    assert run("submit", "train.py", "--save", "job.yaml", *words).code == 0
    typed, read = (
        run("submit", "train.py", "--dry-run", *words, "--storage", "s"),
        run("submit", "-f", "job.yaml", "--dry-run", "--storage", "s"),
    )
    assert typed.code == 0, typed.err
    assert typed.out == read.out
    assert "team: x" in typed.out
