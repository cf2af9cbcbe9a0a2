"""The launcher against a real service: forming, losing, failing, leaving."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from elasticctl.api.codec import from_json
from elasticctl.api.status import JobStatus, RankFailure
from elasticctl_controller.core.group.failures import GroupRules
from tests.support.launcher_lab import JOB_UID, RANK, Lab
from tests.support.processes import has_ended


def pids(lab: Lab, name: str) -> list[int]:
    lines = [line for line in lab.output(name).splitlines() if line.startswith("rank ")]
    return [int(line.split()[-1]) for line in lines]


@pytest.mark.parametrize("victim", ["a-0", "a-1"])
def test_a_killed_worker_leaves_no_ranks_and_the_other_continues(pair: Lab, victim: str) -> None:
    survivor = "a-1" if victim == "a-0" else "a-0"
    (rank_pid,) = pids(pair, victim)
    pair.kill(victim)
    pair.until(lambda: has_ended(rank_pid))
    pair.until(lambda: "rank 0 of 1 generation 2" in pair.output(survivor))
    (pair.folder / "done").touch()
    assert pair.wait(survivor) == 0


def test_a_newcomer_joins(pair: Lab) -> None:
    pair.add("a-2")
    pair.start_script("a-2")
    pair.until(lambda: all(f"rank {i} of 3 generation 2" in pair.output(f"a-{i}") for i in range(3)))
    assert all((pair.folder / f"reached-1-{rank}").exists() for rank in range(2)), "the old ranks ended in order"


def test_an_error_of_the_script_restarts_the_ranks_in_place(pair: Lab) -> None:
    (pair.folder / "fail-a-1").touch()
    pair.until(lambda: "ValueError: the loss is not a number" in pair.output("a-1"))
    (pair.folder / "fail-a-1").unlink()
    pair.until(lambda: all(len(pids(pair, name)) > 1 for name in pair.workers))
    (pair.folder / "done").touch()
    assert [pair.wait(name) for name in pair.workers] == [0, 0]
    assert not (pair.folder / "a-0.end").exists()


def test_torchs_error_file_names_the_error(lab: Lab) -> None:
    lab.rules = GroupRules(limit=0)
    lab.add("a-0")
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n    raise KeyError('no such layer')\n"
        "try:\n    main()\nexcept KeyError:\n    print('and a last line of its own')\n    raise SystemExit(9)\n"
    )
    lab.start("a-0", sys.executable, "-c", script)
    assert lab.wait("a-0") == 9
    failure = from_json(RankFailure, lab.message("a-0"))
    assert (failure.verdict, failure.rank, failure.exit_code, failure.generation) == ("application", 0, 9, 1)
    assert failure.error == "KeyError: 'no such layer'"
    assert failure.last_lines[-1] == "and a last line of its own"


def test_sigterm_drains_all_ranks(pair: Lab) -> None:
    pair.workers["a-0"].terminate()
    assert pair.wait("a-0") == 143
    assert from_json(RankFailure, pair.message("a-0")).verdict == "preempted"
    pair.until(lambda: "rank 0 of 1 generation 2" in pair.output("a-1"))
    assert all((pair.folder / f"reached-1-{rank}").exists() for rank in range(2)), "both committed the same step"
    assert pair.site.service.view("default/job", JOB_UID).generations[-1].reason == "a-0 has to stop: SIGTERM"


def test_sigterm_ends_a_script_without_the_library_immediately(lab: Lab) -> None:
    lab.add("a-0", "a-1")
    for name in ("a-0", "a-1"):
        lab.start_script(name, SILENT="1", ELASTICCTL_GRACE_S="36000")  # longer than any test takes
    lab.until(lambda: "rank 0 of 2" in lab.output("a-0") and "rank 1 of 2" in lab.output("a-1"))
    lab.workers["a-1"].terminate()
    assert lab.wait("a-1") == 143
    lab.until(lambda: "rank 0 of 1 generation 2" in lab.output("a-0"))


def test_ranks_that_do_not_drain_are_stopped_at_the_deadline(lab: Lab) -> None:
    lab.add("a-0")
    lab.start_script("a-0", STUBBORN="1", ELASTICCTL_GRACE_S="2")
    lab.until(lambda: "rank 0 of 1" in lab.output("a-0"))
    lab.workers["a-0"].terminate()
    assert lab.wait("a-0") == 143


def test_drained_ranks_run_their_own_sigterm_handler(lab: Lab) -> None:
    """Nothing waits for the ranks of a worker that leaves; the handler only sets a flag, as many do."""
    script = lab.folder / "train.py"
    script.write_text("""
import os, pathlib, signal, time, torch
from elasticctl_train import Run
folder = pathlib.Path(os.environ["LAB"])
signal.signal(signal.SIGTERM, lambda *_: (folder / "terminated").touch())
try:
    with Run(model=torch.nn.Linear(1, 1)) as run:
        for epoch in run.epochs(1):
            for batch in run.loader(range(10_000), global_batch=1):
                time.sleep(0.02)
                run.step()
                (folder / "step").touch()
finally:
    time.sleep(1)
    (folder / "cleaned").touch()
""")
    lab.add("a-0")
    environ = {"LAB": str(lab.folder), "ELASTICCTL_GRACE_S": "36000"}  # longer than any test takes
    lab.start("a-0", sys.executable, str(script), forks=True, **environ)
    lab.until((lab.folder / "step").exists)
    lab.workers["a-0"].terminate()
    assert lab.wait("a-0") == 143
    assert (lab.folder / "terminated").exists()
    assert (lab.folder / "cleaned").exists()


def test_ranks_of_a_deleted_pod_get_its_grace_period(lab: Lab) -> None:
    """The service reports the end of a job before the cluster sends SIGTERM to its pods."""
    script = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["LAB"])
def clean_up(*_):
    (folder / "terminated").touch()
    time.sleep(7)
    (folder / "cleaned").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, clean_up)
(folder / "runs").touch()
while True:
    time.sleep(0.1)
"""
    lab.add("a-0")
    more = {"ELASTICCTL_GRACE_S": "60", "ELASTICCTL_STOP_GRACE_S": "5"}
    lab.start("a-0", sys.executable, "-c", script, LAB=str(lab.folder), **more)
    lab.until((lab.folder / "runs").exists)
    lab.alive.clear()
    lab.tell()
    lab.until((lab.folder / "terminated").exists)
    lab.workers["a-0"].terminate()
    assert lab.wait("a-0") == 143
    assert (lab.folder / "cleaned").exists(), lab.output("a-0")


def test_running_ranks_do_not_notice_a_restart_of_the_service(pair: Lab) -> None:
    before = pids(pair, "a-0") + pids(pair, "a-1")
    pair.restart_service(JobStatus(generation=1))
    pair.until(lambda: pair.site.service.view("default/job", JOB_UID).generations)
    pair.add("a-2")
    pair.start_script("a-2")
    pair.until(lambda: "rank 2 of 3 generation 2" in pair.output("a-2"))
    assert before[0] in pids(pair, "a-0")
    pair.until(lambda: len(pids(pair, "a-0")) > 1)
    assert len(pids(pair, "a-0")) == 2, "stopped once, for the newcomer, not for the restart"


def test_a_group_forms_over_ipv6(lab: Lab) -> None:
    script = lab.folder / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist; dist.init_process_group('gloo'); x = torch.ones(1); "
        "dist.all_reduce(x); print('sum', int(x)); dist.destroy_process_group()"
    )
    lab.add("a-0", "a-1")
    for name in ("a-0", "a-1"):
        lab.start(name, sys.executable, str(script), forks=True, ELASTICCTL_POD_IP="::1")
    assert [lab.wait(name) for name in lab.workers] == [0, 0], lab.output("a-0")
    assert "sum 2" in lab.output("a-1")


@pytest.fixture
def coupled(lab: Lab) -> Lab:
    """Two workers that make steps together and are given up after six seconds without one, however busy the machine."""
    lab.add("a-0", "a-1")
    for name in ("a-0", "a-1"):
        command = [sys.executable, "-c", RANK]
        lab.start(name, *command, options=("--hang-timeout", "6"), LAB=str(lab.folder), COUPLED="1")
    lab.until(lambda: (lab.folder / "steps-1-0").exists() and (lab.folder / "steps-1-0").stat().st_size > 20)
    return lab


def test_a_worker_with_a_stopped_rank_is_given_up(coupled: Lab) -> None:
    os.kill(pids(coupled, "a-1")[0], signal.SIGSTOP)
    assert coupled.wait("a-1") == 1
    failure = from_json(RankFailure, coupled.message("a-1"))
    assert (failure.verdict, failure.rank) == ("stuck", 1)
    coupled.until(lambda: "rank 0 of 1 generation 2" in coupled.output("a-0"))


@pytest.mark.timeout(900)
def test_a_worker_that_is_stopped_entirely_is_left_out_and_named(coupled: Lab) -> None:
    for process in (coupled.workers["a-1"].pid, *pids(coupled, "a-1")):
        os.kill(process, signal.SIGSTOP)
    coupled.until(lambda: "rank 0 of 1 generation 2" in coupled.output("a-0"))
    assert coupled.site.service.view("default/job", JOB_UID).silent == {"uid-a-1"}


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(lab: Lab) -> None:
    lab.add("a-0")
    stubborn = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "p = subprocess.Popen(['sleep', '600']); print('child', p.pid, flush=True); time.sleep(600)"
    )
    lab.start("a-0", sys.executable, "-c", stubborn, ELASTICCTL_GRACE_S="1")
    lab.until(lambda: "child" in lab.output("a-0"))
    child = int(lab.output("a-0").split("child")[1].split()[0])
    lab.workers["a-0"].terminate()
    assert lab.wait("a-0") == 143
    lab.until(lambda: has_ended(child))
