"""`from elasticctl import submit, Job`: options as on the command line, and real jobs on the local cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticctl import Job, JobOptions, submit
from elasticctl.api.errors import ConflictError, JobFailedError, NotFoundError, UsageError
from elasticctl.api.status import Phase
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.jobs import read_options
from elasticctl.operations.option_values import Assignment
from elasticctl.operations.submit.job_flags import JobFlags, Mount, SecretRef
from tests.support.cluster_contract import running
from tests.support.jobs import FOREVER, shell_job
from tests.support.waiting import wait_until


def test_it_has_all_options_of_submit() -> None:
    assert set(JobOptions.__annotations__) == {field.name for field in dataclasses.fields(JobFlags)}


def test_options_are_read_as_those_that_are_typed() -> None:
    read = read_options(
        {
            "gpus": 8,
            "deadline": "12h",
            "ttl": 60,
            "finish_by": "36h",
            "budget": 37.5,
            "prefer": "time",
            "cpus": 0.5,
            "memory": "16GiB",
            "spot": False,
            "pools": "spot,on-demand",
            "pool_wait": "5m",
            "env": {"LR": 0.1, "A": "b=c"},
            "secrets": ["hub:TOKEN"],
            "mounts": ["data:/data"],
            "on_nan": "stop",
            "workspace": Path("src"),
            "storage": None,
        }
    )
    assert (read.gpus, read.deadline, read.ttl, read.cpus, read.memory) == (8, 43_200, 60, "0.5", "16Gi")
    assert (read.finish_by, read.budget, read.prefer) == ("36h", 37.5, "time")
    assert (read.spot, read.on_nan, read.workspace, read.storage) == (False, "stop", "src", "")
    assert (read.pools, read.pool_wait) == ("spot,on-demand", 300)
    assert read.env == (Assignment("LR", "0.1"), Assignment("A", "b=c"))
    assert read.secrets == (SecretRef("hub", "TOKEN", "TOKEN"),)
    assert read.mounts == (Mount("data", "/data"),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": 1}, 'submit has no option "gpu" (did you mean "gpus"?)'),
        ({"gpus": -1}, 'gpus: "-1" is not a whole number of at least 0.'),
        ({"gpus": True}, "gpus: true must be a value, not True or False"),
        ({"spot": "no"}, 'spot: "no" must be True or False'),
        ({"deadline": "soon"}, 'deadline: "soon" is not a duration'),
        ({"secrets": "hub"}, 'secrets: "hub" must be in a list'),
        ({"on_nan": "hope"}, "on_nan: 'hope' is not a valid OnNan"),
        ({"mounts": ["x"]}, 'mounts: "x" is not of the form CLAIM:/path.'),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_options(options)
    assert str(error.value).startswith(message)


@pytest.mark.usefixtures("private_home")
def test_a_notebook_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "My Work.ipynb").write_text("{}")
    with pytest.raises(UsageError, match=r"is a notebook.* FIX: `jupyter nbconvert --to script '.*My Work.ipynb'`"):
        submit(tmp_path / "My Work.ipynb", workers=1)


@pytest.mark.usefixtures("private_home")
def test_what_would_be_asked_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match="FIX"):
        submit(tmp_path / "train.py", gpus=64)


def test_importing_the_package_costs_nothing() -> None:
    code = (
        "import sys, elasticctl; assert 'typer' not in sys.modules and 'elasticctl.jobs' not in sys.modules;"
        "assert 'Job' in dir(elasticctl) and not hasattr(elasticctl, 'Jobs');"
        "from elasticctl import Job, submit; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_a_job_that_is_submitted_runs_and_tells(local_cluster: LocalCluster) -> None:
    job = submit(["sh", "-c", "echo $WORD"], name="greeted", workers=1, no_workspace=True, env={"WORD": "hello"})
    assert repr(job) == "Job('greeted', context='local', namespace='default')"
    assert [line.text for line in job.logs(follow=True) if line.text == "hello"] == ["hello"]
    assert job.wait(timeout_s=240, check=True).phase is Phase.SUCCEEDED
    assert [found.name for found in Job.list()] == ["greeted"]
    with pytest.raises(ConflictError, match="greeted has ended"):
        job.cancel()


def test_a_job_is_waited_for_changed_and_deleted(local_cluster: LocalCluster) -> None:
    local_cluster.create_job(shell_job("elastic", FOREVER, grace_s=1, minReplicas=1, maxReplicas=3))
    job = Job.get("elas")
    assert job.wait(timeout_s=240, running=True).phase is Phase.RUNNING
    with pytest.raises(TimeoutError, match="elastic is still Running after 0 s"):
        job.wait(timeout_s=0)
    job.scale(2)
    wait_until(lambda: len(running(local_cluster, "elastic")) == 2)
    with pytest.raises(UsageError, match="more than the maximum"):
        job.scale(4)
    job.suspend()
    wait_until(lambda: job.status().phase is Phase.SUSPENDED)
    job.resume()
    job.cancel()

    async def end() -> Phase:
        return (await asyncio.wait_for(job, 240)).phase

    assert asyncio.run(end()) is Phase.CANCELLED
    with pytest.raises(JobFailedError, match=r"elastic has ended \(Cancelled\)"):
        job.wait(check=True)
    job.delete()
    with pytest.raises(NotFoundError):
        wait_until(lambda: job.status() is None)
    local_cluster.create_job(shell_job("elastic", "true"))
    with pytest.raises(NotFoundError, match="another job now has its name"):
        job.delete()
