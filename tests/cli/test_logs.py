"""Which lines `logs` asks for, and which of them it shows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from elasticctl.api.errors import NotFoundError, UsageError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import GroupGeneration, JobStatus
from elasticctl.cluster.base import LogLine, LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.logs import LogFilter
from elasticctl_store.stored_logs import Incarnation
from tests.support.cli import Run
from tests.support.cluster_contract import phase
from tests.support.jobs import shell_job
from tests.support.stored import launched, store
from tests.support.waiting import wait_until

GROUP = JobStatus(generations=(GroupGeneration(1, ("train-worker-2", "train-worker-0")),))
LINES = [
    LogLine("w", float(n), text) for n, text in enumerate(["[rank0] loss 2", "[rank1] loss 1", "[launcher] joins"])
]


def job(*command: str, status: JobStatus = GROUP) -> ElasticJob:
    manifest = shell_job("train", "", container={"command": list(command) or ["elasticctl-launch", "--", "x"]})
    return replace(ElasticJob.from_manifest(manifest), status=status)


@pytest.mark.parametrize(
    ("lines", "query"),
    [
        (LogFilter(), LogQuery()),
        (LogFilter(follow=True, tail=3), LogQuery(follow=True, tail=3)),
        (LogFilter(since=60), LogQuery(since=940.0)),
        (LogFilter(worker=("0", "train-worker-7")), LogQuery(workers=("train-worker-0", "train-worker-7"))),
        (LogFilter(rank=0), LogQuery(workers=("train-worker-2",))),
        (LogFilter(rank=1), LogQuery(workers=("train-worker-0",))),
        (LogFilter(previous=True), LogQuery(previous=True)),
        (LogFilter(everything=True, follow=True), LogQuery(everything=True, follow=True)),
    ],
)
def test_requested_lines(lines: LogFilter, query: LogQuery) -> None:
    assert lines.query(job(), 1000.0) == query


@pytest.mark.parametrize(
    ("lines", "error", "why"),
    [
        (LogFilter(worker=("0",), rank=0), UsageError, "cannot be used together"),
        (LogFilter(worker=("trainer",)), UsageError, "is not the name of a worker"),
        (LogFilter(previous=True, everything=True), UsageError, "--previous cannot be used with --all"),
        (LogFilter(previous=True, follow=True), UsageError, "--previous cannot be used with --follow"),
        (LogFilter(rank=2), NotFoundError, "no rank 2: its ranks are 0 to 1"),
    ],
)
def test_contradictory_options_are_refused(lines: LogFilter, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        lines.query(job(), 1000.0)


def test_one_of_several_ranks_of_a_worker_is_shown() -> None:
    several = job("elasticctl-launch", "--nproc-per-node", "2", "--", "x")
    assert LogFilter(rank=3).query(several, 0.0).workers == ("train-worker-0",)
    shown = [line.text for line in LogFilter(rank=1).of(LINES, several)]
    assert shown == ["[rank1] loss 1"]
    assert list(LogFilter(rank=1).of(LINES, job())) == LINES, "the only rank of its worker says so nowhere"
    assert [line.text for line in LogFilter(grep=re.compile(r"loss \d$")).of(LINES, several)] == [
        "[rank0] loss 2",
        "[rank1] loss 1",
    ]


def test_lines_are_searched(run: Run, local_cluster: LocalCluster) -> None:
    local_cluster.create_job(shell_job("talks", "printf 'one\\nloss 0.5\\nnan\\n'"))
    wait_until(lambda: phase(local_cluster, "talks") == "Succeeded")
    assert run("logs", "talks").out == "worker-0 | one\nworker-0 | loss 0.5\nworker-0 | nan\n"
    assert run("logs", "talks", "--grep", "loss|^nan$").out == "worker-0 | loss 0.5\nworker-0 | nan\n"
    assert run("logs", "talks", "--all", "--tail", "2", "--grep", "loss").out == "worker-0 | loss 0.5\n"
    assert run("logs", "talks", "--grep", "nothing").out == ""
    for args, why in [
        (("--grep", "(["), "is not a regular expression"),
        (("--rank", "0"), "talks has no rank 0: it is not training yet"),
        (("--rank", "-1"), "-1"),
        (("--worker", "9"), "error: talks has no worker talks-worker-9: it has talks-worker-0\n"),
        (("--worker", "0", "--worker", "9", "-f"), "talks has no worker talks-worker-9"),
        (("--previous", "--all"), "--previous cannot be used with --all"),
    ]:
        done = run("logs", "talks", *args)
        assert done.code in (2, 3)
        assert why in done.err


def test_a_deleted_jobs_stored_logs_go_with_it(run: Run, local_cluster: LocalCluster, home: Path) -> None:
    url, other = (home / "storage").as_uri(), "another-jobs-uid"
    manifest = local_cluster.create_job(shell_job("kept", "", container=launched(url), suspend=True))
    for uid in (manifest["metadata"]["uid"], other):
        store(url, Incarnation(uid, "kept-worker-0", 1.0, "u0"), (1.0, "said"))
    assert run("delete", "kept", "-y").code == 0
    left = [path.relative_to(home / "storage").parts[1] for path in (home / "storage").rglob("*.gz")]
    assert left == [other]
