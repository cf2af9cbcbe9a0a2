"""A week on 64 spot GPUs shared by 200 jobs, simulated: ours, and jobs of fixed size.

    python -m benchmarks.sharing [--load 1.0 ...] [--seeds 5]

Ours is the controller's own core, not a copy: `decide` divides the GPUs and `decide_growth` says when a group admits
newcomers. Jobs and interruptions are sampled from distributions (`sharing_trace.WeekSettings`) with seeds 1, 2, and so
on, the same for every contender. docs/performance.md has results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.figures import percentile, progress, show
from benchmarks.programs import count, parser
from benchmarks.sharing_simulation import POOL, DividedCluster, Granted, Week, simulate
from benchmarks.sharing_trace import WeekSettings, generate
from elasticctl.api.observed import cost
from elasticctl_controller.core.sharing.claims import Claim, Node, Project, SharedPool, SharingRules
from elasticctl_controller.core.sharing.grant_workers import decide

LOADS = (0.7, 1.0, 1.3, 2.0)
INSTANCE, INSTANCE_GPUS = "g4dn.12xlarge", 4
OURS, FIXED = "elasticctl", "fixed size"
GOODPUT_GOAL, UTILISATION_GOAL = 1.3, 0.95


class ElasticSharing:
    """The real `decide`; the simulation uses the real `decide_growth`."""

    name = OURS
    elastic = True

    def __init__(self, settings: WeekSettings) -> None:
        self.rules = SharingRules()
        self.projects = [Project(name, guaranteed={POOL: settings.guaranteed}) for name in settings.projects]

    def decide(self, nodes: Sequence[Node], claims: Sequence[Claim], now: float) -> DividedCluster:
        decision = decide([SharedPool(POOL, tuple(nodes))], self.projects, claims, now, self.rules)
        grants = {key: Granted(grant.workers, grant.leave) for key, grant in decision.grants.items()}
        return DividedCluster(grants, decision.wake_at)


class FixedSizes:
    """Jobs of fixed size, in the order of their arrival, but smaller ones may overtake: all workers of a job or none.

    A job that has lost a worker keeps the others and waits for a replacement, like a Kubernetes Job.
    """

    name = FIXED
    elastic = False

    def decide(self, nodes: Sequence[Node], claims: Sequence[Claim], now: float) -> DividedCluster:
        free = sum(node.slots for node in nodes) - sum(claim.granted for claim in claims)
        grants = {claim.key: Granted(claim.granted) for claim in claims}
        for claim in sorted(claims, key=lambda claim: (claim.submitted_at, claim.key)):
            if not claim.granted and claim.most <= free:
                free -= claim.most
                grants[claim.key] = Granted(claim.most)
        return DividedCluster(grants)


def gpu_usd_per_h() -> float:
    """Return what a GPU of a spot node with four T4 costs, by the price list."""
    listed = cost.price_list("aws")
    if listed is None:
        raise LookupError("prices.toml lists no prices for AWS")
    return listed.per_hour[INSTANCE] * listed.spot_share / INSTANCE_GPUS


def measure(loads: Sequence[float], seeds: int, settings: WeekSettings) -> dict[tuple[float, str], list[Week]]:
    """Simulate every load, seed and contender; return (load, contender) -> weeks, in order of seeds."""
    found: dict[tuple[float, str], list[Week]] = {}
    for load in loads:
        at_load = replace(settings, load=load)
        for seed in range(1, seeds + 1):
            trace = generate(seed, at_load)
            for policy in (FixedSizes(), ElasticSharing(at_load)):
                week = simulate(trace, policy, gpu_usd_per_h())
                found.setdefault((load, policy.name), []).append(week)
                progress(f"load {load:g}, seed {seed}, {policy.name}: goodput {week.goodput:.3f}")
    return found


def over_fixed(weeks: Mapping[tuple[float, str], Sequence[Week]], load: float, contender: str) -> float:
    """Return the mean goodput relative to jobs of fixed size on the same traces."""
    pairs = zip(weeks[load, contender], weeks[load, FIXED], strict=True)
    return fmean(ours.goodput / theirs.goodput for ours, theirs in pairs)


def rows(found: Mapping[tuple[float, str], Sequence[Week]]) -> Iterator[list[str]]:
    """Return the means over the seeds, for each load and contender."""
    last = -1.0
    for (load, contender), weeks in found.items():
        mean_h = fmean(fmean(week.completion_h) for week in weeks)
        p95_h = fmean(percentile(week.completion_h, 0.95) for week in weeks)
        yield [
            f"{load:g}" if load != last else "",
            contender,
            f"{fmean(week.utilisation for week in weeks):.1%}",
            f"{fmean(week.of_possible for week in weeks):.1%}",
            f"{fmean(week.goodput for week in weeks):.2f}",
            f"{over_fixed(found, load, contender):.2f}",
            f"{mean_h:.1f} h, {p95_h:.0f} h",
            f"{fmean(week.cost_per_job_usd for week in weeks):.2f}",
        ]
        last = load


COLUMNS = (
    "load",
    "contender",
    "GPUs training",
    "of possible",
    "goodput",
    "over fixed size",
    "mean, p95 completion",
    "$",
)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if a goal was missed."""
    options = parser(__doc__)
    options.add_argument("--load", action="append", type=float, metavar="X", help="GPU hours requested over available")
    options.add_argument("--seeds", type=count, default=5, metavar="N", help="weeks of each load (5)")
    options.add_argument("--jobs", type=count, default=200, metavar="N", help="jobs in a week, on average (200)")
    options.add_argument("--days", type=float, default=7.0, metavar="D", help="length of the week (7)")
    args = options.parse_args(argv)
    found = measure(args.load or LOADS, args.seeds, WeekSettings(jobs=args.jobs, days=args.days))
    goals = f"goals: {GOODPUT_GOAL:g} times the goodput of fixed sizes, {UTILISATION_GOAL:.0%} of what is possible"
    show(goals, COLUMNS, list(rows(found)))
    ours = {load: weeks for (load, contender), weeks in found.items() if contender == OURS}
    met = (
        over_fixed(found, load, OURS) >= GOODPUT_GOAL and fmean(one.of_possible for one in weeks) >= UTILISATION_GOAL
        for load, weeks in ours.items()
    )
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
