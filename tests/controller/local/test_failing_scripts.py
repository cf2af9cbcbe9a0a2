"""Scripts that fail, under the real launcher, service and controller: each job ends by its own error, in its budget."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from elasticctl.cluster.base import LogQuery, Manifest
from elasticctl.cluster.local.client import LocalCluster
from tests.support.cluster_contract import phase, running, scale
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_workers")

PATIENCE_S = 240.0
LAUNCHER = str(Path(sys.executable).parent / "elasticctl-launch")
COUPLED = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
print("start of", rank, "of", world, flush=True)
"""


def submit(cluster: LocalCluster, folder: Path, name: str, source: str, workers: int = 1, **spec: Any) -> None:
    """A job of workers that run this Python source, one rank each."""
    script = folder / f"{name}.py"
    script.write_text(source)
    options = ("--preload", "torch" if "torch" in source else "none", "--")
    container = {"command": [LAUNCHER, *options, sys.executable, str(script)]}
    cluster.create_job(shell_job(name, "", workers, container=container, **spec))


def ended(cluster: LocalCluster, name: str) -> Manifest:
    wait_until(lambda: phase(cluster, name) in ("Failed", "Succeeded"), PATIENCE_S)
    return cluster.get_job("default", name)["status"]


def starts(cluster: LocalCluster, name: str, text: str = "start") -> int:
    """How often a rank of the job has started."""
    return sum(line.text.startswith(text) for line in cluster.logs("default", name, LogQuery(everything=True)))


def test_a_bug_ends_the_job_with_its_own_error_even_if_the_rank_cleans_up_for_long(
    local_cluster: LocalCluster, tmp_path: Path
) -> None:
    source = f"""{COUPLED}
try:
    for step in range(1, 100):
        if step == 5 and rank == 1:
            raise ValueError("the fifth step cannot be made")
        dist.all_reduce(torch.ones(3))
finally:
    if rank == 1:
        dist.destroy_process_group()  # which the other rank takes for the loss of its peer
        time.sleep(1.5)
"""
    submit(local_cluster, tmp_path, "bug", source, 2, backoffLimit=2, minReplicas=1)
    status = ended(local_cluster, "bug")
    assert (status["phase"], status["reason"]) == ("Failed", "BackoffLimitExceeded")
    assert "ValueError: the fifth step cannot be made" in status["message"]
    assert "rank 1" in status["message"]
    assert starts(local_cluster, "bug", "start of 1") == 3, "the first try and two more"


def test_a_script_that_cannot_run_at_its_size_does_not_succeed_at_a_smaller_one(
    local_cluster: LocalCluster, tmp_path: Path
) -> None:
    source = f"""{COUPLED}
if world == 2:
    raise ValueError("7 layers cannot be divided by 2")
"""
    submit(local_cluster, tmp_path, "size", source, 2, backoffLimit=1, minReplicas=1)
    status = ended(local_cluster, "size")
    assert status["phase"] == "Failed"
    assert "7 layers cannot be divided by 2" in status["message"]


@pytest.mark.parametrize("source", ["print('start'\n", "print('start', flush=True)\nimport no_such_module\n"])
def test_what_another_try_cannot_help_is_tried_once(local_cluster: LocalCluster, tmp_path: Path, source: str) -> None:
    submit(local_cluster, tmp_path, "typo", source, backoffLimit=3)
    status = ended(local_cluster, "typo")
    assert (status["phase"], status["reason"]) == ("Failed", "PermanentError")
    assert "Error: " in status["message"]
    lines = local_cluster.logs("default", "typo", LogQuery(everything=True))
    assert sum("Error: " in line.text and "generation" not in line.text for line in lines) == 1


@pytest.mark.parametrize(
    ("end", "says"),
    [("os.kill(os.getpid(), 9)", "SIGKILL"), ("sys.exit(3)", "exit code 3")],
)
def test_a_script_that_always_fails_is_tried_as_often_as_its_budget_allows(
    local_cluster: LocalCluster, tmp_path: Path, end: str, says: str
) -> None:
    source = f"import os, sys\nprint('start', flush=True)\n{end}\n"
    submit(local_cluster, tmp_path, "never", source, backoffLimit=2)
    status = ended(local_cluster, "never")
    assert (status["phase"], status["reason"]) == ("Failed", "BackoffLimitExceeded")
    assert says in status["message"]
    assert starts(local_cluster, "never") == 3
    assert status["failures"] == 3


def test_a_training_that_is_over_is_not_started_again_by_one_who_joins_late(
    local_cluster: LocalCluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    source = f"""
import os, time
print("start of", os.environ["RANK"], flush=True)
while not os.path.exists({str(go)!r}):
    time.sleep(0.05)
"""
    submit(local_cluster, tmp_path, "over", source, 1, maxReplicas=2)
    wait_until(lambda: starts(local_cluster, "over") == 1, PATIENCE_S)
    local_cluster.patch_job("default", "over", scale(2))
    wait_until(lambda: len(running(local_cluster, "over")) == 2, PATIENCE_S)
    go.touch()
    assert ended(local_cluster, "over")["phase"] == "Succeeded"
