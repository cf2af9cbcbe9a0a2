"""`prune`: which jobs are meant, what is asked, and what is left alone, workspaces included."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl.operations.prune import (
    KEEP_YOUNGER_S,
    PruneFilter,
    delete_unused_workspaces,
    own_folder,
    select_jobs,
    workspace_digests,
)
from elasticctl.operations.selection import final_phases
from elasticctl_store import storage as storages
from elasticctl_store.workspace import transfer
from elasticctl_store.workspace.packing import File, Listing
from elasticctl_store.workspace.transfer import unpack
from tests.support import job_samples
from tests.support.cli import Run
from tests.support.job_samples import AT, at, job
from tests.support.jobs import FOREVER, shell_job
from tests.support.waiting import wait_until

JOBS = [
    job("late", phase="Succeeded", completionTime=at(90)),
    job("early", phase="Failed", completionTime=at(10)),
    job("runs", phase="Running"),
    job("odd", phase="Cancelled"),
]


def chosen(which: PruneFilter) -> list[str]:
    return [item.job.name for item in select_jobs(JOBS, which, AT + 100)]


def test_jobs_that_ended_long_enough_ago() -> None:
    assert chosen(PruneFilter(older_than=0)) == ["early", "late"]
    assert chosen(PruneFilter(older_than=11)) == ["early"]
    assert chosen(PruneFilter(older_than=91)) == []
    assert chosen(PruneFilter(older_than=0, phase=(final_phases("succeeded"),))) == ["late"]


def test_only_folders_that_the_local_cluster_chose_are_its_own(private_home: Path) -> None:
    own = local_paths().state / "storage"
    (own / "real").mkdir(parents=True)
    (own / "link").symlink_to("/tmp")
    assert own_folder((own / "real").as_uri()) == own / "real"
    for url in (own.as_uri(), (own / "a" / "b").as_uri(), f"{own.as_uri()}/..", (own / "link").as_uri(), "file:///tmp"):
        assert own_folder(url) is None
    for url in ("", "s3://bucket/x", f"file://host{own}/real", str(own / "real"), "file://[", "x"):
        assert own_folder(url) is None


def with_state(cluster: LocalCluster, name: str, url: str, start: str = "") -> Path:
    """An ended job that has kept something; returns its folder."""
    env = [{"name": "ELASTICCTL_STORAGE", "value": url}, {"name": "ELASTICCTL_START_FROM", "value": start}]
    cluster.create_job(shell_job(name, "true", container={"env": env}))
    wait_until(lambda: cluster.get_job("default", name).get("status", {}).get("phase") == "Succeeded")
    folder = Path(url.removeprefix("file://"))
    folder.mkdir(parents=True)
    (folder / "commit").touch()
    return folder


@pytest.fixture
def three(local_cluster: LocalCluster, tmp_path: Path) -> dict[str, Path]:
    """Three ended jobs: one whose state is the cluster's own, one that another starts from, one elsewhere."""
    own = local_paths().state / "storage"
    return {
        "own": with_state(local_cluster, "own", (own / "own-1").as_uri()),
        "source": with_state(local_cluster, "source", (own / "source-1").as_uri()),
        "elsewhere": with_state(local_cluster, "elsewhere", (tmp_path / "elsewhere").as_uri()),
    }


def test_state_is_deleted_only_if_it_is_ours_and_unused(
    run: Run, local_cluster: LocalCluster, three: dict[str, Path]
) -> None:
    env = [{"name": "ELASTICCTL_START_FROM", "value": f"{three['source'].as_uri()}#latest"}]
    local_cluster.create_job(shell_job("heir", "sleep 60", container={"env": env}))
    shown = json.loads(run("prune", "--older-than", "0s", "--state", "--dry-run", "-o", "json").out)
    assert {item["name"]: item["state"] for item in shown["jobs"]} == {
        "own": "goes",
        "source": "stays",
        "elsewhere": "stays",
    }
    of_a_phase = run("prune", "--older-than", "0s", "--phase", "succeeded", "--dry-run", "-o", "json")
    assert len(json.loads(of_a_phase.out)["jobs"]) == 3
    refused = run("prune", "--older-than", "0s", "--state")
    assert refused.err == "error: this deletes 3 jobs and their logs. FIX: add --yes to confirm\n"
    done = run("prune", "--older-than", "0s", "--state", "--yes")
    assert done.code == 0
    assert done.err.splitlines()[0] == "3 jobs deleted; the state of 1 too"
    assert f"elsewhere: its checkpoints stay in {three['elsewhere'].as_uri()}" in done.err
    assert [path.exists() for path in three.values()] == [False, True, True]
    assert run("list", "-o", "name").out == "heir\n"
    assert run("delete", "heir", "-y").code == 0


def test_changes_since_the_list_was_shown(
    run: Run, local_cluster: LocalCluster, three: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is gone by itself, and another one has been run again under its own name."""

    def meanwhile(question: str, err: bool) -> bool:
        assert question == "Delete 3 jobs and their logs?"
        for name in ("own", "source"):
            local_cluster.delete_job("default", name)
        local_cluster.create_job(shell_job("source", FOREVER))
        return True

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("typer.confirm", meanwhile)
    done = run("prune", "--older-than", "0s", "--state")
    assert (done.code, done.err.splitlines()[:2]) == (
        0,
        ["source: left alone: another job has that name now", "2 jobs deleted; the state of 1 too"],
    )
    assert [job["metadata"]["name"] for job in local_cluster.list_jobs("default")] == ["source"]
    assert [path.exists() for path in three.values()] == [False, True, True]


def test_nothing_to_do_and_wrong_use(run: Run, home: Path) -> None:
    assert run("prune").err == "error: no age given. FIX: add --older-than 7d, for example\n"
    assert run("prune", "--older-than", "7d", "--phase", "Running").code == 2
    done = run("prune", "--older-than", "7d", "-y")
    assert (done.code, done.out, done.err) == (0, "", "no job in namespace default ended longer than 7d0h ago\n")


NOW = 2_000_000_000.0


def send(folder: Path, origin: str, *contents: bytes) -> str:
    """A workspace of files of these contents; its digest."""
    by_digest = {hashlib.sha256(data).hexdigest(): data for data in contents}
    listing = Listing.of([File(f"f{number}", len(data), key) for number, (key, data) in enumerate(by_digest.items())])

    def read(file: File) -> Iterator[bytes]:
        yield by_digest[file.sha256]

    transfer.send(storages.open(str(folder)), listing, origin * 32, read, lambda count: None)
    return listing.digest


def age(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (NOW - seconds, NOW - seconds))


def count(folder: Path, kind: str) -> int:
    return sum(1 for _ in (folder / kind).iterdir())


def test_unreferenced_workspaces_are_deleted_with_their_contents(tmp_path: Path) -> None:
    kept, lost, head = (send(tmp_path, "1", data, b"shared") for data in (b"kept", b"lost", b"head"))
    age(tmp_path, KEEP_YOUNGER_S + 1)
    assert delete_unused_workspaces(tmp_path, {kept}, NOW) == (1, len(b"lost"))
    assert not (tmp_path / "listings" / lost).exists()
    for number, digest in enumerate((kept, head)):
        copy = tmp_path / f"copy{number}"
        copy.mkdir()
        unpack(storages.open(str(tmp_path)), digest, copy)
    assert delete_unused_workspaces(tmp_path, {kept}, NOW) == (0, 0)


def test_recent_files_stay(tmp_path: Path) -> None:
    send(tmp_path, "1", b"a")
    send(tmp_path, "1", b"b")
    age(tmp_path, KEEP_YOUNGER_S - 1)
    assert delete_unused_workspaces(tmp_path, (), NOW) == (0, 0)
    assert (count(tmp_path, "listings"), count(tmp_path, "packs")) == (2, 2)


def test_a_workspace_that_is_sent_at_the_same_moment_stays_whole(tmp_path: Path) -> None:
    """It points into a pack of the newest one of its folder, and its own listing is young."""
    send(tmp_path, "1", b"old", b"shared")
    age(tmp_path, KEEP_YOUNGER_S + 1)
    young = send(tmp_path, "1", b"new", b"shared")
    for name in (f"listings/{young}", "heads/" + "1" * 32):
        os.utime(tmp_path / name, (NOW, NOW))
    assert delete_unused_workspaces(tmp_path, (), NOW)[0] == 1
    (tmp_path / "copy").mkdir()
    unpack(storages.open(str(tmp_path)), young, tmp_path / "copy")


def test_a_damaged_listing_does_not_block(tmp_path: Path) -> None:
    kept, damaged = send(tmp_path, "1", b"kept"), send(tmp_path, "2", b"damaged")
    (tmp_path / "listings" / damaged).write_text("{")
    age(tmp_path, KEEP_YOUNGER_S + 1)
    assert delete_unused_workspaces(tmp_path, {kept}, NOW) == (0, len(b"damaged"))
    assert delete_unused_workspaces(tmp_path / "nothing", (), NOW) == (0, 0)


def test_jobs_name_them_by_their_variable() -> None:
    manifest = job_samples.job()
    (container,) = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["env"].append({"name": "ELASTICCTL_WORKSPACE", "value": "s3://b/p?endpoint=http://x#abc"})
    assert workspace_digests([manifest, job_samples.job("other")]) == {"abc"}


@pytest.mark.usefixtures("idle_jobs")
def test_prune_keeps_those_of_jobs_that_stay(
    run: Run, local_cluster: LocalCluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def end(*words: str) -> None:
        made = run(*words)
        assert made.code == 0, made.err
        assert run("cancel", made.out.strip()).code == 0
        assert run("wait", made.out.strip()).code == 4

    workspaces = home / "local/workspaces"
    for number in range(3):
        Path("train.py").write_text(f"print({number})\n")
        end("submit", "train.py", "--name", f"job{number}", "-d")
    for path in workspaces.rglob("*"):
        os.utime(path, (0, 0))
    assert run("delete", "job0", "-y").code == 0
    pruned = run("prune", "--older-than", "0s", "--phase", "Failed", "--state", "-y")
    assert (pruned.code, count(workspaces, "listings")) == (0, 3)  # no job was deleted, so nothing was swept
    end("rerun", "job1", "-d", "--set", "spec.suspend=true")
    pruned = run("prune", "--older-than", "0s", "--state", "-y")
    assert "2 workspaces no longer used deleted too, 18 B\n" in pruned.err
    assert count(workspaces, "listings") == 1  # the newest of its folder
