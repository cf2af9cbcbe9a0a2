"""Job files and project files: a job as a file in git, that works from any clone."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cli import Run

FULL = (
    "--workers", "2", "--min-workers", "1", "--env", "A=b=c", "--deadline", "1h", "--storage", "out", "--on-demand",
    "--name", "digits", "--workspace", ".", "--set", "spec.backoffLimit=9",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private_home: Path) -> Path:
    """A repository with a script, in which commands are typed."""
    folder = tmp_path / "project"
    (folder / "jobs").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    subprocess.run(["git", "init", "-q", folder], check=True)
    monkeypatch.chdir(folder)
    return folder


def made(run: Run, *words: str) -> dict[str, Any]:
    done = run("submit", "--dry-run", "-o", "json", *words)
    assert done.code == 0, done.err
    manifest: dict[str, Any] = json.loads(done.out)
    return manifest


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return found


def test_the_options_as_typed_are_saved(run: Run, folder: Path) -> None:
    """And nothing that depends on this machine, or on what the folder holds now."""
    done = run("submit", "train.py", *FULL, "--save", "jobs/digits.yaml", "--", "--lr", "0.1", "-x")
    assert (done.code, done.out) == (0, ""), done.err
    assert done.err.endswith("jobs/digits.yaml: written, nothing submitted\n")
    assert yaml.safe_load((folder / "jobs/digits.yaml").read_text()) == {
        "script": "../train.py",
        "args": ["--lr", "0.1", "-x"],
        "workers": 2,
        "min-workers": 1,
        "name": "digits",
        "env": ["A=b=c"],
        "workspace": "..",
        "storage": "../out",
        "spot": False,
        "deadline": 3600,
        "set": ["spec.backoffLimit=9"],
    }
    before = made(run, "train.py", *FULL, "--", "--lr", "0.1", "-x")
    after = made(run, "-f", "jobs/digits.yaml")
    for manifest in (before, after):  # the file itself is new in the folder
        del container(manifest)["env"][1]
    assert before == after


def test_a_file_that_is_no_job_file_is_not_overwritten(run: Run, folder: Path) -> None:
    before = (folder / "train.py").read_bytes()
    done = run("submit", "train.py", *FULL, "--save", "train.py")
    assert (done.code, done.err.splitlines()[-1]) == (
        2,
        "error: --save train.py: this file exists and is not a job file. FIX: choose another name",
    )
    assert (folder / "train.py").read_bytes() == before
    for _ in range(2):  # a job file may be written again
        assert run("submit", "train.py", *FULL, "--save", "job.yaml").code == 0


def test_a_project_file_may_begin_with_a_mark_of_its_encoding(run: Run, folder: Path) -> None:
    (folder / "elasticctl.toml").write_bytes(b"\xef\xbb\xbfworkers = 2\r\n")
    assert made(run, "train.py")["spec"]["replicaSpecs"]["Worker"]["replicas"] == 2


def test_a_job_file_works_from_a_clone_in_another_place(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("submit", "train.py", *FULL, "--save", "jobs/digits.yaml").code == 0
    clone = tmp_path / "clone"
    shutil.copytree(folder, clone)
    shutil.rmtree(folder)
    monkeypatch.chdir(tmp_path)
    manifest = container(made(run, "-f", "clone/jobs/digits.yaml"))
    assert manifest["args"][1] == str(clone / "train.py")
    assert manifest["env"][0]["value"] == (clone / "out").as_uri()
    assert str(folder) not in json.dumps(manifest)


def test_the_command_line_comes_before_the_file(run: Run, folder: Path) -> None:
    (folder / "job.yaml").write_text("script: train.py\nargs: [a]\nworkers: 2\nspot: true\nenv: {A: 1, B: x}\n")
    plain = made(run, "-f", "job.yaml")
    assert plain["spec"]["replicaSpecs"]["Worker"]["replicas"] == 2
    assert [item["value"] for item in container(plain)["env"] if item["name"] in "AB"] == ["1", "x"]
    changed = made(run, "-fjob.yaml", "--workers", "5", "--env", "C=1", "--", "b", "c")
    assert changed["spec"]["replicaSpecs"]["Worker"]["replicas"] == 5
    assert container(changed)["args"][-2:] == ["b", "c"]
    assert [item["name"] for item in container(changed)["env"]][-1:] == ["C"]


@pytest.mark.parametrize("name", ["elasticctl.toml", "pyproject.toml"])
def test_a_project_file_applies_to_all_its_jobs(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    table = "" if name == "elasticctl.toml" else "[project]\nname = 'x'\n[tool.elasticctl]\n"
    (folder / name).write_text(f'{table}workers = 3\npriority = 7\nstorage = "runs"\n')
    (folder / "deep").mkdir()
    monkeypatch.chdir(folder / "deep")
    spec = made(run, "../train.py")["spec"]
    assert (spec["replicaSpecs"]["Worker"]["replicas"], spec["sharing"]["priority"]) == (3, 7)
    assert container(made(run, "../train.py"))["env"][0]["value"] == (folder / "runs").as_uri()
    assert made(run, "../train.py", "--workers", "1")["spec"]["replicaSpecs"]["Worker"]["replicas"] == 1
    (folder / "job.yaml").write_text("script: train.py\nworkers: 2\n")
    assert made(run, "-f", "../job.yaml")["spec"]["replicaSpecs"]["Worker"]["replicas"] == 2
    assert made(run, "-f", "../job.yaml")["spec"]["sharing"]["priority"] == 7


def test_projects_end_with_their_repository(run: Run, folder: Path) -> None:
    (folder.parent / "elasticctl.toml").write_text("workers = 3\n")
    assert made(run, "train.py")["spec"]["replicaSpecs"]["Worker"]["replicas"] == 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.yaml", "script: train.py\nworker: 2\n", 'job.yaml: unknown option "worker" (did you mean "workers"?)'),
        ("job.yaml", "script: train.py\nargs: --x\n", "job.yaml: args: must be a list"),
        ("job.yaml", "script: []\n", "job.yaml: script: must be the path of a script"),
        ("job.yaml", "script: train.py\nenv: {A: [1]}\n", "job.yaml: env: [1] is not a text or a number"),
        ("job.yaml", "script: train.py\nworkers: many\n", "Invalid value for '--workers': \"many\" is not a whole"),
        (
            "job.yaml",
            "script: train.py\nworkers: yes\n",
            "job.yaml: workers: must be one value, not true. FIX: put it in",
        ),
        ("job.yaml", "script: train.py\ngpus: [1, 2]\n", "job.yaml: gpus: must be one value"),
        ("job.yaml", "script: train.py\nname: {a: b}\n", "job.yaml: name: must be one value"),
        ("job.yaml", "script: train.py\nenv: yes\n", "job.yaml: env: must be a list"),
        ("job.yaml", "script: train.py\nspot: [true]\n", "job.yaml: spot: must be true or false"),
        ("elasticctl.toml", "label = true", "elasticctl.toml: label: must be a list"),
        ("job.yaml", "script: gone.py\n", 'the script "gone.py" does not exist'),
        ("job.yaml", "script: train.py\nstorage: 's3:/b'\n", '"s3:/b" is not the URL of a storage'),
        ("job.yaml", "script: train.py\nwait: true\n", 'job.yaml: unknown option "wait"'),
        ("elasticctl.toml", "workers = ", "elasticctl.toml: not TOML"),
        ("elasticctl.toml", "script = 'train.py'", 'elasticctl.toml: unknown option "script"'),
        ("pyproject.toml", "[tool]\nelasticctl = 1", "pyproject.toml: tool.elasticctl must be a table"),
    ],
)
def test_an_invalid_file_is_a_one_line_error(run: Run, folder: Path, name: str, text: str, said: str) -> None:
    (folder / name).write_text(text)
    words = ("-f", name) if name == "job.yaml" else ("train.py",)
    done = run("submit", *words, "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert said in done.err.splitlines()[-1]


def test_help_does_not_look_at_them(run: Run, folder: Path) -> None:
    (folder / "elasticctl.toml").write_text("workers = ")
    assert run("submit", "--help").code == 0
    assert run("submit", "-f", "job.yaml", "--save", "x.yaml").code == 2


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *((name, option) for name in ("elasticctl.toml", "pyproject.toml") for option in ("workspace", "env-file")),
        *(("job.yaml", option) for option in ("workspace", "env-file", "script")),
    ],
)
@pytest.mark.parametrize("how", ["absolute", "above", "home", "link"])
def test_a_file_of_another_user_does_not_choose_what_is_sent_from_this_machine(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, option: str, how: str
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    private = home / "private"
    private.mkdir(parents=True)
    (private / "train.py").write_text("print('mine')\n")
    (private / "env").write_text("A=1\n")
    (folder / "link").symlink_to(private)
    above = os.path.relpath(private, folder)
    beginning = {"absolute": str(private), "above": above, "home": "~/private", "link": "link"}
    value = beginning[how] + {"workspace": "", "env-file": "/env", "script": "/train.py"}[option]
    if name == "job.yaml":
        (folder / name).write_text(yaml.safe_dump({"script": "train.py"} | {option: value}))
    else:
        table = "" if name == "elasticctl.toml" else "[tool.elasticctl]\n"
        (folder / name).write_text(f'{table}{option} = "{value}"\n')
    words = ["-f", name] if name == "job.yaml" else ["train.py"]
    done = run("submit", *words, "--dry-run")
    assert (done.code, done.out) == (2, ""), done.err
    assert f"{name}: {option}: " in done.err
    assert "is outside of the file's folder and repository. FIX: if you mean to send that, type" in done.err
    typed = {"workspace": ("--workspace", str(private)), "env-file": ("--env-file", str(private / "env"))}
    if option in typed and how == "absolute":
        script = [str(private / "train.py")] if option == "workspace" else ["train.py"]
        said = run("submit", *script, *typed[option], "--dry-run")
        assert said.code == 0, said.err


@pytest.mark.parametrize("name", ["elasticctl.toml", "job.yaml"])
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_file_of_another_user_does_not_choose_where_credentials_go(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, scheme: str
) -> None:
    """Its endpoint hears nothing, unless the caller has named it."""
    with socket.create_server(("127.0.0.1", 0)) as unknown:
        unknown.setblocking(False)  # a client that has connected is in the queue by the end
        endpoint = f"http://127.0.0.1:{unknown.getsockname()[1]}"
        url = f"{scheme}://bucket/jobs?endpoint={endpoint}"
        given = f'storage = "{url}"\n' if name == "elasticctl.toml" else f'script: train.py\nstorage: "{url}"\n'
        (folder / name).write_text(given)
        words = ["-f", name] if name == "job.yaml" else ["train.py"]
        for more in (["--dry-run"], ["-d"]):
            done = run("submit", *words, *more)
            assert (done.code, done.out) == (3, ""), done.err
            assert f"the file names the endpoint {endpoint}, and your credentials are not sent" in done.err
        with pytest.raises(BlockingIOError):
            unknown.accept()
    assert run("submit", *words, "--storage", "out", "--dry-run").code == 0, "what is typed comes before the file"
    variable = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST"}[scheme]
    monkeypatch.setenv(variable, endpoint)
    assert run("submit", *words, "--dry-run").code == 0
