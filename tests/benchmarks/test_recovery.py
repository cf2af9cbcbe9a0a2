"""The benchmarks' own reckoning: what they say of recorded steps, and that they end what they start."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

import numpy
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import processes, recovery, rendezvous, results
from benchmarks.recoveries import phases
from benchmarks.recoveries.contenders import AgentsJob, Contender, Job, Trial
from benchmarks.recoveries.scenarios import Scenario, kill
from benchmarks.recoveries.timeline import Expected, Outcome, Step, current_group, outcome, parse
from benchmarks.recoveries.trials import StepsFile, is_over, is_steady, run_trial, survived
from benchmarks.results import Measurement, Spread, percentile, summarise
from elasticctl.api.codec import to_rfc3339
from tests.support.processes import has_ended
from tests.support.waiting import wait_until

WHOLE = Expected(world=3)


def group(name: str, began: float, first: int, last: int, world: int = 3, each_s: float = 0.1) -> list[Step]:
    """The steps `first` to `last` of a group whose first step was taken at `began`."""
    return [
        Step(began + (number - first) * each_s, rank, world, number, name, 100 * world + rank)
        for number in range(first, last + 1)
        for rank in range(world)
    ]


# What the steps say.


def test_a_loss_is_over_with_the_first_step_of_a_group_that_was_not_there_before() -> None:
    steps = group("a", 10.0, 1, 50) + group("b", 17.0, 41, 60, world=2) + group("c", 20.0, 61, 90)
    found = outcome(steps, 15.0, WHOLE)
    assert found.first_step_s == pytest.approx(2.0)
    assert found.standstill_s == pytest.approx(17.0 - 14.9)
    assert found.whole_s == pytest.approx(5.0)
    assert found.steps_redone == 10
    assert found.last_step_s == pytest.approx(7.9)


def test_steps_of_the_old_group_after_the_event_do_not_count_as_recovery() -> None:
    found = outcome(group("a", 10.0, 1, 100), 15.0, WHOLE)
    assert (found.first_step_s, found.whole_s, found.standstill_s, found.steps_redone) == (None, None, None, 0)
    assert not survived(found, watched_s=60.0)


def test_only_the_wanted_size_ends_a_scaling() -> None:
    steps = group("a", 10.0, 1, 50, world=2) + group("b", 16.0, 51, 55, world=2) + group("c", 18.0, 56, 70)
    found = outcome(steps, 15.0, Expected(world=3, smaller_counts=False))
    assert found.first_step_s == found.whole_s == pytest.approx(3.0)
    assert outcome(steps, 15.0, WHOLE).first_step_s == pytest.approx(1.0)


def test_steps_done_again_are_summed_over_all_reformings_since_the_event() -> None:
    before = group("early", 1.0, 1, 30) + group("a", 10.0, 21, 50)  # what was redone before is not the event's doing
    steps = before + group("b", 20.0, 48, 60, world=2) + group("c", 30.0, 56, 90)
    assert outcome(steps, 15.0, WHOLE).steps_redone == 3 + 5


def with_samples(steps: list[Step]) -> list[Step]:
    """Each rank trains on two samples of 24 in each step, for three ranks; the epoch has four steps."""
    return [
        replace(
            each,
            epoch=(each.step - 1) // 4,
            samples=tuple((each.step - 1) % 4 * 6 + number for number in range(6) if number % each.world == each.rank),
        )
        for each in steps
    ]


def test_samples_are_counted_in_the_last_group_that_made_their_step() -> None:
    before, after = group("a", 10.0, 1, 6), group("b", 20.0, 6, 12, world=2)
    after = [replace(step, pid=step.pid + 100) for step in after]  # 300 and 301, two of those before
    found = outcome(with_samples(before + after), 15.0, WHOLE)
    assert (found.samples_lost, found.samples_doubled) == (0, 0)
    assert (found.steps_redone, found.processes_new) == (1, 0)
    assert found.step_s == pytest.approx(0.1)
    assert outcome(with_samples(before + after[:4]), 15.0, WHOLE).samples_lost is None, "the epoch has not ended"


def test_samples_of_a_step_that_was_skipped_are_lost_and_those_drawn_again_doubled() -> None:
    steps = with_samples(group("a", 10.0, 1, 6) + group("b", 20.0, 7, 12))
    skipped = [step for step in steps if step.step != 7]
    assert outcome(skipped, 15.0, WHOLE).samples_lost == 6
    again = [replace(step, samples=(0, 1)) if step.step == 7 and step.rank == 0 else step for step in steps]
    assert outcome(again, 15.0, WHOLE).samples_lost == 2
    assert outcome(again, 15.0, WHOLE).samples_doubled == 2, "0 and 1 of the epoch's first step"


def test_who_was_killed_before_it_wrote_its_last_step_down_has_made_it() -> None:
    steps = with_samples(group("a", 10.0, 1, 6) + group("b", 20.0, 7, 12))
    unwritten = [step for step in steps if (step.step, step.rank) != (6, 1)]
    assert outcome(unwritten, 15.0, WHOLE).samples_lost == 0


def test_a_group_that_goes_on_where_the_last_one_stopped_redoes_nothing() -> None:
    assert outcome(group("a", 10.0, 1, 50) + group("b", 20.0, 51, 60), 15.0, WHOLE).steps_redone == 0


def test_a_line_that_was_cut_off_is_left_out() -> None:
    step = Step(1.5, 0, 2, 7, "a", 42)
    line = json.dumps(asdict(step))
    assert parse(f"{line}\n{line[:20]}") == [step]
    assert parse("") == []


def test_the_current_group_is_the_youngest() -> None:
    steps = group("b", 20.0, 1, 5) + group("a", 10.0, 1, 500)
    assert {step.group for step in current_group(steps)} == {"b"}
    assert current_group([]) == []


def test_a_job_is_steady_once_it_has_trained_for_a_while_and_still_does() -> None:
    steps = group("a", 10.0, 1, 50)
    assert is_steady(steps, 3, now=15.0, settle_s=4.0)
    assert not is_steady(steps, 3, now=15.0, settle_s=6.0)
    assert not is_steady(steps, 2, now=15.0, settle_s=4.0)
    assert not is_steady(steps, 3, now=30.0, settle_s=4.0)
    assert not is_steady([], 3, now=15.0, settle_s=4.0)


def test_a_job_that_is_whole_is_watched_a_little_longer() -> None:
    assert not is_over(Outcome(first_step_s=1.0, whole_s=2.0, last_step_s=2.5, samples_lost=0))
    assert is_over(Outcome(first_step_s=1.0, whole_s=2.0, last_step_s=3.1, samples_lost=0))
    assert not is_over(Outcome(first_step_s=1.0, whole_s=2.0, last_step_s=3.1)), "the epoch has not ended"
    assert not is_over(Outcome(first_step_s=1.0, last_step_s=30.0))


def test_a_job_that_stepped_once_and_died_has_not_survived() -> None:
    assert not survived(Outcome(first_step_s=1.0, last_step_s=2.0), watched_s=60.0)
    assert survived(Outcome(first_step_s=1.0, last_step_s=58.0), watched_s=60.0)


def test_the_steps_file_is_read_as_it_grows(tmp_path: Path) -> None:
    file = StepsFile(tmp_path / "steps.jsonl")
    assert file.read() == []
    first, second = group("a", 1.0, 1, 2, world=1)
    whole = json.dumps(asdict(first)) + "\n"
    rest = json.dumps(asdict(second)) + "\n"
    with (tmp_path / "steps.jsonl").open("a") as writer:
        writer.write(whole + rest[:10])
        writer.flush()
        assert file.read() == [first]
        writer.write(rest[10:])
        writer.flush()
        assert file.read() == [first, second]


# What is said of many measurements.


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], fraction: float) -> None:
    assert percentile(sorted(values), fraction) == pytest.approx(float(numpy.quantile(values, fraction)))


MEASUREMENTS = [
    Measurement("kill-0", "ours", 0, True, 1.0, 0.9, 5.0, 10),
    Measurement("kill-0", "ours", 1, True, 2.0, 1.9, 6.0, 0),
    Measurement("kill-0", "theirs", 0, False, note="it gave up"),
    Measurement("kill-0", "theirs", 1, True, 30.0, 29.0, None, 4),
    Measurement("hang", "theirs", 0, note="was not training"),
]


def test_times_are_those_of_the_trials_that_survived() -> None:
    ours, theirs, unmeasured = summarise(MEASUREMENTS)
    assert (ours.measured, ours.survived, ours.first_step_s, ours.most_redone) == (2, 2, Spread(1.5, 1.95), 10)
    assert (theirs.measured, theirs.survived, theirs.first_step_s.p50, theirs.whole_s.p50) == (2, 1, 30.0, None)
    assert (unmeasured.measured, unmeasured.survived, unmeasured.first_step_s) == (0, 0, Spread())


def test_the_table_shows_losses_and_what_was_not_measured() -> None:
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(results.table(summarise(MEASUREMENTS), {"kill-0": "kill the worker of rank 0"}))
    text = console.export_text()
    assert "1 of 2" in text
    assert "1.50 (1.95)" in text
    assert "0 (most 10)" not in text
    assert "5 (most 10)" in text
    assert "was not training" in text


def test_the_json_holds_every_measurement() -> None:
    found = json.loads(json.dumps(results.as_json({"repeats": 2}, MEASUREMENTS, 0.0)))
    assert [Measurement(**measurement) for measurement in found["measurements"]] == MEASUREMENTS
    assert found["beganAt"] == "1970-01-01T00:00:00+00:00"
    assert found["machine"]["cpus"] == os.cpu_count()


def test_the_picture_is_an_svg_that_loads_and_runs_nothing(tmp_path: Path) -> None:
    from benchmarks import plot  # matplotlib, else in each process that collects tests

    path = tmp_path / "recovery.svg"
    plot.save_svg(summarise(MEASUREMENTS), {"kill-0": "kill & lose <rank 0>"}, path)
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = " ".join(root.itertext())
    for shown in ("kill & lose <rank 0>", "1.50 s", "30.00 s, lost 1 of 2", "not measured"):
        assert shown in text
    references = [value for element in root.iter() for name, value in element.attrib.items() if name.endswith("href")]
    assert all(reference.startswith("#") for reference in references)
    assert not [element for element in root.iter() if element.tag.endswith("}script")]


def test_phases_are_those_of_the_new_groups_slowest_rank() -> None:
    steps = group("a", 10.0, 1, 50) + group("b", 17.0, 51, 60, world=2)
    marks = [
        {"at": 9.0, "pid": 300, "phase": "script"},
        {"at": 16.2, "pid": 200, "phase": "script"},
        {"at": 16.4, "pid": 201, "phase": "script"},
        {"at": 16.9, "pid": 200, "phase": "run"},
    ]
    generations = [
        {"openedAt": to_rfc3339(8.0), "formedAt": to_rfc3339(8.5)},
        {"openedAt": to_rfc3339(15.1), "formedAt": to_rfc3339(15.6)},
        {"openedAt": to_rfc3339(19.0), "formedAt": to_rfc3339(19.5)},
    ]
    text = "".join(json.dumps(mark) + "\n" for mark in marks)
    found = phases.reached(text, steps, 15.0, WHOLE, generations)
    assert found == pytest.approx({"opened": 0.1, "formed": 0.6, "script": 1.4, "run": 1.9})
    assert list(found) == ["opened", "formed", "script", "run"]
    assert phases.reached(text, group("a", 10.0, 1, 50), 15.0, WHOLE, []) == {}


@pytest.mark.parametrize("wrong", [("--repeats", "0"), ("--repeats", "x"), ("--scenario", "flood"), ("--settle-s", "")])
def test_the_benchmark_refuses_what_makes_no_sense(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        recovery.main(list(wrong))
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


# What is started is ended.

SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-Ic', 'import time; time.sleep(600)']); "


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child, both of which would live for ten minutes."""
    command = [sys.executable, "-Ic", SLEEPER + "time.sleep(600)"]
    with subprocess.Popen(command, env={**os.environ, processes.MARK: "this-test"}, start_new_session=True) as top:
        wait_until(lambda: psutil.Process(top.pid).children())
        yield top
        top.kill()
        processes.sweep("this-test")


def test_a_worker_is_killed_with_all_below_it(tree: subprocess.Popen[bytes]) -> None:
    child = psutil.Process(tree.pid).children()[0]
    assert processes.owner_of(child.pid, {7: tree.pid}) == 7
    assert processes.owner_of(os.getpid(), {7: tree.pid}) is None
    processes.kill_trees([tree.pid])
    assert tree.wait(10) == -signal.SIGKILL
    wait_until(lambda: has_ended(child))


TWICE = """
import os, signal, sys
from benchmarks.commandline import end_as_by_ctrl_c
end_as_by_ctrl_c()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
    print("all has been ended")
"""


def test_sigterm_is_ctrl_c_once_and_a_second_one_hits_no_cleaning_up() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "all has been ended\n"


def test_processes_are_found_by_their_mark_though_stopped_and_orphaned(tree: subprocess.Popen[bytes]) -> None:
    child = psutil.Process(tree.pid).children()[0]
    child.suspend()
    tree.kill()
    tree.wait(10)
    assert processes.sweep("this-tes") == 0
    assert processes.sweep("this-test") == 1
    wait_until(lambda: has_ended(child))


# Stands for a training script: it takes steps as a group of its own, of one rank.
STEPPER = """
import json, os, sys, time
step = 0
while True:
    step += 1
    with open(sys.argv[1], "a") as file:
        at, pid = time.time(), os.getpid()
        data = dict(epoch=(step - 1) // 10, samples=[(step - 1) % 10])
        file.write(json.dumps(dict(at=at, rank=0, world=1, step=step, group=str(pid), pid=pid, **data)) + chr(10))
    time.sleep(0.02)
"""


class Alone(Contender):
    """Runs STEPPER where the real one would run torchrun."""

    name = "alone"
    job: AgentsJob | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return

    def start(self, trial: Trial) -> Job:
        command = [sys.executable, "-Ic", STEPPER, str(trial.steps_file)]
        self.job = AgentsJob(trial, [command], [{}])
        return self.job


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial("a-trial", tmp_path / "trial", workers=1, step_s=0.02, save_every_steps=20)


def test_a_trial_from_start_to_end(trial: Trial) -> None:
    contender = Alone()
    scenario = Scenario("kill-0", "kill it", kill(0), workers=1, expected=Expected(world=1), limit_s=20.0)
    record = run_trial(contender, scenario, trial, repeat=0, settle_s=0.1)
    found = record.measurement
    assert found.survived
    assert found.workers_restarted == 1
    assert found.first_step_s == found.whole_s
    assert found.first_step_s is not None
    assert 1.0 <= found.first_step_s < 10.0  # the replacement comes after a second
    assert found.steps_redone is not None
    assert found.steps_redone > 1  # it began anew
    assert (found.processes_new, found.samples_lost, found.samples_doubled) == (1, 0, 0)
    assert contender.job is not None
    assert contender.job.agents() == {}
    assert processes.sweep(trial.name) == 0


def test_a_target_that_is_not_there_is_no_measurement(trial: Trial) -> None:
    scenario = Scenario("kill-5", "kill nobody", kill(5), workers=1, expected=Expected(world=1), limit_s=20.0)
    record = run_trial(Alone(), scenario, trial, repeat=0, settle_s=0.1)
    assert record.measurement == Measurement("kill-5", "alone", 0, note="rank 5 has taken no step")


def test_a_worker_that_was_scaled_away_is_not_replaced(trial: Trial) -> None:
    trial.folder.mkdir()
    job = AgentsJob(replace(trial, workers=2), [["sleep", "600"]], [{}])
    try:
        assert sorted(job.agents()) == [0, 1]
        job.scale(1)
        wait_until(lambda: sorted(job.agents()) == [0])
        processes.kill_trees(job.agents().values())
        wait_until(lambda: not job.agents())

        def replaced() -> bool:
            job.tend()
            return bool(job.agents())

        wait_until(replaced)
        assert sorted(job.agents()) == [0]
        job.scale(2)
        assert sorted(job.agents()) == [0, 1]
    finally:
        job.end()
    assert job.agents() == {}


def test_a_small_group_forms_and_forms_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.json"
    rendezvous.main(["--agents", "8", "--repeats", "2", "--json", str(path)])
    assert capsys.readouterr().out.startswith("8 agents: form ")
    rounds = json.loads(path.read_text())["rounds"]
    assert len(rounds) == 2
    assert all(one["form_s"] > 0 and one["reform_s"] > 0 and one["memory_mib"] > 10 for one in rounds)
