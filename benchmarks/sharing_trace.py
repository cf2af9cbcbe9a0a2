"""What happens to the cluster in a week with any scheduler: jobs arrive, spot nodes go and come back.

All of it is determined by a seed and the distributions in `WeekSettings`, and is the same for every contender.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class WeekSettings:
    """The distributions, and what changes cost.

    Jobs arrive as a Poisson process, `jobs` of them in `days` on average. Each wants a number of GPUs from `sizes`, and
    with these would run for a time that is log-normal with `sigma`, at most `longest_h`, scaled so that the jobs
    together ask for `load` times the available GPU hours. An elastic contender may run it on a quarter of them up to
    twice as many. n GPUs are n ** exponent times as fast as one; the exponent is uniform in `exponents`.

    A spot node is up for an exponential time with mean `up_h`, then away for one with mean `away_s`; `noticed` of the
    interruptions have a notice of `notice_s`. `start_s`: from a worker's creation until it can train. `reform_s`: how
    long a group stops that re-forms with notice; `loss_s`: after a loss without notice. Commits are made every
    `commit_s`; work since then is repeated after a loss.
    """

    nodes: int = 16
    gpus_per_node: int = 4
    days: float = 7.0
    jobs: int = 200
    load: float = 1.0
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    size_weights: tuple[float, ...] = (25, 20, 20, 20, 10, 5)
    sigma: float = 1.2
    longest_h: float = 48.0
    exponents: tuple[float, float] = (0.75, 0.95)
    projects: tuple[str, ...] = ("a", "b", "c", "d")
    guaranteed: int = 8
    up_h: float = 24.0
    away_s: float = 900.0
    noticed: float = 0.9
    notice_s: float = 120.0
    start_s: float = 60.0
    reform_s: float = 10.0
    loss_s: float = 15.0
    commit_s: float = 600.0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def week_s(self) -> float:
        return self.days * 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job of the trace. `work` is what it has to do, in GPU seconds at the size that it `wanted`."""

    key: str
    project: str
    arrives_s: float
    wanted: int
    least: int
    most: int
    exponent: float
    work: float

    def rate(self, gpus: int) -> float:
        """Return the work per second on that many GPUs; at the size that it wanted, this is their number."""
        return self.wanted * (gpus / self.wanted) ** self.exponent if gpus else 0.0


@dataclass(frozen=True, slots=True)
class Outage:
    """A node is away from `down_s` to `up_s`; that is known from `known_s` on (equal to `down_s` if there is no
    notice)."""

    node: str
    known_s: float
    down_s: float
    up_s: float


@dataclass(frozen=True, slots=True)
class WeekTrace:
    """A week, and the outages of nodes until the last job has ended: they continue for four weeks."""

    seed: int
    settings: WeekSettings
    jobs: tuple[SimulatedJob, ...]
    outages: tuple[Outage, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"node-{number:03}" for number in range(self.settings.nodes))


def generate(seed: int, settings: WeekSettings) -> WeekTrace:
    """Return the trace of a seed. Jobs and outages are sampled separately: other jobs meet the same outages."""
    return WeekTrace(seed, settings, _jobs(random.Random(f"jobs {seed}"), settings), _outages(seed, settings))


def _jobs(dice: random.Random, settings: WeekSettings) -> tuple[SimulatedJob, ...]:
    sampled = []
    now_s = 0.0
    while True:
        now_s += dice.expovariate(settings.jobs / settings.week_s)
        if now_s >= settings.week_s:
            break
        wanted = dice.choices(settings.sizes, settings.size_weights)[0]
        length = min(dice.lognormvariate(0.0, settings.sigma), 10.0)
        sampled.append((now_s, wanted, length, dice.uniform(*settings.exponents), dice.choice(settings.projects)))
    scale_s = _scale_s([(wanted, length) for _, wanted, length, *_ in sampled], settings)
    jobs = []
    for number, (arrives_s, wanted, length, exponent, project) in enumerate(sampled):
        runs_s = min(length * scale_s, settings.longest_h * HOUR_S)
        jobs.append(
            SimulatedJob(
                key=f"{project}/job-{number:03}",
                project=project,
                arrives_s=arrives_s,
                wanted=wanted,
                least=max(1, wanted // 4),
                most=min(2 * wanted, settings.gpus),
                exponent=exponent,
                work=runs_s * wanted,
            )
        )
    return tuple(jobs)


def _scale_s(sampled: list[tuple[int, float]], settings: WeekSettings) -> float:
    """Return the seconds per unit of length with which the jobs reach the load, as far as the maximum length
    permits."""
    longest_s, asked_s = settings.longest_h * HOUR_S, settings.load * settings.gpus * settings.week_s
    low, high = 0.0, longest_s / min((length for _, length in sampled), default=1.0)
    for _ in range(60):
        middle = (low + high) / 2
        if sum(wanted * min(length * middle, longest_s) for wanted, length in sampled) < asked_s:
            low = middle
        else:
            high = middle
    return high


def _outages(seed: int, settings: WeekSettings) -> tuple[Outage, ...]:
    found = []
    for number in range(settings.nodes):
        dice = random.Random(f"node {number} of {seed}")
        up_s = 0.0
        while True:
            down_s = up_s + dice.expovariate(1 / (settings.up_h * HOUR_S))
            if down_s >= 4 * settings.week_s:
                break
            known_s = max(up_s, down_s - settings.notice_s) if dice.random() < settings.noticed else down_s
            up_s = down_s + dice.expovariate(1 / settings.away_s)
            found.append(Outage(f"node-{number:03}", known_s, down_s, up_s))
    return tuple(sorted(found, key=lambda outage: (outage.known_s, outage.node)))
