"""Real launchers and ranks whose network to the real service breaks: they continue to train, and no worker is blamed
for it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from tests.support.broken_network import BrokenNetwork, Link
from tests.support.launcher_lab import JOB_UID, KEY, Lab
from tests.support.processes import has_ended

pytestmark = pytest.mark.timeout(900)  # every worker imports torch, which takes long on a machine that is busy
TRAIN = """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
me, lab = os.environ["ELASTICCTL_WORKER"], os.environ["LAB"]
print(f"rank {dist.get_rank()} of {dist.get_world_size()} pid {os.getpid()}", flush=True)
step, over = 0, False
while not over:
    done = torch.tensor([float(os.path.exists(lab + "/done"))])
    dist.all_reduce(done)  # so that all of them stop at the same step
    step, over = step + 1, bool(done[0])
    with open(f"{lab}/steps-{me}", "a") as file:
        file.write("x")
    time.sleep(0.02)
"""
"""Ranks in step with each other, that report nothing."""
OUTAGE_S = 4.0
LONG_OUTAGE_S = 12.0
"""Longer than the service waits for a worker that gives no sign of life."""


class Training:
    """Workers of one job, each with a link of its own to the service."""

    def __init__(self, lab: Lab, network: BrokenNetwork, *names: str) -> None:
        self._lab, self._network = lab, network
        self.links: dict[str, Link] = {}
        lab.add(*names)
        for name in names:
            self.start(name)
        self.until_step()

    def start(self, name: str) -> None:
        """Start the launcher of a worker that the service knows."""
        link = self.links[name] = self._network.link(name, self._lab.site.address)
        place = {"LAB": str(self._lab.folder), "ELASTICCTL_RDZV_ENDPOINT": f"http://{link.address}"}
        script = self._lab.folder / "train.py"
        script.write_text(TRAIN)
        self._lab.start(name, sys.executable, str(script), options=("--stop-grace", "1"), forks=True, **place)

    def ranks(self, name: str) -> list[tuple[int, int]]:
        """The (world size, pid) of each rank that this worker has started so far."""
        found = re.findall(r"rank \d+ of (\d+) pid (\d+)", self._lab.output(name))
        return [(int(size), int(pid)) for size, pid in found]

    def steps(self) -> int:
        """How many steps have been made, by any worker's count."""
        return max((file.stat().st_size for file in self._lab.folder.glob("steps-*")), default=0)

    def until_step(self) -> None:
        """Wait until some more steps have been made."""
        before = self.steps()
        self._lab.until(lambda: self.steps() > before + 3)

    def until_size(self, size: int, *names: str) -> None:
        """Wait until these workers' newest ranks are in a group of this size, and train."""
        self._lab.until(lambda: all(self.ranks(name)[-1][0] == size for name in names))
        self.until_step()

    def finish(self, *names: str) -> None:
        """Let the training end; the launchers of these workers must succeed."""
        (self._lab.folder / "done").touch()
        assert [self._lab.wait(name) for name in names] == [0] * len(names)

    @property
    def failures(self) -> int:
        return self._lab.site.service.groups.by_key[KEY].failures.count

    @property
    def silent(self) -> frozenset[str]:
        return self._lab.site.service.view(KEY, JOB_UID).silent


def break_link(link: Link, how: str) -> None:
    {"cut": link.cut, "swallow": link.swallow, "hold": link.hold, "reset": link.reset}[how]()


def test_training_continues_without_the_service_on_the_same_ranks(lab: Lab, network: BrokenNetwork) -> None:
    training = Training(lab, network, "a-0", "a-1")
    before = {name: training.ranks(name) for name in training.links}
    for how in ("cut", "swallow", "hold", "reset"):
        for link in training.links.values():
            break_link(link, how)
        ends = time.monotonic() + OUTAGE_S
        while time.monotonic() < ends:
            training.until_step()
        for link in training.links.values():
            link.repair()
    training.until_step()
    assert {name: training.ranks(name) for name in training.links} == before
    training.finish("a-0", "a-1")
    assert {name: training.ranks(name) for name in training.links} == before
    assert (training.failures, training.silent) == (0, frozenset())


def test_a_training_that_ends_without_the_service_succeeds_when_it_is_back(lab: Lab, network: BrokenNetwork) -> None:
    training = Training(lab, network, "a-0", "a-1")
    for link in training.links.values():
        link.swallow()
    (lab.folder / "done").touch()
    lab.until(lambda: all(has_ended(training.ranks(name)[-1][1]) for name in training.links))
    time.sleep(OUTAGE_S)
    assert all(lab.workers[name].poll() is None for name in training.links)
    for link in training.links.values():
        link.repair()
    training.finish("a-0", "a-1")
    assert [len(training.ranks(name)) for name in training.links] == [1, 1]


def test_a_rank_that_is_killed_without_the_service_is_the_one_that_is_blamed(lab: Lab, network: BrokenNetwork) -> None:
    """Though the other is heard of first."""
    training = Training(lab, network, "a-0", "a-1")
    for link in training.links.values():
        link.swallow()
    pid = training.ranks("a-1")[-1][1]
    os.kill(pid, signal.SIGKILL)
    time.sleep(OUTAGE_S)
    training.links["a-0"].repair()
    time.sleep(2.0)
    for link in training.links.values():
        link.repair()
    lab.until(lambda: all(len(training.ranks(name)) == 2 for name in training.links))
    training.until_size(2, "a-0", "a-1")
    assert (training.failures, training.silent) == (1, frozenset())
    (failure,) = [item.failure for item in lab.site.service.view(KEY, JOB_UID).generations if item.failure]
    assert (failure.worker, failure.signal) == ("a-1", "SIGKILL")
    training.finish("a-0", "a-1")


def test_a_slow_link_is_waited_for(lab: Lab, network: BrokenNetwork) -> None:
    training = Training(lab, network, "a-0", "a-1", "a-2")
    training.links["a-1"].slow(2000, 500)
    lab.kill("a-2")
    training.until_size(2, "a-0", "a-1")
    time.sleep(LONG_OUTAGE_S)
    assert (training.failures, training.silent) == (0, frozenset())
    assert [len(training.ranks(name)) for name in ("a-0", "a-1")] == [2, 2]
    training.finish("a-0", "a-1")


def test_a_worker_that_is_unreachable_for_long_comes_back_as_a_newcomer(lab: Lab, network: BrokenNetwork) -> None:
    training = Training(lab, network, "a-0", "a-1", "a-2")
    training.links["a-1"].hold()
    lab.kill("a-2")
    training.until_size(1, "a-0")
    training.links["a-1"].repair()
    training.until_size(2, "a-0", "a-1")
    assert (training.failures, training.silent) == (0, frozenset())
    training.finish("a-0", "a-1")
