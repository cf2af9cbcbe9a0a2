"""Real launchers, a real rendezvous service and sharded training: all ranks are killed, then a node is lost."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from elasticctl.api.status import GroupGeneration
from tests.support.launcher_lab import Lab

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests/support/train/sharded_worker.py"


def newest(lab: Lab) -> GroupGeneration:
    return lab.site.service.view("default/job", "job-uid").generations[-1]


def are_copies_kept(lab: Lab, workers: int) -> bool:
    """True if the newest group has so many workers, trains, and keeps copies on two nodes if it can."""
    status = lab.site.service.view("default/job", "job-uid")
    if not status.generations:
        return False
    group = status.generations[-1]
    return len(group.workers) == workers and bool(group.copied_every_steps) and bool(group.copies_lack) == (workers < 2)


@pytest.mark.timeout(900)
def test_training_resumes_from_memory_after_all_ranks_and_a_node_are_lost(lab: Lab) -> None:
    lab.add("w0", "w1")
    for name in ("w0", "w1"):
        lab.start(name, sys.executable, str(SCRIPT), forks=True, LAB=str(lab.folder), PYTHONPATH=str(ROOT))
    lab.until(lambda: are_copies_kept(lab, 2))
    first = newest(lab)
    for file in lab.folder.glob("pid-*"):
        os.kill(int(file.name.rpartition("-")[2]), signal.SIGKILL)
    lab.until(lambda: newest(lab).generation > first.generation and are_copies_kept(lab, 2))
    second = newest(lab)
    assert second.resumed_from == "copies"
    assert (second.resumed_step or 0) > 0

    lab.kill("w1")
    lab.until(lambda: are_copies_kept(lab, 1))
    third = newest(lab)
    assert third.resumed_from == "copies"
    assert (third.resumed_step or 0) > (second.resumed_step or 0)
    assert not list((lab.folder / "checkpoints").glob("data/*/committed")), "nothing was stored"
    (lab.folder / "end").touch()
    assert lab.wait("w0") == 0
