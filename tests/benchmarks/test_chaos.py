"""Chaos: a job that everything happens to loses nothing; and the proof of that finds what is wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import main
from benchmarks.faults.checks import Record, Resume, Step, Task, differing_weights, lost_commits, misused_samples
from benchmarks.faults.inject import SHARES
from elasticctl_store.checkpoints.entries import Commit, Entry, Generation, ObjectRef
from elasticctl_train.data.sample_order import EpochPlan, slice_of

ROOT = Path(__file__).parents[2]
TASK = Task(samples=10, global_batch=4, epochs=2)
PER_EPOCH = 3


def commit(position: int, generation: int, step: int) -> Commit:
    return Commit(position, generation, position, step, 0, (ObjectRef("data/x/share", 1, ""),), 1)


def trained(generation: int, world: int, steps: range) -> list[Step]:
    """What the ranks of a generation record when all is well; a step takes a second."""
    found = []
    for step in steps:
        epoch, batch = divmod(step - 1, PER_EPOCH)
        plan = EpochPlan(TASK.samples, TASK.global_batch, shuffle=True, seed=1, epoch=epoch)
        order, positions = plan.order(), list(plan.batches(0))[batch]
        for rank in range(world):
            samples = tuple(int(order[n]) for n in slice_of(positions, rank, world))
            found.append(Step(generation * 100.0 + step, rank, world, generation, step, epoch, samples))
    return found


def begun(generation: int, world: int, step: int) -> list[Resume]:
    return [Resume(generation * 100.0, 7, "w", rank, world, generation, step) for rank in range(world)]


JOURNAL: list[Entry] = [
    Generation(1, 1, "a"),
    commit(2, 1, 2),
    Generation(3, 2, "b"),  # never got as far as a step
    Generation(4, 3, "c"),
    commit(5, 3, 4),
    commit(6, 3, 6),
]


def history() -> Record:
    """Two ranks do 4 steps of which 2 are committed; one rank goes on from there."""
    steps = trained(1, 2, range(1, 5)) + trained(3, 1, range(3, 7))
    return Record(begun(1, 2, 0) + begun(3, 1, 2), steps, [[0.5, -1.0]])


def test_a_history_without_fault_is_proven() -> None:
    assert lost_commits(JOURNAL, history(), [(150.0, 2), (310.0, 4)]) == []
    assert misused_samples(JOURNAL, history(), TASK) == []
    assert differing_weights(history(), history())[0] == []


def test_a_commit_that_was_passed_over_is_found() -> None:
    record = history()
    record.resumes[2] = replace(record.resumes[2], step=0)
    assert lost_commits(JOURNAL, record, []) == ["rank 0 of generation 3 began at 0, not 2"]


def test_a_copy_in_memory_may_be_newer_than_the_commit_but_not_than_what_was_trained() -> None:
    record = history()
    record.resumes[2] = replace(record.resumes[2], step=4)
    assert lost_commits(JOURNAL, record, []) == []
    record.resumes[2] = replace(record.resumes[2], step=5)
    assert lost_commits(JOURNAL, record, []) == ["rank 0 of generation 3 began at 5, not 2"]


def test_a_commit_that_has_vanished_is_found_by_who_saw_it() -> None:
    assert lost_commits(JOURNAL, history(), [(150.0, 3)]) == ["step 3 was committed, but generation 3 began at 2"]


def test_an_end_that_was_not_committed_is_found() -> None:
    assert misused_samples(JOURNAL[:-1], history(), TASK)[0] == "the last commit is of step 4, the end is 6"
    assert misused_samples([], Record(), TASK)


def test_a_step_that_a_rank_did_not_do_or_did_twice_is_found() -> None:
    record = history()
    missing = [step for step in record.steps if (step.generation, step.step, step.rank) != (1, 2, 1)]
    faults = misused_samples(JOURNAL, replace_steps(record, missing), TASK)
    assert faults[0] == "step 2 of generation 1 was not recorded once by every rank"
    assert "missed" in faults[1]
    assert misused_samples(JOURNAL, replace_steps(record, [*record.steps, record.steps[0]]), TASK)


def test_a_rank_that_is_killed_once_the_others_have_its_gradients_has_contributed() -> None:
    record = history()
    left = [step for step in record.steps if (step.generation, step.step, step.rank) != (1, 2, 1)]
    killed = replace_steps(record, left)
    killed.batches = list(record.steps)
    assert misused_samples(JOURNAL, killed, TASK) == []
    killed.batches = [replace(batch, generation=batch.generation + 1) for batch in record.steps]
    assert misused_samples(JOURNAL, killed, TASK)[0] == "step 2 of generation 1 was not recorded once by every rank"


def test_steps_that_were_undone_do_not_count() -> None:
    record = history()
    undone = [step for step in record.steps if not (step.generation == 1 and step.step > 2)]
    assert misused_samples(JOURNAL, replace_steps(record, undone), TASK) == []


def test_a_sample_that_is_used_for_another_is_found() -> None:
    record = history()
    first, other = record.steps[0], record.steps[2]
    record.steps[0] = replace(first, samples=(other.samples[0], *first.samples[1:]))
    (fault,) = misused_samples(JOURNAL, record, TASK)
    assert fault == f"epoch 0: samples {[first.samples[0]]} missed, {[other.samples[0]]} used again"


@pytest.mark.parametrize(
    ("mine", "same_size", "proven"),
    [
        ([0.5, -1.0], True, True),
        ([0.5, math.nextafter(-1.0, 0)], True, False),
        ([0.5, math.nextafter(-1.0, 0)], False, True),
        ([0.5, -1.001], False, False),
        ([math.nan, -1.0], False, False),
        ([-1.0, math.nan], False, False),
    ],
)
def test_weights_must_be_equal_or_close(mine: list[float], same_size: bool, proven: bool) -> None:
    record = Record(begun(1, 2, 0), trained(1, 2, range(1, 7)), [mine])
    world = 2 if same_size else 3
    undisturbed = Record(begun(1, world, 0), trained(1, world, range(1, 7)), [[0.5, -1.0]])
    assert (differing_weights(record, undisturbed)[0] == []) is proven


def test_weights_that_were_never_reached_are_missed() -> None:
    assert differing_weights(Record(), history())[0] == ["a run left no final weights"]


def replace_steps(record: Record, steps: list[Step]) -> Record:
    return Record(record.resumes, steps, record.weights)


def chaos(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run the tool; it must prove everything."""
    found = tmp_path / "chaos.json"
    argv = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *options, "--json", str(found)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(found.read_text())
    return result


@pytest.mark.timeout(1200)
def test_a_job_that_everything_happens_to_loses_nothing(tmp_path: Path) -> None:
    result = chaos(tmp_path, "--events", "9", "--workers", "2", "--seed", "89")  # its first seven are of seven kinds
    assert not any(result["proofs"].values())
    assert {event["kind"] for event in result["events"]} == set(SHARES)


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("forked_workers")
def test_a_group_of_fixed_size_ends_with_the_very_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "chaos.json"
    options = ("--events", "2", "--workers", "2", "--fixed-size", "--seed", "6", "--json", str(found))
    assert main(options) == 0, capsys.readouterr()
    assert any("equal, world size 2" in what for what in json.loads(found.read_text())["proofs"])
