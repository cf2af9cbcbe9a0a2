"""A week on 64 spot GPUs shared by 200 jobs, simulated: ours, first-in-first-out gangs, and jobs of fixed size.

    python benchmarks/sharing.py [--load 1.0] [--seeds 5] [--scale] [--json FILE] [--svg FILE]

Ours is the controller's own core, not a copy: `decide` divides the GPUs and `resizing` says when a group admits
newcomers. Jobs and interruptions are sampled from distributions (see benchmarks/sharing_simulation/trace.py) with seeds
1, 2, and so on, the same for every contender. `--scale` times the core on 10,000 jobs with 50,000 workers.
docs/performance.md has results.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from benchmarks.commandline import count
from benchmarks.sharing_simulation import policies, results, scale, trace
from benchmarks.sharing_simulation.engine import simulate
from elasticctl.api.observed import cost

LOADS = (0.7, 1.0, 1.3, 2.0)
INSTANCE, INSTANCE_GPUS = "g4dn.12xlarge", 4
JOBS, WORKERS = 10_000, 50_000
SIZES = {"one slot each": (1,), "1 to 8 slots each": (1, 2, 4, 8)}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if an aim was missed."""
    args = _arguments(argv)
    began_at = time.time()
    say = Console(stderr=True, highlight=False)
    settings = trace.Settings(jobs=args.jobs, days=args.days)
    found = _weeks(args, settings, say)
    passes = []
    if args.scale:
        passes = [scale.measure(what, args.scale_jobs, 5 * args.scale_jobs, sizes, 5) for what, sizes in SIZES.items()]
    summaries = results.summarise(found)
    aims = results.aims(summaries, passes)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(results.table(summaries))
    console.print(results.aims_table(aims))
    if args.json:
        parameters = {
            "command": shlex.join(["python", "benchmarks/sharing.py", *sys.argv[1:]]),
            "seeds": args.seeds,
            "loads": args.load,
            "settings": asdict(settings),
            "gpuUsdPerHour": gpu_usd_per_h(),
        }
        args.json.write_text(json.dumps(results.as_json(parameters, found, passes, began_at), indent=1) + "\n")
    if args.svg:
        from benchmarks.sharing_simulation import (
            plot,  # needs matplotlib: takes seconds to import, and is only in the extra `dev`
        )

        plot.save_svg(summaries, args.svg)
    return int(any(not aim.met for aim in aims))


def _weeks(args: argparse.Namespace, settings: trace.Settings, say: Console) -> list[results.Found]:
    """Simulate every load, seed and contender."""
    found = []
    for load in args.load:
        at_load = replace(settings, load=load)
        for seed in range(1, args.seeds + 1):
            week = trace.generate(seed, at_load)
            for policy in policies.contenders(at_load):
                began_s = time.monotonic()
                figures = simulate(week, policy, gpu_usd_per_h())
                found.append(results.Found(load, figures))
                say.print(
                    f"load {load:g}  seed {seed}  {policy.name:12}  goodput {figures.goodput:.3f}  "
                    f"utilisation {figures.utilisation:.1%} ({figures.of_possible:.1%} of possible)  "
                    f"({time.monotonic() - began_s:.0f} s, {figures.passes} passes)",
                    soft_wrap=True,
                )
    return found


def gpu_usd_per_h() -> float:
    """Return what a GPU of a spot node with four T4 costs, by the price list."""
    listed = cost.price_list("aws")
    if listed is None:
        raise LookupError("prices.toml lists no prices for AWS")
    return listed.per_hour[INSTANCE] * listed.spot_share / INSTANCE_GPUS


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--load",
        action="append",
        type=float,
        metavar="X",
        help="GPU hours requested over GPU hours available; repeatable",
    )
    parser.add_argument("--seeds", type=count, default=5, metavar="N", help="weeks of each load (5)")
    parser.add_argument("--jobs", type=count, default=200, metavar="N", help="jobs in a week, on average (200)")
    parser.add_argument("--days", type=float, default=7.0, metavar="D", help="length of the week (7)")
    parser.add_argument("--scale", action="store_true", help=f"time the core with {JOBS} jobs, {WORKERS} workers")
    parser.add_argument("--scale-jobs", type=count, default=JOBS, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the means into this file")
    args = parser.parse_args(argv)
    if args.svg and find_spec("matplotlib") is None:
        parser.error("--svg needs matplotlib: pip install matplotlib")
    args.load = args.load or list(LOADS)
    return args


if __name__ == "__main__":
    sys.exit(main())
