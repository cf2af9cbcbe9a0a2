"""Errors about jobs, existing or not: the exact line on stderr, the exit code, nothing on stdout.

What needs no cluster to be refused is in test_bad_input.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl.cluster.local.client import LocalCluster
from tests.support.cli import Run
from tests.support.cluster_contract import phase, running
from tests.support.jobs import FOREVER, shell_job
from tests.support.waiting import wait_until

NO_JOB = 'no job "{}" in context local, namespace default{}. FIX: list the jobs with `elasticctl list`'

VERBS = "status logs wait describe events history explain preempt checkpoints"
MISTAKES = [
    *((f"{verb} none", 3, NO_JOB.format("none", "")) for verb in VERBS.split()),
    ("scale none --to 2", 3, NO_JOB.format("none", "")),
    (
        "logs digits-a-worker-1",
        3,
        'no job "digits-a-worker-1" in context local, namespace default.'
        " FIX: give the worker's job, digits-a, and --worker 1 where a verb takes it",
    ),
    ("status digit-a", 3, NO_JOB.format("digit-a", ' (did you mean "digits-a"?)')),
    (
        "status digits",
        3,
        '"digits" matches several jobs in context local, namespace default: digits-a, digits-b',
    ),
    ("status digits-a -w -o yaml", 2, "--watch shows tables and cannot be used with --output yaml"),
    (
        "status digits-a -n other",
        3,
        'no job "digits-a" in context local, namespace other. FIX: list the jobs with `elasticctl list -n other`',
    ),
    ("list -A -w -o name", 2, "--watch shows tables and cannot be used with --output name"),
    (
        "logs digits-a --worker x",
        2,
        '"x" is not the name of a worker. FIX: give digits-a-worker-0 or 0, for example',
    ),
    (
        "scale digits-a",
        2,
        "no size given. FIX: add one of --to N, --gpus N, --add K, --remove K, --remove-worker NAME, --auto,"
        " or a goal with --finish-by TIME or --budget USD",
    ),
    ("scale digits-a 5", 2, "5 workers are more than the maximum of digits-a, 4"),
    ("scale digits-a 3 --add 1", 2, "two sizes given, 3 and an option. FIX: leave one of them out"),
    ("scale digits-b --to 2", 3, "digits-b has ended (Succeeded) and cannot be scaled"),
    ("events digits-a -w -o json", 2, "--watch shows tables and cannot be used with --output json"),
    ("suspend digits-b", 3, "digits-b has ended (Succeeded) and cannot be suspended"),
    ("resume digits-b", 3, "digits-b has ended (Succeeded) and cannot be resumed"),
    ("cancel -y digits-b", 3, "digits-b has ended (Succeeded) and cannot be cancelled"),
    ("cancel", 2, "no job given. FIX: give the names of jobs, or select them with --label KEY=VALUE"),
    ("delete digits-a", 2, "digits-a is still Running. FIX: add --yes to delete it anyway"),
    ("rerun digits-a --from-checkpoint 3", 2, "digits-a has no storage URL, so it has no checkpoint to start from"),
    (
        "rerun digits-a --from-checkpoint first",
        2,
        "Invalid value for '--from-checkpoint': \"first\" is neither a step nor latest. See `elasticctl rerun --help`.",
    ),
    (
        "rerun digits-a --name digits-a",
        3,
        "digits-a is still Running. FIX: give the new job another --name, or cancel the old one first",
    ),
    (
        "preempt digits-a --worker 5",
        3,
        "digits-a-worker-5 is not running. These workers of digits-a are: digits-a-worker-0, digits-a-worker-1",
    ),
    ("preempt digits-b", 3, "digits-b has ended (Succeeded) and has no workers to lose"),
    ("checkpoints digits-a", 2, "digits-a has no storage. FIX: give the URL of its checkpoints"),
]


@pytest.fixture
def jobs(local_cluster: LocalCluster, tmp_path: Path) -> None:
    """`digits-a`, which runs, and `digits-b`, which has ended."""
    local_cluster.create_job(shell_job("digits-a", FOREVER, 2, minReplicas=2, maxReplicas=4))
    local_cluster.create_job(shell_job("digits-b", "true"))

    wait_until(lambda: len(running(local_cluster, "digits-a")) == 2)
    wait_until(lambda: [phase(local_cluster, f"digits-{x}") for x in "ab"] == ["Running", "Succeeded"])


@pytest.mark.usefixtures("jobs")
def test_each_mistake_has_its_line(run: Run) -> None:
    """One cluster for them all: none of them changes anything."""
    wrong = []
    for line, code, message in MISTAKES:
        done = run(*line.split())
        if (done.code, done.out, done.err) != (code, "", f"error: {message}\n"):
            wrong.append((line, done))
    assert wrong == []


@pytest.mark.usefixtures("jobs")
def test_names_that_are_short_taken_or_missing(
    run: Run, local_cluster: LocalCluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("status", "digits-b").err == ""
    local_cluster.create_job(shell_job("old-one", "true"))
    wait_until(lambda: phase(local_cluster, "old-one") == "Succeeded")
    assert run("status", "old").err == '"old" is short for old-one, which has ended (Succeeded)\n'
    # A command that is repeated finds its job gone, and must not take another whose name begins like it.
    for words in (
        ("cancel", "old"),
        ("delete", "old", "-y"),
        ("move", "old", "--to", "local"),
        ("checkpoints", "rm", "old", "1", "-y"),
        ("checkpoints", "prune", "old", "--keep-last", "1", "-y"),
        ("checkpoints", "repair", "old", "-y"),
    ):
        done = run(*words)
        whole = "FIX: give a whole name, since this cannot be undone: old-one"
        assert (done.code, done.err.count(whole)) == (3, 1), words

    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('hello')\n")
    taken = run("submit", "code/train.py", "--workers", "1", "--name", "digits-a", "-d")
    assert taken.code == 3
    assert taken.err.splitlines()[-1].startswith("error: job default/digits-a already exists. FIX: ")
    assert list((home / "local" / "workspaces").rglob("*")) == [], "it is refused before anything is sent"

    assert run("resume", "digits-a").err == "digits-a: not suspended, nothing to resume\n"
    for verb, past in (("suspend", "suspended"), ("resume", "resumed"), ("cancel", "cancelled")):
        done = run(verb, "none", "digits-b", "digits-a", "digits-a")
        first, *news, last = done.err.splitlines()
        assert (done.code, first) == (3, f"error: {NO_JOB.format('none', '')}")
        assert [line.partition(":")[0] for line in news] == ["digits-a"]
        assert last == f"error: digits-b has ended (Succeeded) and cannot be {past}"
    done = run("delete", "none", "digits-a", "digits-b", "-y")
    said = [line.partition(":")[0] for line in done.err.splitlines()]
    assert (done.code, said) == (3, ["digits-a", "digits-b", "error"])
