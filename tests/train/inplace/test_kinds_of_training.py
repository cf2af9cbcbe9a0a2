"""What scripts do besides the four lines: a loss leaves no trace in it, or ranks restart, and nothing hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launcher_lab import Lab
from tests.support.train import ranks
from tests.support.train.unbroken_workers import BY_NUMBER, ENDLESS, EVERY_KIND, WITHOUT_LOADER, Workers


@pytest.mark.timeout(900)
def test_with_as_many_ranks_all_is_as_if_nothing_had_happened(lab: Lab, another_lab: Lab) -> None:
    lab.minimum = 3
    faults = "after:0:w2 evaluation:4:w0 optimizer:7:w1"
    workers = Workers(lab, 3, 2, EVERY_KIND, FAULTS=faults, LOOP="one too many")
    disturbed = workers.finish()
    workers.check_samples()
    assert len(workers.ledger().pids) == 3 + len(faults.split()), "only those that were lost have restarted"
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
def test_a_loop_that_counts_its_batches_misses_none_after_a_step_was_repeated(lab: Lab) -> None:
    """A step of the first epoch is repeated in its middle, its last one in the second; then a new worker joins."""
    workers = Workers(lab, 3, 3, LOOP="by hand", FAULTS="backward:4:w1 forward:19:w2", STEP_S="0.05")
    steps, *_ = workers.finish()
    workers.check_samples()
    assert steps == 30
    assert len(workers.ledger().pids) <= 5, "only those that were lost have restarted"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("habit", [{}, {"OWN_BATCHES": ""}])
def test_a_loop_that_counts_steps_itself_makes_each_of_them_once(
    lab: Lab, another_lab: Lab, habit: dict[str, str]
) -> None:
    """Ranks that have repeated a step count it twice, those that have joined since do not."""
    lab.minimum = 3
    faults = "backward:4:w1 forward:13:w0"
    found = Workers(lab, 3, 0, BY_NUMBER, STEPS="15", FAULTS=faults, **habit).finish()
    assert found[0] == 15
    assert Workers(another_lab, 3, 0, BY_NUMBER, STEPS="15", **habit).finish() == found


@pytest.mark.timeout(900)
def test_a_decision_to_stop_in_a_step_that_is_lost_ends_no_rank_alone(lab: Lab) -> None:
    lab.minimum = 3
    workers = Workers(lab, 3, 0, BY_NUMBER, STEPS="1000", STOP_AT="12", FAULTS="backward:12:w1")
    steps, *_ = workers.finish()
    assert steps >= 13


@pytest.mark.timeout(900)
def test_a_script_that_makes_its_data_itself_goes_on_as_if_nothing_had_happened(lab: Lab, another_lab: Lab) -> None:
    """With a compiled model, and a collective in each step."""
    lab.minimum = 3
    script = {"STEPS": "12", "COMPILED": "1", "VERIFY_EVERY": "1"}
    faults = "backward:0:w1 optimizer:4:w2 backward:8:w0"
    disturbed = Workers(lab, 3, 0, WITHOUT_LOADER, FAULTS=faults, **script)
    found = disturbed.finish()
    assert len(disturbed.ledger().pids) <= 3 + 2, "only those that were lost, unless in their first step"
    assert Workers(another_lab, 3, 0, WITHOUT_LOADER, **script).finish() == found


@pytest.mark.timeout(900)
def test_collectives_in_some_steps_of_a_script_that_makes_its_data_itself_restart_its_ranks(lab: Lab) -> None:
    """A new worker would make them in other steps than the rest."""
    workers = Workers(lab, 3, 0, WITHOUT_LOADER, STEPS="15", VERIFY_EVERY="2", FAULTS="optimizer:7:w1", STEP_S="0.1")
    assert {lab.wait(name) for name in workers.names} == {0}
    assert workers.ledger().furthest == 15
    assert len(workers.ledger().pids) > 4


@pytest.mark.timeout(900)
def test_a_loss_between_two_steps_of_an_optimizer_undoes_the_first(lab: Lab) -> None:
    workers = Workers(lab, 3, 2, EVERY_KIND, HABIT="twice", FAULTS="between:7:w1")
    steps, *_ = workers.finish()
    workers.check_samples()
    assert steps == 10
    assert len(workers.ledger().pids) <= 4, "only the one that was lost has restarted"


@pytest.mark.timeout(900)
def test_collectives_of_the_scripts_own_in_a_lost_step_end_no_process(lab: Lab) -> None:
    workers = Workers(lab, 3, 2, EVERY_KIND, HABIT="metrics", FAULTS="backward:4:w1 after:7:w2")
    steps, *_ = workers.finish()
    workers.check_samples()
    assert steps == 10
    assert len(workers.ledger().pids) <= 5, "only those that were lost have restarted"


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
def test_habits_that_keep_no_process_lose_no_more_than_steps(lab: Lab, habit: str, point: str) -> None:
    """Collectives, and groups, of the script's own; an average of the weights that the run was not given."""
    workers = Workers(lab, 3, 2, EVERY_KIND, HABIT=habit, FAULTS=f"{point}:7:w1")
    steps, *_ = workers.finish()
    workers.check_samples()
    assert steps == 10
    generations = lab.site.service.view("default/job", "job-uid").generations
    ways = {item.resumed_from for item in generations}
    assert ways & {"storage", "copies"}, "ranks restart, from whatever is newer"


@pytest.mark.timeout(900)
def test_all_ranks_restart_when_a_new_one_counts_differently(lab: Lab) -> None:
    """A scheduler that is stepped by the script's own count: a new rank would train at other learning rates."""
    workers = Workers(lab, 2, ENDLESS, SCHEDULED="20", SAVE_EVERY="5", STEP_S="0.03")
    workers.begin(30)
    before = workers.ledger().pids
    workers.join("w2")
    lab.until(lambda: "the script goes by a count of its own" in lab.output("w0") + lab.output("w1"))
    again = {"w0", "w1"}
    lab.until(lambda: again <= {row["worker"] for row in workers.ledger().made if row["pid"] not in before})
    workers.end_soon()
    workers.finish()
    workers.check_samples()
