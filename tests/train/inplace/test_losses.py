"""Real launchers and ranks, and a peer lost at each point of a step: no step is lost, and no survivor restarts."""

from __future__ import annotations

import random
import signal
import time

import pytest

from elasticctl_controller.core.group.failures import GroupRules
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from tests.support.launcher_lab import Lab
from tests.support.train.unbroken_workers import ENDLESS, IN_STAGES, Workers, lose_at_random
from tests.support.vanish import come_back, vanish

POINTS = ("forward", "backward", "optimizer", "after", "step")


@pytest.mark.timeout(900)
def test_the_others_continue_wherever_a_rank_dies(lab: Lab) -> None:
    """Each process of two workers, one of which is rank 0 at first, dies at the next point, until one outlives them."""
    lab.rules = GroupRules(limit=ENDLESS)
    deaths = [(point, when, victim) for point in POINTS for when, victim in (("+5", "w0"), ("+8", "w1"))]
    workers = Workers(lab, 3, ENDLESS, FAULTS=" ".join(map(":".join, deaths)), STEP_S="0.05")
    for death in deaths:
        lab.until((lab.folder / f"struck-{'-'.join(death)}").exists)
    workers.end_soon()
    workers.finish()
    workers.check_samples()
    ledger = workers.ledger()
    assert ledger.redone() == 0
    assert len(ledger.pids) <= 3 + len(deaths), "only lost ranks restarted"


def test_a_lost_machine_is_replaced(lab: Lab) -> None:
    workers = Workers(lab, 3, ENDLESS, SCRIPT_SLOW_S="1", STEP_S="0.03")
    workers.begin(10)
    formed = len(lab.site.service.view("default/job", "job-uid").generations)
    workers.lose("w1")
    lab.until(lambda: any(row["of"] == 2 for row in workers.ledger().made))
    pair = max(row["group"] for row in workers.ledger().made if row["of"] == 2)
    workers.join("w3")
    lab.until(lambda: any(row["of"] == 3 and row["group"] > pair for row in workers.ledger().made))
    workers.end_soon()
    workers.finish()
    workers.check_samples()
    assert len(workers.ledger().pids) == 4
    status = lab.site.service.view("default/job", "job-uid")
    assert {item.resumed_from for item in status.generations[formed:]} == {"memory"}
    assert all(item.stays for item in status.generations)


@pytest.mark.needs("root")  # to make the sockets of another process drop packets
def test_a_machine_that_vanishes_silently_is_left_out_and_returns_as_a_newcomer(lab: Lab) -> None:
    endpoint = f"http://{lab.site.address}"
    workers = Workers(lab, 3, ENDLESS, STEP_S="0.02", ELASTICCTL_RDZV_ENDPOINT=endpoint)
    workers.begin(100)  # until the duration of a step is known
    pids = vanish(lab.workers["w1"].pid)
    gone = time.time()
    lab.until(lambda: any(row["of"] == 2 for row in workers.ledger().made))
    back_at = min(row["at"] for row in workers.ledger().made if row["of"] == 2)
    print(f"without it after {back_at - gone:.2f} s")
    come_back(pids)
    lab.until(lambda: any(row["of"] == 3 and row["at"] > back_at for row in workers.ledger().made))
    workers.end_soon()
    workers.finish()
    workers.check_samples()
    assert len(workers.ledger().pids) <= 4, "at most its own rank restarted"
    view = lab.site.service.view("default/job", "job-uid")
    assert [item.reason for item in view.generations[1:2]] == ["cannot reach w1"]
    assert all(item.failure is None for item in view.generations), "no worker is blamed"
    assert {item.resumed_from for item in view.generations[1:]} == {"memory"}


def test_a_script_whose_collectives_depend_on_the_number_of_ranks_hangs_twice(lab: Lab) -> None:
    """The new rank waits in the script's barrier, which the others, in the middle of an epoch, do not reach."""
    lab.rules = GroupRules(limit=ENDLESS)  # on a busy machine, the group hangs more often
    workers = Workers(lab, 2, ENDLESS, options=("--hang-timeout", "2"), MEET="2", SAVE_EVERY="5", STEP_S="0.05")
    workers.begin(12)
    workers.join("new")
    lab.until(lambda: any(row["of"] == 3 for row in workers.ledger().made))
    workers.end_soon()
    workers.finish()
    workers.check_samples()
    assert all("the group has hung twice" in lab.output(name) for name in ("w0", "w1"))


def test_a_worker_that_leaves_loses_no_step(lab: Lab) -> None:
    workers = Workers(lab, 3, ENDLESS, STEP_S="0.02")
    workers.begin(10)
    lab.workers["w2"].send_signal(signal.SIGTERM)
    assert lab.wait("w2") == 143
    workers.names.remove("w2")
    workers.end_soon()
    workers.finish()
    workers.check_samples()
    assert len(workers.ledger().pids) == 3
    assert all(row["made"] for row in workers.ledger().rows if "jump" in row), "no step was lost"


def test_a_replacement_after_the_last_step_takes_part_in_the_last_save(lab: Lab) -> None:
    """It has never called the model, and the state that it received is not stored yet."""
    lab.minimum = 2
    workers = Workers(lab, 2, 1, FAULTS="evaluation:10:w1")
    steps, *_ = workers.finish()
    assert steps == 10
    assert [commit.step for commit in read_commits(LocalStorage(lab.folder / "ckpt"))] == [10]


def test_a_script_may_call_run_step_for_each_batch_whose_gradient_it_accumulates(lab: Lab) -> None:
    """A new rank, which counts batches from 0, would otherwise step its optimizer at other times than the others."""
    workers = Workers(lab, 3, 6, FAULTS="forward:5:w2 backward:11:w0", ACCUMULATE="4", STEP_EACH="1", SAVE_EVERY="3")
    steps, *_ = workers.finish()
    workers.check_samples()
    assert steps == 60
    assert len(workers.ledger().pids) <= 5


def test_the_smaller_last_step_of_an_epoch_is_repeated(lab: Lab) -> None:
    """The script counts batches to know when to make a step: of six batches, and of the remaining four."""
    lab.minimum = 3
    workers = Workers(lab, 3, 4, FAULTS="backward:2:w0 forward:5:w1", ACCUMULATE="6")
    steps, *_ = workers.finish()
    workers.check_samples()
    assert steps == 8
    generations = lab.site.service.view("default/job", "job-uid").generations
    assert generations[1].resumed_from == "memory", "a step of six batches starts again from its first one"


def test_simultaneous_losses_and_one_while_the_group_forms(lab: Lab) -> None:
    workers = Workers(lab, 4, ENDLESS, STEP_S="0.02")
    workers.begin(10)
    workers.lose("w1")
    workers.lose("w0")
    workers.train_to(workers.ledger().furthest + 10)
    assert len(workers.ledger().pids) == 4
    for name in ("w4", "w5"):
        workers.join(name)
    lab.until(lambda: any(row["of"] == 4 and row["step"] > 20 for row in workers.ledger().made))
    workers.lose("w2")
    time.sleep(0.05)
    workers.lose("w4")
    workers.train_to(workers.ledger().furthest + 20)
    workers.end_soon()
    workers.finish()
    workers.check_samples()
    assert len(workers.ledger().pids) == 6


@pytest.mark.seeds(1, search=5)
@pytest.mark.timeout(900)
def test_losses_at_random(lab: Lab, seed: int) -> None:
    lose_at_random(lab, random.Random(seed), losses=4, largest=4)


@pytest.mark.parametrize("stays", ["1", "0"])
def test_several_consecutive_runs_train_as_without_losses(lab: Lab, stays: str) -> None:
    """Each has a group of its own, all in one generation; after a loss, the last run resumes from its checkpoint."""
    workers = Workers(lab, 2, 1, IN_STAGES, STAYS=stays)
    for stage in (0, 1):
        lab.until((lab.folder / f"at-{stage}-5-2").exists)
        (lab.folder / f"go-on-{stage}").touch()
    lab.until((lab.folder / "at-2-5-2").exists)
    assert len(lab.site.service.view("default/job", "job-uid").generations) == 1
    workers.lose("w0")
    (lab.folder / "go-on-2").touch()
    assert lab.wait("w1") == 0
    assert sorted(path.name for path in lab.folder.glob("end-2-*")) == ["end-2-0-10"]
