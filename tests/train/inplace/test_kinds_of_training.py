"""Losses in many kinds of scripts: training continues exactly, or ranks restart, and nothing hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launcher_lab import Lab
from tests.support.train import ranks
from tests.support.train.unbroken_workers import BY_NUMBER, ENDLESS, EVERY_KIND, WITHOUT_LOADER, Workers


@pytest.mark.timeout(900)
def test_with_the_same_number_of_ranks_training_equals_an_uninterrupted_run(lab: Lab, another_lab: Lab) -> None:
    lab.minimum = 3
    faults = "after:0:w2 evaluation:4:w0 optimizer:7:w1"
    workers = Workers(lab, 3, 2, EVERY_KIND, FAULTS=faults, LOOP="one too many")
    disturbed = workers.finish()
    workers.check_samples()
    assert len(workers.ledger().pids) == 3 + len(faults.split()), "only lost ranks have restarted"
    losses = workers.ledger().losses()
    again = Workers(another_lab, 3, 2, EVERY_KIND)
    assert again.finish() == disturbed
    undisturbed = again.ledger().losses()
    assert losses == {key: undisturbed[key] for key in losses}


@pytest.mark.timeout(900)
def test_with_fewer_ranks_the_averages_are_those_of_the_global_batch(lab: Lab, tmp_path: Path) -> None:
    workers = Workers(lab, 3, 2, EVERY_KIND, NORM="Identity", FAULTS="forward:3:w1")
    steps, sums, settings, evaluated = workers.finish()
    workers.check_samples()
    alone = {"LAB": str(tmp_path), "EPOCHS": "2", "NORM": "Identity"}
    known = {"ELASTICCTL_WORKER": "alone", "ELASTICCTL_GENERATION": "0"}
    process = ranks.alone(ranks.run_script, EVERY_KIND, (), alone | known, "ignore")
    process.join()
    assert process.exitcode == 0
    wanted = json.loads(next(tmp_path.glob("end-*")).read_text())
    assert [steps, settings] == [wanted[0], wanted[2]]
    assert evaluated == pytest.approx(wanted[3], rel=1e-4)
    assert [part for pair in sums for part in pair] == pytest.approx(
        [part for pair in wanted[1] for part in pair], rel=1e-3, abs=1e-3
    )


@pytest.mark.timeout(900)
def test_a_loop_that_counts_batches_skips_none_after_a_repeated_step(lab: Lab) -> None:
    """A step of the first epoch is repeated in its middle, the last one of the second too; then a new worker joins."""
    workers = Workers(lab, 3, 3, LOOP="by hand", FAULTS="backward:4:w1 forward:19:w2", STEP_S="0.05")
    steps, *_ = workers.finish()
    workers.check_samples()
    assert steps == 30
    assert len(workers.ledger().pids) <= 5, "only lost ranks have restarted"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("habit", [{}, {"OWN_BATCHES": ""}])
def test_a_loop_that_counts_steps_makes_each_of_them_once(lab: Lab, another_lab: Lab, habit: dict[str, str]) -> None:
    """Ranks that have repeated a step count it twice, and those that have joined since do not."""
    lab.minimum = 3
    faults = "backward:4:w1 forward:13:w0"
    found = Workers(lab, 3, 0, BY_NUMBER, STEPS="15", FAULTS=faults, **habit).finish()
    assert found[0] == 15
    assert Workers(another_lab, 3, 0, BY_NUMBER, STEPS="15", **habit).finish() == found


@pytest.mark.timeout(900)
def test_a_decision_to_stop_in_a_lost_step_does_not_end_one_rank_alone(lab: Lab) -> None:
    lab.minimum = 3
    workers = Workers(lab, 3, 0, BY_NUMBER, STEPS="1000", STOP_AT="12", FAULTS="backward:12:w1")
    steps, *_ = workers.finish()
    assert steps >= 13


@pytest.mark.timeout(900)
def test_a_script_with_its_own_data_continues_exactly(lab: Lab, another_lab: Lab) -> None:
    """With a compiled model, and a collective in each step."""
    lab.minimum = 3
    script = {"STEPS": "12", "COMPILED": "1", "VERIFY_EVERY": "1"}
    faults = "backward:0:w1 optimizer:4:w2 backward:8:w0"
    disturbed = Workers(lab, 3, 0, WITHOUT_LOADER, FAULTS=faults, **script)
    found = disturbed.finish()
    assert len(disturbed.ledger().pids) <= 3 + 2, "only lost ranks, unless in their first step"
    assert Workers(another_lab, 3, 0, WITHOUT_LOADER, **script).finish() == found


@pytest.mark.timeout(900)
def test_irregular_collectives_of_a_script_with_its_own_data_restart_its_ranks(lab: Lab) -> None:
    """A new worker would make them in other steps than the other ranks."""
    workers = Workers(lab, 3, 0, WITHOUT_LOADER, STEPS="15", VERIFY_EVERY="2", FAULTS="optimizer:7:w1", STEP_S="0.1")
    assert {lab.wait(name) for name in workers.names} == {0}
    assert workers.ledger().furthest == 15
    assert len(workers.ledger().pids) > 4


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("habit", "faults"),
    [("twice", "between:7:w1"), ("metrics", "backward:4:w1 after:7:w2")],
    ids=["a loss between two steps of an optimizer", "collectives of the script in a lost step"],
)
def test_a_loss_within_a_step_ends_no_other_process(lab: Lab, habit: str, faults: str) -> None:
    workers = Workers(lab, 3, 2, EVERY_KIND, HABIT=habit, FAULTS=faults)
    steps, *_ = workers.finish()
    workers.check_samples()
    assert steps == 10
    assert len(workers.ledger().pids) <= 3 + len(faults.split()), "only lost ranks have restarted"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("habit", "point"),
    [
        ("late metrics", "after"),
        ("groups", "backward"),
        ("short-lived groups", "backward"),
        ("average", "forward"),
    ],
)
def test_unsupported_loops_lose_only_steps(lab: Lab, habit: str, point: str) -> None:
    """Collectives and groups of the script; an average of the weights that was not passed to the run."""
    workers = Workers(lab, 3, 2, EVERY_KIND, HABIT=habit, FAULTS=f"{point}:7:w1")
    steps, *_ = workers.finish()
    workers.check_samples()
    assert steps == 10
    generations = lab.site.service.view("default/job", "job-uid").generations
    ways = {item.resumed_from for item in generations}
    assert ways & {"storage", "copies"}, "ranks restart from the newer one"


@pytest.mark.timeout(900)
def test_all_ranks_restart_if_a_newcomer_counts_differently(lab: Lab) -> None:
    """A scheduler that is stepped by the script's own count: a new rank would train at other learning rates."""
    workers = Workers(lab, 2, ENDLESS, SCHEDULED="20", SAVE_EVERY="5", STEP_S="0.03")
    workers.begin(30)
    before = workers.ledger().pids
    workers.join("w2")
    lab.until(lambda: "the script uses its own count of steps" in lab.output("w0") + lab.output("w1"))
    again = {"w0", "w1"}
    lab.until(lambda: again <= {row["worker"] for row in workers.ledger().made if row["pid"] not in before})
    workers.end_soon()
    workers.finish()
    workers.check_samples()
