"""Launchers in the launcher role, against the real service; the launcher program is a shell script, or mpirun."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from elasticctl_controller.core.group.failures import GroupRules
from tests.support.launcher_lab import Lab
from tests.support.mpi import SUM_OF_RANKS
from tests.support.processes import has_ended

ROLE = ("--launcher",)
UNTIL_DONE = 'while [ ! -e "$LAB/done" ]; do sleep 0.05; done'


def hosts(lab: Lab, name: str) -> list[str]:
    """What the discovery script prints, whose path this worker's program has written to a file."""
    path = lab.folder / f"{name}.discovery"
    command = path.read_text().strip() if path.exists() else ""
    if not command:  # the shell creates the file before it writes to it
        return []
    return subprocess.run([command], capture_output=True, text=True, check=True).stdout.split()


def start(lab: Lab, name: str, script: str, *options: str) -> None:
    script = f'echo "$ELASTICCTL_DISCOVER_HOSTS" > "$LAB/$ELASTICCTL_WORKER.discovery"; echo started $$; {script}'
    lab.start(name, "sh", "-c", script, options=(*ROLE, *options), LAB=str(lab.folder))


def start_all(lab: Lab, script: str, *names: str) -> None:
    lab.add(*names)
    for name in names:
        start(lab, name, script)


def started(lab: Lab, name: str) -> int:
    return lab.output(name).count("started ")


def test_the_program_keeps_running_while_workers_join_and_leave(lab: Lab) -> None:
    start_all(lab, UNTIL_DONE, "a-0", "a-1")
    lab.until(lambda: hosts(lab, "a-0") == ["a-0:1", "a-1:1"])
    start_all(lab, UNTIL_DONE, "a-2", "a-3")
    lab.until(lambda: hosts(lab, "a-0") == ["a-0:1", "a-1:1", "a-2:1", "a-3:1"])
    lab.kill("a-1")
    lab.until(lambda: hosts(lab, "a-0") == ["a-0:1", "a-2:1", "a-3:1"])
    lab.workers["a-2"].send_signal(signal.SIGTERM)
    assert lab.wait("a-2") == 128 + signal.SIGTERM
    lab.until(lambda: hosts(lab, "a-0") == ["a-0:1", "a-3:1"])

    (lab.folder / "done").touch()

    assert [lab.wait(name) for name in ("a-0", "a-3")] == [0, 0]
    assert [started(lab, name) for name in ("a-0", "a-3")] == [1, 0]
    assert lab.message("a-2")["verdict"] == "preempted"


def test_the_program_restarts_on_another_worker_when_the_first_is_lost(lab: Lab) -> None:
    start_all(lab, f"ssh a-1 'echo $$ > $LAB/remote; exec sleep 1000' & {UNTIL_DONE}", "a-0", "a-1")
    remote = lab.folder / "remote"
    lab.until(lambda: remote.exists() and remote.read_text().strip())
    pid = int(remote.read_text())

    lab.kill("a-0")

    lab.until(lambda: hosts(lab, "a-1") == ["a-1:1"])
    lab.until(lambda: has_ended(pid) or remote.read_text().strip() != str(pid))
    (lab.folder / "done").touch()
    assert lab.wait("a-1") == 0


def test_failures_use_up_the_backoff_limit(lab: Lab) -> None:
    lab.rules = GroupRules(limit=1)
    start_all(lab, "echo no such file >&2; exit 3", "a-0", "a-1")

    assert lab.wait("a-0") == 3

    assert started(lab, "a-0") == 2
    message = lab.message("a-0")
    assert {key: message[key] for key in ("verdict", "worker", "exitCode", "error", "generation")} == {
        "verdict": "application",
        "worker": "a-0",
        "exitCode": 3,
        "error": "no such file",
        "generation": 2,
    }
    assert "rank" not in message
    assert started(lab, "a-1") == 0


def test_a_refusal_by_the_service_is_a_failure(lab: Lab) -> None:
    (lab.folder / "wrong").write_text("wrong-token")
    lab.add("a-0")
    lab.start("a-0", "true", options=ROLE, ELASTICCTL_RDZV_TOKEN_FILE=str(lab.folder / "wrong"))

    assert lab.wait("a-0") == 1

    assert "wrong token" in str(lab.message("a-0")["error"])
    assert "Traceback" not in lab.output("a-0")


def test_sigterm_reaches_the_program(lab: Lab) -> None:
    start_all(lab, 'trap "touch $LAB/terminated; exit 0" TERM; echo ready; while true; do sleep 0.05; done', "a-0")
    lab.until(lambda: "ready" in lab.output("a-0"))

    lab.workers["a-0"].send_signal(signal.SIGTERM)

    assert lab.wait("a-0") == 128 + signal.SIGTERM
    assert (lab.folder / "terminated").exists()


@pytest.mark.needs("mpirun")
def test_mpirun_starts_connected_ranks_on_all_workers(lab: Lab) -> None:
    lab.add("a-0", "a-1", "a-2")
    for name in ("a-0", "a-1", "a-2"):
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        options = (*ROLE, "--nproc-per-node", "2")
        lab.start(name, "mpirun", sys.executable, "-c", SUM_OF_RANKS, options=options, **root)

    assert [lab.wait(name) for name in ("a-0", "a-1", "a-2")] == [0, 0, 0]

    said = sorted(line for line in lab.output("a-0").splitlines() if line.startswith("rank "))
    assert said == [f"rank {rank} on a-{rank // 2}: 15" for rank in range(6)]
