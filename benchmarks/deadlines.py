"""What a job with a deadline costs on recorded spot machines, under each policy.

    python -m benchmarks.deadlines DIR [--starts 2] [--ratio 1.2 ...] [--spot-share 0.3 ...]

DIR holds traces (docs/goals.md). Traces that the policy was tuned on are identified by their names (`TUNED_ON`), and
reported separately. Each start is a random tick, the same for every contender; all of them know the trace before it.
Rigid contenders get the size that was cheapest for them over all starts without being late (spot only: the cheapest).
docs/performance.md has results.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deadline_policies import RIGID, most_there, with_changes, without_changes
from benchmarks.figures import percentile, show
from benchmarks.programs import count, parser
from elasticctl.planning.deadline_policy import decide
from elasticctl.planning.situation import Costs, Speeds
from elasticctl.simulation.replay import Policy, Replay, ReplayedJob
from elasticctl.simulation.traces import Recording, Trace, parse_trace

TUNED_ON = re.compile(r"02-15-2023-us-east")
RATIOS = (1.2, 1.5, 2.0, 3.0, 4.0)
SHARES = (0.2, 0.3, 0.5)
MOST, EXPONENT, SHORTEST_H = 16, 0.92, 12.0
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
RIGID_SIZES = (6, 8, 12, 16)
SPEEDS = Speeds.of({workers: workers**EXPONENT / 3600 for workers in SIZES})
COSTS = Costs()
OURS = "elastic"
BOUND, FREE = "clairvoyant, changes cost", "clairvoyant, changes are free"


@dataclass(frozen=True, slots=True)
class DeadlineCase:
    """One place at one spot share and deadline: `ratio` times the shortest possible time."""

    place: str
    tuned_on: bool
    zones: int
    share: float
    ratio: float


@dataclass(frozen=True, slots=True)
class CaseRun:
    """One run; `workers` 0: any size."""

    case: DeadlineCase
    start: int
    contender: str
    workers: int
    usd: float
    late: bool


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if ours was ever late."""
    args = _arguments(argv)
    traces = [parse_trace(file.read_text("utf-8"), file.stem) for file in sorted(args.traces.glob("*.json"))]
    jobs = [
        (traces_there, DeadlineCase(place, tuned, len(traces_there), share, ratio), args.starts)
        for place, tuned, traces_there in places(traces)
        for share in args.spot_share
        for ratio in args.ratio
    ]
    random.Random(1).shuffle(jobs)  # so that an interrupted run has covered a part of everything
    found: list[CaseRun] = []
    with multiprocessing.Pool(args.processes) as pool, contextlib.suppress(KeyboardInterrupt):
        for some in pool.imap_unordered(_run_case, jobs, chunksize=1):
            found += some
    columns = ["traces", "spot price", "deadline", "contender", "runs", "late", "median", "p95", "mean"]
    show("cost over the clairvoyant's bound", columns, list(rows(found)))
    return int(any(one.late for one in found if one.contender == OURS))


def places(traces: Iterable[Trace]) -> Iterator[tuple[str, bool, tuple[Trace, ...]]]:
    """Return each trace alone, and with others of its campaign, at most three."""
    campaigns: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        if trace.lasts_s < 4 * SHORTEST_H * 3600 * 1.25:
            continue
        yield trace.name, bool(TUNED_ON.search(trace.name)), (trace,)
        campaigns[re.sub(r"-us-[a-z0-9-]+_", "_", trace.name)].append(trace)
    for name, members in campaigns.items():
        for tuned in (True, False):
            some = [trace for trace in members if bool(TUNED_ON.search(trace.name)) == tuned][:3]
            if len(some) > 1:
                yield f"{name} ({len(some)} zones)", tuned, tuple(some)


def _run_case(job: tuple[tuple[Trace, ...], DeadlineCase, int]) -> list[CaseRun]:
    traces, case, starts = job
    recording = Recording.of(traces, MOST, case.share)
    work = SPEEDS.per_s[-1] * SHORTEST_H * 3600
    deadline_s = case.ratio * SHORTEST_H * 3600
    plan = ReplayedJob(work, SPEEDS, COSTS, 1.0, deadline_s, blind=True)
    chance = random.Random(f"{case.place} {case.ratio}")
    ticks = int(deadline_s / recording.gap_s)
    found = []
    for _ in range(starts):
        start = chance.randrange(recording.ticks - ticks - 1)
        there = most_there([trace.there[start : start + ticks] for trace in recording.traces])
        free = without_changes(there, recording.gap_s, work, SPEEDS, case.share, 1.0)
        bound = with_changes(there, recording.gap_s, work, SPEEDS, COSTS, (case.share, 1.0))
        found += [CaseRun(case, start, FREE, 0, free, False), CaseRun(case, start, BOUND, 0, bound, False)]
        found.append(_run(case, plan, recording, start, OURS, 0, decide))
        for name, make in RIGID.items():
            for workers in RIGID_SIZES:
                if SPEEDS.rate(workers) * deadline_s > work:
                    found.append(_run(case, plan, recording, start, name, workers, make(workers)))
    return found


def _run(
    case: DeadlineCase, plan: ReplayedJob, recording: Recording, start: int, name: str, workers: int, policy: Policy
) -> CaseRun:
    outcome = Replay(plan, recording, start, policy).run()
    late = outcome.finished_s is None or outcome.finished_s > (plan.deadline_s or 0.0)
    return CaseRun(case, start, name, workers, outcome.usd, late)


def rows(found: Iterable[CaseRun]) -> Iterator[list[str]]:
    """Return a row for each contender, kind of trace, share and deadline: the cost over the clairvoyant's bound."""
    by_case: dict[DeadlineCase, dict[str, dict[int, list[CaseRun]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for one in found:
        by_case[one.case][one.contender][one.workers].append(one)
    ratios: dict[tuple[str, str, str, str], list[tuple[float, bool]]] = defaultdict(list)
    for case, contenders in by_case.items():
        bounds = {one.start: one.usd for one in contenders[BOUND][0]}
        seen = "tuned on" if case.tuned_on else "not tuned on"
        for name, sizes in contenders.items():
            punctual = [runs for runs in sizes.values() if not any(one.late for one in runs)] or list(sizes.values())
            best = min(punctual, key=lambda runs: sum(one.usd for one in runs) / len(runs))
            pairs = [(one.usd / bounds[one.start], one.late) for one in best]
            for key in ((seen, "all", "all", name), (seen, f"{case.share:g}", f"{case.ratio:g}", name)):
                ratios[key] += pairs
    for key, pairs in sorted(ratios.items()):
        costs, late = [cost for cost, _ in pairs], sum(late for _, late in pairs)
        figures = (percentile(costs, 0.5), percentile(costs, 0.95), sum(costs) / len(costs))
        yield [*key, str(len(pairs)), str(late), *(f"{value:.2f}" for value in figures)]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("traces", type=Path, metavar="DIR", help="a folder with traces")
    options.add_argument("--starts", type=count, default=2, metavar="N", help="of each place and deadline (2)")
    options.add_argument("--ratio", type=float, nargs="+", default=RATIOS, metavar="X", help="deadlines; 1.2 to 4")
    options.add_argument("--spot-share", type=float, nargs="+", default=SHARES, metavar="X", help="0.2, 0.3 and 0.5")
    options.add_argument("--processes", type=count, default=None, metavar="N", help="as many as there are processors")
    return options.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
