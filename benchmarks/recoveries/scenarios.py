"""What happens to a job: who is killed, gets notice or is stopped, and what the group should be afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks import processes
from benchmarks.recoveries.contenders import Job
from benchmarks.recoveries.timeline import Expected, Step, current_group

Injection = Callable[[Job, Sequence[Step], int], float]
"""Causes the event to a job with the given steps so far, in the n-th repeat; returns when, in seconds since the
epoch."""


class Missed(Exception):
    """The scenario could not be played: its target did not exist."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """An event for a job of `workers` workers; `limit_s` is how long it may take to recover.

    `lost` workers are lost for good, if nobody replaces them.
    """

    name: str
    title: str
    inject: Injection
    workers: int = 3
    expected: Expected = Expected(world=3)
    hang: bool = False
    limit_s: float = 60.0
    lost: int = 0

    @property
    def without_replacement(self) -> Expected:
        """What is expected of a job whose workers nobody replaces."""
        return replace(self.expected, world=self.expected.world - self.lost)


def kill(*ranks: int) -> Injection:
    """Send SIGKILL to the whole workers that have these ranks: their agents and all descendants."""

    def inject(job: Job, steps: Sequence[Step], turn: int) -> float:
        return processes.kill_trees([_agent_of(job, steps, rank) for rank in ranks])

    return inject


def kill_two(job: Job, steps: Sequence[Step], turn: int) -> float:
    """Send SIGKILL to two whole workers at once, another pair in each repeat."""
    return kill(turn % 3, (turn + 1) % 3)(job, steps, turn)


def give_notice(job: Job, steps: Sequence[Step], turn: int) -> float:
    """Send SIGTERM to the agent of one worker, another one in each repeat."""
    agent = _agent_of(job, steps, turn % 3)
    at = time.time()
    processes.send(agent, signal.SIGTERM)
    return at


def stop_rank(job: Job, steps: Sequence[Step], turn: int) -> float:
    """Send SIGSTOP to one rank's process, another one in each repeat."""
    pid = _pid_of(steps, turn % 3)
    at = time.time()
    processes.send(pid, signal.SIGSTOP)
    return at


def scale(workers: int) -> Injection:
    """Request another number of workers."""
    return lambda job, steps, turn: job.scale(workers)


def _pid_of(steps: Sequence[Step], rank: int) -> int:
    for step in reversed(current_group(steps)):
        if step.rank == rank:
            return step.pid
    raise Missed(f"rank {rank} has taken no step")


def _agent_of(job: Job, steps: Sequence[Step], rank: int) -> int:
    agents = job.agents()
    worker = processes.owner_of(_pid_of(steps, rank), agents)
    if worker is None:
        raise Missed(f"rank {rank} belongs to none of the workers {sorted(agents)}")
    return agents[worker]


_ALL = (
    Scenario("kill-0", "kill the worker of rank 0", kill(0), lost=1),
    Scenario("kill-1", "kill the worker of rank 1", kill(1), lost=1),
    Scenario("kill-2", "kill the worker of rank 2", kill(2), lost=1),
    Scenario("kill-two", "kill two of three workers at once", kill_two, lost=2),
    Scenario("notice", "SIGTERM to a worker", give_notice),
    Scenario("hang", "SIGSTOP to a rank", stop_rank, hang=True, limit_s=120.0),
    Scenario("scale-up", "scale 2 -> 3", scale(3), workers=2, expected=Expected(world=3, smaller_counts=False)),
    Scenario("scale-down", "scale 3 -> 2", scale(2), expected=Expected(world=2, smaller_counts=False)),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
QUICK = ("kill-0", "notice", "scale-up")
