"""Hangs of real ranks, in scripts without the training library: detected, named, logged with stacks, and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from elasticctl.api.codec import from_json
from elasticctl.api.status import RankFailure
from elasticctl_controller.core.group.failures import GroupRules
from elasticctl_launcher.hangs.process_activity import read_activity
from elasticctl_launcher.hangs.rank_location import NOWHERE
from elasticctl_launcher.hangs.standstill import Sighting, moves
from tests.support.launcher_lab import Lab
from tests.support.waiting import wait_until

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
import time
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(1e6)

dist.init_process_group("gloo")
for batch in DataLoader(Samples(), num_workers=1):
    pass
"""
TIMEOUT_S = 3


def start(lab: Lab, name: str, script: str, *options: str, forks: bool = False) -> None:
    path = lab.folder / "script.py"
    path.write_text(script)
    lab.start(name, sys.executable, str(path), options=("--hang-timeout", str(TIMEOUT_S), *options), forks=forks)


def failure(lab: Lab, name: str) -> RankFailure:
    return from_json(RankFailure, lab.message(name))


def test_the_failure_names_the_rank_in_a_lock_and_the_ranks_that_wait(lab: Lab) -> None:
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
    assert log.count("the group hangs") == 2, "once more than its budget"
    assert "exit code 1: the group hangs" not in log, "no rank has ended"
    assert end.last_lines[-1].startswith("    stand ("), "the end of the stack is kept"


def test_only_the_worker_with_the_hanging_rank_is_blamed(lab: Lab) -> None:
    lab.rules = GroupRules(limit=0)
    lab.add("a-0", "a-1")
    for name in ("a-0", "a-1"):
        start(lab, name, LOCK, forks=True)
    assert lab.wait("a-1") == 1
    end = failure(lab, "a-1")
    assert (end.verdict, end.rank) == ("application", 1)
    assert "rank 1 has been in stand" in end.error
    assert lab.workers["a-0"].poll() is None, "its rank only waited"
    assert not (lab.folder / "a-0.end").exists()


def test_a_data_loader_that_never_returns_is_named(lab: Lab) -> None:
    lab.rules = GroupRules(limit=0)
    lab.add("a-0")
    start(lab, "a-0", LOADER)
    assert lab.wait("a-0") == 1
    assert "rank 0 has been in DataLoader._next_data for" in failure(lab, "a-0").error
    assert "Samples.__getitem__" in lab.output("a-0"), "the stack of the loader's own process is logged too"


def test_a_process_that_computes_silently_moves() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            before = Sighting(0.0, 0, wait_until(lambda: read_activity(child.pid)), None, NOWHERE)
            # On a busy machine, it takes a while to use enough of the CPU.
            wait_until(
                lambda: moves(before, replace(before, at_s=10.0, activity=read_activity(child.pid)), strict=False)
            )
        finally:
            child.kill()
    assert read_activity(child.pid) is None


def test_a_standstill_that_ends_by_itself_is_only_reported(lab: Lab) -> None:
    lab.add("a-0")
    os.mkfifo(lab.folder / "go")
    path = lab.folder / "script.py"
    path.write_text("import threading\nopen('go').read()\nprint('continued')\nthreading.Event().wait(2)\n")
    lab.start("a-0", sys.executable, str(path), options=("--hang-timeout", "16"))
    lab.until(lambda: "nothing has moved for" in lab.output("a-0"))
    (lab.folder / "go").write_text("")
    assert lab.wait("a-0") == 0
    reported, _, later = lab.output("a-0").partition("the ranks move again")
    assert "rank 0 has been in script.py:2 for" in reported
    assert later
