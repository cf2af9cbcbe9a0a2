"""`submit` with the folder that goes along: planned, sent once, run as it was, on this machine and on a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl_store import storage as storages
from elasticctl_store.workspace.transfer import unpack
from tests.support import servers
from tests.support.cli import Run
from tests.support.clouds import Cloud
from tests.support.cluster_contract import running
from tests.support.waiting import wait_until

SCRIPT = """\
import os, time
import version
print("version", version.NUMBER, "reads", open("data.txt").read(), flush=True)
while not os.path.exists("gate"):
    time.sleep(0.05)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A researcher's folder, from which is submitted."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "version.py").write_text("NUMBER = 1\n")
    (folder / "data.txt").write_text("here")
    (folder / ".gitignore").write_text("data.txt\ngate\n")
    monkeypatch.chdir(folder)
    return folder


def environment(manifest: dict[str, Any]) -> dict[str, str]:
    (container,) = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    return {item["name"]: item.get("value", "") for item in container["env"]}


def lines(cluster: LocalCluster, job: str) -> list[str]:
    queries = (LogQuery(previous=True), LogQuery())
    return [line.text for query in queries for line in cluster.logs("default", job, query)]


# On this machine.


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_a_job_keeps_running_what_was_submitted(run: Run, local_cluster: LocalCluster, project: Path) -> None:
    """Though the folder is edited: a replaced worker has the old code, and the present data.

    A rerun has the present code, unless --same-code is given.
    """
    done = run("submit", "train.py", "-d")
    assert done.code == 0, done.err
    assert f"workspace: 3 files, 190 B, of {project}: 3 of them sent, 190 B\n" in done.err
    wait_until(lambda: "version 1 reads here" in lines(local_cluster, "train"))
    (project / "version.py").write_text("NUMBER = 2\n")
    (project / "train.py").write_text("raise SystemExit('edited')\n")
    (pod,) = running(local_cluster, "train")
    local_cluster.evict_pod("default", pod["metadata"]["name"], grace_s=0)
    wait_until(lambda: lines(local_cluster, "train").count("version 1 reads here") == 2)
    (project / "gate").touch()
    assert run("wait", "train").code == 0
    again = run("rerun", "train", "--same-code", "--wait")
    assert again.code == 0, again.err
    assert "version 1 reads here" in lines(local_cluster, "train-2")
    (project / "train.py").write_text(SCRIPT)
    (project / "extra.py").touch()
    fixed = run("rerun", "train", "--wait")
    assert fixed.code == 0, fixed.err
    assert (
        f"code: {project} as it is now: 1 file changed (version.py), 1 file new (extra.py) (--same-code: as it was"
        " submitted)\n"
    ) in fixed.err.replace('"', "")
    assert "version 2 reads here" in lines(local_cluster, "train-3")


@pytest.mark.usefixtures("idle_jobs")
def test_a_dry_run_sends_nothing_and_can_be_submitted_later(
    run: Run, local_cluster: LocalCluster, project: Path, home: Path
) -> None:
    for form in ("client", "server"):
        dry = run("submit", "train.py", f"--dry-run={form}")
        assert dry.code == 0
        assert f"workspace: 3 files, 190 B, of {project}\n" in dry.err
    assert not (home / "local/workspaces").exists()
    (project / "job.yaml").write_text(dry.out)
    (project / ".gitignore").write_text("data.txt\ngate\njob.yaml\n")
    changed = run("submit", "-f", "job.yaml", "--same-code", "-d")
    assert changed.code == 2
    assert f"that the manifest names was never uploaded, and {project} has changed since" in changed.err
    assert local_cluster.list_jobs(None) == []
    now = run("submit", "-f", "job.yaml", "--name", "now", "-d")
    assert now.code == 0, now.err
    assert f"code: {project} as it is now" in now.err
    dry = run("submit", "train.py", "--dry-run")
    (project / "job.yaml").write_text(dry.out)
    first, second = run("submit", "-f", "job.yaml", "--name", "one", "-d"), run("submit", "-f", "job.yaml", "-d")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "unchanged, nothing sent" in first.err
    assert "unchanged, nothing sent" in second.err


@pytest.mark.usefixtures("idle_jobs")
def test_unchanged_files_are_not_sent_again(run: Run, project: Path, home: Path) -> None:
    assert "3 of them sent" in run("submit", "train.py", "-d").err
    assert ": unchanged, nothing sent\n" in run("submit", "train.py", "-d").err
    (project / "version.py").write_text("NUMBER = 3\n")
    assert ": 1 of them sent, 11 B\n" in run("submit", "train.py", "-d").err
    assert "workspace" not in run("submit", "train.py", "-d", "--no-workspace").err
    workspaces = home / "local/workspaces"
    assert workspaces.stat().st_mode & 0o077 == 0 or workspaces.parent.stat().st_mode & 0o077 == 0


def test_a_script_in_a_shared_folder_is_run_where_it_is(
    run: Run, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    here = run("submit", str(tmp_path / "train.py"), "--dry-run")
    assert here.code == 0
    assert f"nothing is copied from {tmp_path}, which may hold more than one project (--workspace DIR" in here.err
    assert "ELASTICCTL_WORKSPACE" not in here.out
    assert (
        "ELASTICCTL_WORKSPACE"
        in run("submit", str(tmp_path / "train.py"), "--workspace", str(tmp_path), "--dry-run").out
    )
    run("config", "set-context", "prod", "--provider", "kubernetes", "--storage", "s3://b/p", "--image", "i")
    away = run("submit", str(tmp_path / "train.py"), "--context", "prod", "--dry-run")
    assert (
        away.code,
        away.err.startswith(f"error: the script is in {tmp_path}, which is too broad for a workspace"),
    ) == (2, True)


# On a cluster.


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The jobs that a cluster was asked to create."""
    jobs: list[dict[str, Any]] = []

    def create_job(manifest: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        if not dry_run:
            jobs.append(manifest)
        return manifest

    double = SimpleNamespace(create_job=create_job, list_jobs=lambda namespace: [], list_quotas=list)
    monkeypatch.setattr("elasticctl.cli.verbs.start_jobs.submit.connect", lambda context: double)
    return jobs


@pytest.fixture
def prod(run: Run, private_home: Path) -> Callable[[str], None]:
    """Have a context `prod` of a cluster with this storage."""

    def make(storage: str) -> None:
        words = ("--provider", "kubernetes", "--storage", storage, "--image", "i")
        assert run("config", "set-context", "prod", *words).code == 0

    return make


def test_a_cluster_gets_the_folder_through_the_bucket(
    run: Run,
    prod: Callable[[str], None],
    project: Path,
    s3: Cloud,
    created: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prod(s3.url)
    for name, value in servers.KEYS.items():
        monkeypatch.setenv(name, value)
    done = run("submit", "train.py", "--context", "prod", "-d", "--", "--epochs", "3")
    assert done.code == 0, done.err
    assert "3 of them sent" in done.err
    (manifest,) = created
    (container,) = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["args"] == ["python", "train.py", "--epochs", "3"]
    assert "workingDir" not in container
    env = environment(manifest)
    assert env["ELASTICCTL_WORKSPACE_FROM"] == str(project)
    url, _, digest = env["ELASTICCTL_WORKSPACE"].rpartition("#")
    copy = tmp_path / "copy"
    copy.mkdir()
    unpack(storages.open(url), digest, copy)
    assert sorted(path.name for path in copy.iterdir()) == [".gitignore", "train.py", "version.py"]
    storages.open(env["ELASTICCTL_STORAGE"])  # a prefix next to it, with the endpoint where it belongs
    again = run("submit", "train.py", "--context", "prod", "-d")
    assert ": unchanged, nothing sent\n" in again.err
    whole = run("submit", "train.py", "--context", "prod", "-d", "--workspace", "..")
    assert whole.code == 0, whole.err
    assert created[-1]["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"] == [
        "python",
        "project/train.py",
    ]


def test_a_folder_that_the_cluster_shares_with_this_machine_will_do(
    run: Run, prod: Callable[[str], None], project: Path, created: list[dict[str, Any]], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    prod(shared.as_uri())
    refused = run("submit", "train.py", "--context", "prod", "-d")
    assert refused.code == 2
    assert f"cannot be sent to {shared.as_uri()}, a folder that this machine does not have" in refused.err
    shared.mkdir()
    (project / "go").write_text("#!/bin/sh\n")
    (project / "go").chmod(0o755)
    assert run("submit", "go", "--context", "prod", "-d").code == 0
    assert created[0]["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"] == ["./go"]
    assert sorted(path.name for path in (shared / "workspaces").iterdir()) == ["heads", "listings", "packs"]


def test_a_dry_run_needs_no_bucket(run: Run, prod: Callable[[str], None], project: Path) -> None:
    prod("s3://nowhere/jobs?endpoint=http://127.0.0.1:1")
    dry = run("submit", "train.py", "--context", "prod", "--dry-run", "-o", "json")
    assert dry.code == 0, dry.err
    env = environment(json.loads(dry.out))
    assert env["ELASTICCTL_WORKSPACE"].startswith("s3://nowhere/jobs/workspaces?endpoint=http://127.0.0.1:1#")
    assert env["ELASTICCTL_STORAGE"].startswith("s3://nowhere/jobs/train-")
    assert env["ELASTICCTL_STORAGE"].endswith("?endpoint=http://127.0.0.1:1")


def test_a_manifest_is_submitted_though_its_bucket_cannot_be_read(
    run: Run, prod: Callable[[str], None], project: Path, created: list[dict[str, Any]]
) -> None:
    """The submitting user needs no right to the storage; the workers will report what is wrong."""
    prod("s3://nowhere/jobs?endpoint=http://127.0.0.1:1&region=us-east-1")
    (project / "job.yaml").write_text(run("submit", "train.py", "--context", "prod", "--dry-run").out)
    done = run("submit", "-f", "job.yaml", "--context", "prod", "-d")
    assert (done.code, len(created)) == (0, 1), done.err
    assert "cannot check that the workspace exists: s3://nowhere/jobs/workspaces" in done.err
    assert "no AWS credentials found" in done.err


def test_a_template_that_forgets_it_is_refused(
    run: Run, prod: Callable[[str], None], project: Path, created: list[dict[str, Any]]
) -> None:
    prod("s3://b/p")
    manifest = yaml.safe_load(run("submit", "train.py", "--context", "prod", "--dry-run", "--no-workspace").out)
    (project / "own.yaml.j2").write_text(yaml.safe_dump(manifest))
    refused = run("submit", "train.py", "--context", "prod", "--template", "./own.yaml.j2")
    assert (refused.code, created) == (2, [])
    assert "has no job.workspace, so the script would not get there" in refused.err
    shown = run("submit", "train.py", "--template", "./own.yaml.j2", "--dry-run")
    assert shown.err.endswith("the script runs where it is\n")


# Mistakes.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.py", "--workspace", "nowhere"), '--workspace "nowhere" does not exist'),
        (("train.py", "--workspace", "train.py"), '--workspace "train.py" is not a folder'),
        (("train.py", "--workspace", "lib"), "the script "),
        (("train.py", "--workspace", ".", "--no-workspace"), "--workspace and --no-workspace cannot be used together"),
        (("train.py", "--workspace-limit", "10 MB"), '"10 MB" is not a size such as 500MB, 2GB or 1GiB.'),
        (("train.py", "--workspace-limit", "1i"), '"1i" is not a size'),
    ],
)
def test_mistakes_are_one_line(
    run: Run, private_home: Path, project: Path, words: tuple[str, ...], message: str
) -> None:
    (project / "lib").mkdir()
    done = run("submit", *words, "--dry-run")
    assert (done.code, done.err.count("\n"), done.out) == (2, 1, "")
    assert message in done.err


def test_a_bucket_that_refuses_says_so_in_a_line(
    run: Run, prod: Callable[[str], None], project: Path, created: list[dict[str, Any]], tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "workspaces").touch()
    prod(blocked.as_uri())
    done = run("submit", "train.py", "--context", "prod", "-d")
    assert (done.code, created) == (3, [])
    assert done.err.splitlines()[-1].startswith("error: cannot send the workspace: cannot ")
    assert done.err.endswith("(--no-workspace sends none, for scripts that are in the image)\n")


def test_a_manifest_of_another_user_does_not_choose_what_is_sent(
    run: Run, project: Path, tmp_path: Path, gs: Cloud
) -> None:
    """A folder leaves this machine only if the command is typed in it."""
    secret = tmp_path / "keys"
    secret.mkdir()
    (secret / "id").write_text("private")
    dry = run("submit", "train.py", "--storage", f"{gs.url}/state", "--dry-run")
    assert dry.code == 0, dry.err
    (project / "job.yaml").write_text(dry.out.replace(f"value: {project}\n", f"value: {secret}\n"))
    done = run("submit", "-f", "job.yaml", "--dry-run")
    assert f"code: as it was submitted; run this command in {secret} to use the folder as it is now" in done.err
    assert "as it is now:" not in done.err


@pytest.mark.usefixtures("idle_jobs")
def test_a_folder_without_the_script_is_refused(run: Run, project: Path) -> None:
    assert run("submit", "train.py", "-d").code == 0
    (project / "train.py").rename(project / "other.py")
    done = run("rerun", "train", "-d")
    assert done.code == 2
    assert done.err.endswith("which the job runs. FIX: add --same-code to run it as it was submitted\n")
