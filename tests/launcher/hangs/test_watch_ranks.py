"""Hangs of real ranks, in scripts that have nothing of ours in them: found, named, their stacks in the log, ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elasticctl.api.codec import from_json
from elasticctl.api.status import RankFailure
from elasticctl_controller.core.group.group_rules import GroupRules
from tests.support.launcher_lab import Lab

LOCK = """
def stand():
    lock = threading.Lock()
    with lock:
        lock.acquire()

import os, threading
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
if os.environ["RANK"] == "1":
    stand()
dist.all_reduce(x)
"""
LOADER = """
import os, time
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(1e6)

dist.init_process_group("gloo")
for batch in DataLoader(Samples(), num_workers=int(os.environ["WORKERS"])):
    pass
"""
BUSY = """
import zlib
block = bytes(300_000_000)
for _ in range(3):
    zlib.compress(block, 9)  # in C, and it lets other threads run: the stack stands still
print("done")
"""
IMPORTS = "import slow_to_come\n"
SLOW_TO_COME = "import threading\nthreading.Event().wait()\n"
TIMEOUT_S = 3


def start(lab: Lab, name: str, script: str, *options: str, **env: str) -> None:
    path = lab.folder / "script.py"
    path.write_text(script)
    lab.start(name, sys.executable, str(path), options=("--hang-timeout", str(TIMEOUT_S), *options), **env)


def failure(lab: Lab, name: str) -> RankFailure:
    return from_json(RankFailure, lab.message(name))


def test_a_rank_in_a_lock_is_named_and_the_others_wait_for_it(lab: Lab) -> None:
    lab.rules = GroupRules(limit=1)
    lab.add("a-0")
    start(lab, "a-0", LOCK, "--nproc-per-node", "2")
    assert lab.wait("a-0") == 1
    end = failure(lab, "a-0")
    assert (end.verdict, end.rank) == ("application", 1)
    assert "rank 1 has been in stand (script.py:5) for" in end.error, end.error
    assert end.error.endswith("rank 0 waits for it in all_reduce no. 2")
    log = lab.output("a-0")
    assert f"[rank1]     stand ({lab.folder}/script.py:5)" in log
    assert "[rank0]     all_reduce (" in log
    assert log.count("the group hangs") == 2, "it ends after its budget"
    assert "exit code 1: the group hangs" not in log, "no rank has ended"
    assert end.last_lines[-1].startswith("    stand ("), "what is shown of the lines is their end"


def test_across_workers_only_the_one_with_the_culprit_is_blamed(lab: Lab) -> None:
    lab.rules = GroupRules(limit=0)
    lab.add("a-0", "a-1")
    for name in ("a-0", "a-1"):
        start(lab, name, LOCK)
    assert lab.wait("a-1") == 1
    end = failure(lab, "a-1")
    assert (end.verdict, end.rank) == ("application", 1)
    assert "rank 1 has been in stand" in end.error
    assert lab.workers["a-0"].poll() is None, "its rank only waited"
    assert not (lab.folder / "a-0.end").exists()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_data_loader_that_sleeps_for_ever(lab: Lab, workers: str) -> None:
    lab.rules = GroupRules(limit=0)
    lab.add("a-0")
    start(lab, "a-0", LOADER, WORKERS=workers)
    assert lab.wait("a-0") == 1
    assert "rank 0 has been in DataLoader._next_data for" in failure(lab, "a-0").error
    assert "Samples.__getitem__" in lab.output("a-0"), "also where the loader's own process stands"


def test_a_hang_during_import(lab: Lab) -> None:
    lab.rules = GroupRules(limit=0)
    lab.add("a-0")
    Path(lab.folder, "slow_to_come.py").write_text(SLOW_TO_COME)
    start(lab, "a-0", IMPORTS, "--preload", "none")
    assert lab.wait("a-0") == 1
    assert "rank 0 has been in slow_to_come.py:2 for" in failure(lab, "a-0").error


def test_a_rank_that_is_at_work_and_says_nothing_is_left_alone(lab: Lab) -> None:
    lab.add("a-0")
    path = lab.folder / "script.py"
    path.write_text(BUSY)
    lab.start("a-0", sys.executable, str(path), options=("--hang-timeout", "1"))
    assert lab.wait("a-0") == 0
    assert "done" in lab.output("a-0")
    assert "is over" not in lab.output("a-0")


def test_a_standstill_that_ends_by_itself_is_told_and_ends_nothing(lab: Lab) -> None:
    lab.add("a-0")
    path = lab.folder / "script.py"
    path.write_text("import threading\nthreading.Event().wait(8)\nprint('on it goes')\nthreading.Event().wait(2)\n")
    lab.start("a-0", sys.executable, str(path), options=("--hang-timeout", "12"))
    assert lab.wait("a-0") == 0
    told, _, later = lab.output("a-0").partition("the ranks move again")
    assert "nothing has moved for" in told
    assert "rank 0 has been in script.py:2 for" in told
    assert later
