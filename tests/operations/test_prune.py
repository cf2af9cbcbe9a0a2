"""`prune`: which jobs are meant, what is asked, and what is left alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl.operations.prune import PruneFilter, own_folder, select_jobs
from elasticctl.operations.selection import final_phases
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


def test_state_goes_only_where_it_is_ours_and_nobody_needs_it(
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


def test_what_has_happened_since_the_list_was_shown(
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
