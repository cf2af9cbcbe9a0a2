"""One trial: start a job, let it run, cause an event, and watch its steps until it has recovered or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.recoveries.contenders import Contender, Job, Trial
from benchmarks.recoveries.scenarios import Missed, Scenario
from benchmarks.recoveries.timeline import Outcome, Step, current_group, outcome, parse
from benchmarks.results import Measurement

POLL_S = 0.1
START_LIMIT_S = 120.0
"""How long a job may take until it trains: stock torchrun waits 30 s for workers that may never come."""
AFTERWARDS_S = 1.0
"""How long a recovered job is watched, so that a relapse is noticed."""
STILL_STEPPING_S = 15.0
"""A job that has not recovered in time has survived if it made a step this recently."""


@dataclass(frozen=True, slots=True)
class Record:
    """A trial's measurement, and what else it left behind, for an analysis of where the time went."""

    measurement: Measurement
    injected_at: float | None = None
    generations: tuple[dict[str, Any], ...] = ()


class StepsFile:
    """Reads what has been appended to the file of steps since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.steps: list[Step] = []

    def read(self) -> list[Step]:
        """Return all steps so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.steps += parse(whole.decode())
        return self.steps


def run_trial(contender: Contender, scenario: Scenario, trial: Trial, repeat: int, settle_s: float) -> Record:
    """Measure once. The event happens when its group has trained for `settle_s`; the job has ended when this
    returns."""
    unmeasured = Measurement(scenario.name, contender.name, repeat)
    trial.folder.mkdir(parents=True)
    try:
        job = contender.start(trial)
        try:
            return _watch(job, scenario, trial, unmeasured, settle_s)
        except Missed as missed:
            return Record(replace(unmeasured, note=str(missed)))
        finally:
            job.end()
    finally:
        processes.sweep(trial.name)


def _watch(job: Job, scenario: Scenario, trial: Trial, unmeasured: Measurement, settle_s: float) -> Record:
    file = StepsFile(trial.steps_file)
    if not _until(job, lambda: is_steady(file.read(), trial.workers, time.time(), settle_s), START_LIMIT_S):
        return Record(replace(unmeasured, note=f"was not training within {START_LIMIT_S:.0f} s"))
    injected_at = scenario.inject(job, file.read(), unmeasured.repeat)
    expected = scenario.expected if job.replaces else scenario.without_replacement
    _until(job, lambda: is_over(outcome(file.read(), injected_at, expected)), scenario.limit_s)
    found = outcome(file.read(), injected_at, expected)
    measurement = replace(
        unmeasured,
        survived=survived(found, time.time() - injected_at),
        first_step_s=found.first_step_s,
        standstill_s=found.standstill_s,
        whole_s=found.whole_s,
        steps_redone=found.steps_redone,
        workers_restarted=job.restarted(),
        step_s=found.step_s,
        processes_new=found.processes_new,
        samples_lost=found.samples_lost,
        samples_doubled=found.samples_doubled,
        note=job.note(),
    )
    return Record(measurement, injected_at, tuple(job.generations()))


def is_steady(steps: list[Step], world: int, now: float, settle_s: float) -> bool:
    """Return whether the newest group has `world` ranks, has trained for `settle_s`, and still does."""
    group = current_group(steps)
    if not group or group[0].world != world:
        return False
    times = [step.at for step in group]
    return min(times) <= now - settle_s and max(times) >= now - 1.0


def is_over(found: Outcome) -> bool:
    """Return whether there is nothing more to see."""
    if found.whole_s is None or found.last_step_s is None or found.samples_lost is None:
        return False
    return found.last_step_s >= found.whole_s + AFTERWARDS_S


def survived(found: Outcome, watched_s: float) -> bool:
    """Return whether a new group trained, and still did when it was last watched, `watched_s` after the event."""
    if found.first_step_s is None or found.last_step_s is None:
        return False
    return found.last_step_s >= watched_s - STILL_STEPPING_S


def _until(job: Job, condition: Callable[[], bool], limit_s: float) -> bool:
    """Tend the job until the condition holds; return False if it does not within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        job.tend()
        time.sleep(POLL_S)
    return True
