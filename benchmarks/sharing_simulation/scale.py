"""How long one decision takes with many jobs and workers."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace

from elasticctl_controller.core.sharing.claims import Claim, Node, Pool, Project, SharingDecision, Worker
from elasticctl_controller.core.sharing.grant_workers import decide

POOL = "gpu"
SLOTS_PER_NODE = 8
PROJECTS = 50


@dataclass(frozen=True, slots=True)
class Pass:
    """Decisions on one cluster: `workers` are those that jobs have; `cpu_s` is the median processor time."""

    what: str
    jobs: int
    workers: int
    cpu_s: float
    median_s: float
    slowest_s: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """A cluster with its jobs."""

    pool: Pool
    projects: tuple[Project, ...]
    claims: tuple[Claim, ...]

    def decide(self, now: float) -> SharingDecision:
        return decide([self.pool], self.projects, self.claims, now)


def crowd(jobs: int, workers: int, sizes: tuple[int, ...], seed: int) -> Crowd:
    """Return a cluster whose jobs want about that many workers in total, with workers of `sizes` slots; some jobs wait.

    Jobs ask for 1 to 16 workers, so a fifth of the total demand is waiting or below its maximum.
    """
    dice = random.Random(seed)
    names = [f"project-{number:02}" for number in range(PROJECTS)]
    claims = []
    for number in range(jobs):
        least = dice.randint(1, 4)
        claims.append(
            Claim(
                key=f"{dice.choice(names)}/job-{number:05}",
                project=dice.choice(names),
                pool=POOL,
                least=least,
                most=least * dice.choice((1, 2, 4)),
                slots_per_worker=dice.choice(sizes),
                priority=dice.choice((0, 0, 0, 5)),
                submitted_at=float(number),
                changed_at=float(number),
            )
        )
    mean = statistics.fmean(claim.slots_per_worker for claim in claims)
    slots = workers * mean
    pool = Pool(POOL, tuple(Node(f"node-{n:05}", SLOTS_PER_NODE) for n in range(round(slots / SLOTS_PER_NODE))))
    guaranteed = {POOL: round(slots / PROJECTS / 2)}
    return Crowd(pool, tuple(Project(name, guaranteed=guaranteed) for name in names), tuple(claims))


def place_workers(start: Crowd, now: float) -> Crowd:
    """Return the same after its workers have followed a first decision: placed on nodes, in the order of nodes."""
    decision = start.decide(now)
    free = [node.slots for node in start.pool.nodes]
    claims = []
    first = dict.fromkeys({claim.slots_per_worker for claim in start.claims}, 0)
    for claim in sorted(start.claims, key=lambda claim: -claim.slots_per_worker):
        each, workers = claim.slots_per_worker, []
        for number in range(decision.grants[claim.key].workers):
            while first[each] < len(free) and free[first[each]] < each:
                first[each] += 1
            node = first[each]
            if node < len(free):
                free[node] -= each
                workers.append(Worker(f"{claim.key}-{number}", now, start.pool.nodes[node].name))
        claims.append(replace(claim, granted=len(workers), changed_at=now, workers=tuple(workers)))
    return replace(start, claims=tuple(claims))


def measure(what: str, jobs: int, workers: int, sizes: tuple[int, ...], repeats: int) -> Pass:
    """Time decisions on a running cluster; before each, a tenth of the jobs end and are replaced by new ones."""
    at_work = place_workers(crowd(jobs, workers, sizes, seed=1), now=float(jobs))
    held = sum(len(claim.workers) for claim in at_work.claims)
    took_s, cpu_s = [], []
    for repeat in range(repeats):
        newer = crowd(jobs, workers, sizes, seed=2 + repeat).claims
        mixed = tuple(
            replace(newer[number], key=f"new/{number}", submitted_at=jobs + 1.0, changed_at=jobs + 1.0)
            if number % 10 == repeat % 10
            else claim
            for number, claim in enumerate(at_work.claims)
        )
        mixed_crowd = replace(at_work, claims=mixed)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        mixed_crowd.decide(jobs + 1000.0)
        took_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
    return Pass(what, jobs, held, statistics.median(cpu_s), statistics.median(took_s), max(took_s))
