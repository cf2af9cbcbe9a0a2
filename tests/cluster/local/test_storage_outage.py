"""A job of the local cluster whose storage is away: it waits, is not counted as failed, and continues."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.spec import JobSpec
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.templates import render_manifest
from tests.support import servers
from tests.support.clouds import Cloud
from tests.support.gate import Fault
from tests.support.jobs import light_template
from tests.support.processes import processes_of
from tests.support.waiting import wait_until

SCRIPT = """\
import time
import torch
from elasticctl_train import Run, SavePolicy

model = torch.nn.Linear(1, 1)
with Run(model=model, save=SavePolicy(every_steps=5)) as run:
    while run.steps_done < 100:
        run.step()
        time.sleep(0.05)
"""
AN_HOUR = Fault(status=503, code="ServiceUnavailable", headers=(("Retry-After", "3600"),))
"""Away, says the service, for an hour: patience that is bounded by less gives up at once."""


def status(cluster: LocalCluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get_job("default", "job").get("status", {})
    return found


def committed(cluster: LocalCluster) -> int:
    return int(status(cluster).get("checkpoint", {}).get("step") or 0)


def is_launcher(words: list[str]) -> bool:
    return any(word.endswith("elasticctl-launch") for word in words[:2])


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_workers")
def test_a_rank_lost_at_the_start_of_an_outage_is_not_the_scripts_failure(
    local_cluster: LocalCluster, home: Path, s3: Cloud, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    keys = {**servers.KEYS, "AWS_CONFIG_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true"}
    spec = JobSpec("job", (sys.executable, str(script)), workers=2, storage=s3.url, env=keys, backoff_limit=1)
    local_cluster.create_job(render_manifest(spec, light_template()))
    wait_until(lambda: committed(local_cluster) >= 5)

    s3.gate.faults = lambda seen: AN_HOUR
    launchers = [process for process in processes_of(home) if is_launcher(process.cmdline())]
    launchers[0].kill()
    seen = len(s3.gate.seen)

    def restoring() -> bool:
        """Have the ranks been started again? Then they take the URL over, or try to."""
        return any("prefix=" in one.target and "journal" in one.target for one in s3.gate.seen[seen:])

    def patient() -> bool:
        """Does a rank say that it goes on trying? Its own words: the storage, which has the others', is away."""
        logs = local_cluster.paths.state.glob("pods/*/log")
        return any(b"; trying again until it answers" in log.read_bytes() for log in logs)

    wait_until(restoring)
    wait_until(patient)
    assert status(local_cluster)["phase"] not in ("Failed", "Succeeded")

    s3.gate.faults = lambda seen: None
    wait_until(lambda: status(local_cluster)["phase"] in ("Failed", "Succeeded"))
    found = status(local_cluster)
    assert (found["phase"], found["progress"]["step"]) == ("Succeeded", 100), found["message"]
    assert (found["failures"], set(found["restarts"])) == (0, {"Killed", "Completed"})
