"""What happens to a job, and one trial of it.

A trial starts a job, lets it train, causes an event, and watches its steps until it has recovered or time is up.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.programs import kill_trees, owner_of, send, sweep
from benchmarks.recovery.contenders import Contender, TrainingJob, Trial
from benchmarks.recovery.timeline import ExpectedGroup, Outcome, RecordedStep, current_group, outcome, parse

POLL_S = 0.1
START_LIMIT_S = 120.0
"""How long a job may take until it trains: stock torchrun waits 30 s for workers that may never come."""
AFTERWARDS_S = 1.0
"""How long a recovered job is watched, so that a relapse is noticed."""
STILL_STEPPING_S = 15.0
"""A job that has not recovered in time has survived if it made a step this recently."""
Injection = Callable[[TrainingJob, Sequence[RecordedStep], int], float]
"""Causes the event to a job with the given steps so far, in the n-th repeat; returns when, in seconds since the
epoch."""


class NoTarget(Exception):
    """The event could not be caused: its target did not exist."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """An event for a job of `workers` workers; `limit_s` is how long it may take to recover."""

    name: str
    title: str
    inject: Injection
    workers: int = 3
    expected: ExpectedGroup = ExpectedGroup(world=3)
    hang: bool = False
    limit_s: float = 60.0


def kill(*ranks: int) -> Injection:
    """Send SIGKILL to the whole workers that have these ranks: their agents and all descendants."""

    def inject(job: TrainingJob, steps: Sequence[RecordedStep], turn: int) -> float:
        return kill_trees([_agent_of(job, steps, rank) for rank in ranks])

    return inject


def kill_two(job: TrainingJob, steps: Sequence[RecordedStep], turn: int) -> float:
    """Send SIGKILL to two whole workers at the same time, another pair in each repeat."""
    return kill(turn % 3, (turn + 1) % 3)(job, steps, turn)


def give_notice(job: TrainingJob, steps: Sequence[RecordedStep], turn: int) -> float:
    """Send SIGTERM to the agent of one worker, another one in each repeat."""
    agent = _agent_of(job, steps, turn % 3)
    at = time.time()
    send(agent, signal.SIGTERM)
    return at


def stop_rank(job: TrainingJob, steps: Sequence[RecordedStep], turn: int) -> float:
    """Send SIGSTOP to one rank's process, another one in each repeat."""
    pid = _pid_of(steps, turn % 3)
    at = time.time()
    send(pid, signal.SIGSTOP)
    return at


def scale(workers: int) -> Injection:
    """Request another number of workers."""
    return lambda job, steps, turn: job.scale(workers)


def _pid_of(steps: Sequence[RecordedStep], rank: int) -> int:
    for step in reversed(current_group(steps)):
        if step.rank == rank:
            return step.pid
    raise NoTarget(f"rank {rank} has taken no step")


def _agent_of(job: TrainingJob, steps: Sequence[RecordedStep], rank: int) -> int:
    agents = job.agents()
    worker = owner_of(_pid_of(steps, rank), agents)
    if worker is None:
        raise NoTarget(f"rank {rank} belongs to none of the workers {sorted(agents)}")
    return agents[worker]


_ALL = (
    Scenario("kill-0", "kill the worker of rank 0", kill(0)),
    Scenario("kill-1", "kill the worker of rank 1", kill(1)),
    Scenario("kill-2", "kill the worker of rank 2", kill(2)),
    Scenario("kill-two", "kill two of three workers at the same time", kill_two),
    Scenario("notice", "SIGTERM to a worker", give_notice),
    Scenario("hang", "SIGSTOP to a rank", stop_rank, hang=True, limit_s=120.0),
    Scenario("scale-up", "scale 2 -> 3", scale(3), workers=2, expected=ExpectedGroup(world=3, smaller_counts=False)),
    Scenario("scale-down", "scale 3 -> 2", scale(2), expected=ExpectedGroup(world=2, smaller_counts=False)),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trial. `survived` None: it was not measured, and `note` says why. `timeline` defines the figures."""

    scenario: str
    contender: str
    survived: bool | None = None
    outcome: Outcome = Outcome()
    note: str = ""


class StepsFile:
    """Reads what has been appended to the file of steps since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.steps: list[RecordedStep] = []

    def read(self) -> list[RecordedStep]:
        """Return all steps so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.steps += parse(whole.decode())
        return self.steps


def run_trial(contender: Contender, scenario: Scenario, trial: Trial, repeat: int, settle_s: float) -> Measurement:
    """Measure once. The event happens when its group has trained for `settle_s`; the job has ended when this
    returns."""
    unmeasured = Measurement(scenario.name, contender.name)
    trial.folder.mkdir(parents=True)
    try:
        job = contender.start(trial)
        try:
            return _watch(job, scenario, trial, unmeasured, repeat, settle_s)
        except NoTarget as error:
            return replace(unmeasured, note=str(error))
        finally:
            job.end()
    finally:
        sweep(trial.name)


def _watch(
    job: TrainingJob, scenario: Scenario, trial: Trial, unmeasured: Measurement, repeat: int, settle_s: float
) -> Measurement:
    file = StepsFile(trial.steps_file)
    if not _until(job, lambda: is_steady(file.read(), trial.workers, time.time(), settle_s), START_LIMIT_S):
        return replace(unmeasured, note=f"was not training within {START_LIMIT_S:.0f} s")
    at = scenario.inject(job, file.read(), repeat)
    _until(job, lambda: is_over(outcome(file.read(), at, scenario.expected)), scenario.limit_s)
    found = outcome(file.read(), at, scenario.expected)
    survives = survived(found, time.time() - at)
    return replace(unmeasured, survived=survives, outcome=found, note=job.remark())


def is_steady(steps: list[RecordedStep], world: int, now: float, settle_s: float) -> bool:
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


def _until(job: TrainingJob, condition: Callable[[], bool], limit_s: float) -> bool:
    """Tend to the job until the condition holds; return False if it does not within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        job.tend()
        time.sleep(POLL_S)
    return True
