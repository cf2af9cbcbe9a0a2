"""A real job whose script does not use our library: what the command line prints is true, and no more than known."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.client import LocalCluster
from tests.support.cli import Run
from tests.support.cluster_contract import running
from tests.support.waiting import wait_until

SCRIPT = """\
import os
import sys
import time


def train():  # what makes it look like training, without importing torch
    import torch

    torch.distributed.init_process_group("gloo")
    torch.ones(2, requires_grad=True).sum().backward()


print("group of", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
REDONE = {"status": "Redone\tfrom 0: ", "explain": "have been repeated so far", "history": "nothing of it"}


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_a_job_that_reports_nothing(run: Run, local_cluster: LocalCluster, tmp_path: Path) -> None:
    folder, gate = tmp_path / "code", tmp_path / "gate"
    folder.mkdir()
    (folder / "plain.py").write_text(SCRIPT)

    def status() -> dict[str, Any]:
        found: dict[str, Any] = local_cluster.get_job("default", "plain").get("status", {})
        return found

    def groups(size: int) -> int:
        """How many ranks have begun in a group of that size."""
        return printed().count(f"group of {size}")

    def printed() -> list[str]:
        return [line.text for line in local_cluster.logs("default", "plain", LogQuery(everything=True))]

    def said(verb: str) -> str:
        done = run(verb, "plain")
        assert done.code == 0, done.err
        text = done.out + done.err
        for untrue in ("first step", "recovered", "superseded", "redone", "0 steps", "done again", "replaying"):
            assert untrue not in text.replace("an unknown number of steps done again", "").replace(
                REDONE[verb], "", 1
            ), f"{verb}: {text}"
        return text

    submitted = run("submit", str(folder / "plain.py"), "--workers", "2", "--max-workers", "3", "-d", "--", str(gate))
    assert submitted.code == 0, submitted.err
    assert "plain.py saves no checkpoints: after each loss and each scaling it starts at step 0" in submitted.err
    assert "from elasticctl_train import Run" in submitted.err
    wait_until(lambda: groups(2) == 2)
    wait_until(lambda: "No step has been reported" in said("explain"))  # once it is in the status
    assert "running" in said("status").lower()
    assert "no interruptions" in said("history")

    victim = next(pod for pod in running(local_cluster, "plain"))
    os.kill(int(victim["metadata"]["annotations"]["local.elasticctl/pid"]), signal.SIGKILL)
    wait_until(lambda: groups(2) == 4)
    for verb in ("status", "history", "explain"):
        assert (REDONE[verb] in said(verb)) == (verb != "history")
    assert any("starts from the beginning again (training repeated so far: " in line for line in printed())
    (interruption,) = wait_until(lambda: [i for i in status().get("interruptions", []) if "recoveredAt" in i])
    assert "stepsRedone" not in interruption
    assert "stepsRedone" not in status()

    scaled = run("scale", "plain", "--to", "3")
    assert scaled.code == 0
    assert "unless it keeps checkpoints of its own" in scaled.err
    wait_until(lambda: groups(3) == 3)
    (scaling,) = wait_until(lambda: [item for item in status()["scalings"] if item.get("doneAt")])
    assert (scaling["phase"], scaling["toWorkers"]) == ("Done", 3)
    assert "stepsRedone" not in scaling
    for verb in ("status", "history", "explain"):
        said(verb)

    assert "an unknown number of steps done again" in said("history")
    gate.touch()
    wait_until(lambda: status()["phase"] in ("Succeeded", "Failed"))
    assert (status()["phase"], status()["failures"]) == ("Succeeded", 0)
    for verb in ("status", "explain"):
        said(verb)
    assert "1 interruption, 1 scaling" in said("history")
