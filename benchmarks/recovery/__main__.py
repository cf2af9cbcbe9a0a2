"""How long training stops when a worker is lost, gets notice, hangs, is added or is removed.

    python -m benchmarks.recovery [--contender NAME ...] [--scenario NAME ...] [--repeats 5]

Runs each scenario with each contender in turns, each time with a new job. The torchft contenders need an environment of
their own: see `contenders`; by default, all others run. All figures are derived from the steps that the training script
recorded; `timeline` defines them. docs/performance.md has results. Ctrl-C ends everything that was started and shows
the results so far.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.figures import progress, show, spread
from benchmarks.programs import count, end_as_by_ctrl_c, parser
from benchmarks.recovery.contenders import CONTENDERS, Local, Trial
from benchmarks.recovery.timeline import Outcome
from benchmarks.recovery.trials import SCENARIOS, Measurement, run_trial
from elasticctl.api.errors import ElasticctlError

STEP_S, SAVE_EVERY_STEPS = 0.02, 20
SETTLE_S = 15.0
"""Longer than any contender's preparations after a start, such as the import of torch in spare processes."""
COLUMNS = ("event", "contender", "survived", "first step, s", "standstill, s", "whole again, s", "steps repeated")


def measure(args: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Run all trials; an error of a contender is a result, too."""
    with ExitStack() as stack:
        contenders = [stack.enter_context(CONTENDERS[name]()) for name in args.contender]
        for repeat in range(args.repeats):
            for name in args.scenario:
                scenario = SCENARIOS[name]
                scenario = replace(scenario, limit_s=args.limit_s or scenario.limit_s)
                for contender in contenders[:: -1 if repeat % 2 else 1]:
                    trial = Trial(
                        name=f"{name}-{contender.name}-{repeat}",
                        folder=folder / f"{name}-{contender.name}-{repeat}",
                        workers=scenario.workers,
                        step_s=args.step_s,
                        save_every_steps=SAVE_EVERY_STEPS,
                        watch_hangs=scenario.hang,
                    )
                    try:
                        yield run_trial(contender, scenario, trial, repeat, args.settle_s)
                    except ElasticctlError as error:
                        yield Measurement(name, contender.name, note=str(error))


def rows(measurements: Sequence[Measurement]) -> Iterator[list[str]]:
    """Return a row for each scenario and contender: medians (p95) of the trials that survived."""
    last = ""
    in_order = sorted(measurements, key=lambda m: [*SCENARIOS].index(m.scenario))
    pairs = dict.fromkeys((m.scenario, m.contender) for m in in_order)
    for scenario, contender in pairs:
        trials = [one for one in measurements if (one.scenario, one.contender) == (scenario, contender)]
        survivors = [one.outcome for one in trials if one.survived]
        redone = [found.steps_redone for found in survivors]
        yield [
            SCENARIOS[scenario].title if scenario != last else "",
            contender,
            f"{len(survivors)} of {sum(one.survived is not None for one in trials)}",
            *(spread(numbers(survivors, name)) for name in ("first_step_s", "standstill_s", "whole_s")),
            f"{median(redone):.0f} (most {max(redone)})" if redone else "-",
            f"{median(numbers(survivors, 'samples_lost')):.0f}" if numbers(survivors, "samples_lost") else "-",
            f"{median(numbers(survivors, 'samples_doubled')):.0f}" if numbers(survivors, "samples_doubled") else "-",
            next((one.note for one in trials if one.note), ""),
        ]
        last = scenario


def numbers(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """Return what is known of one figure."""
    return [value for found in outcomes if (value := getattr(found, name)) is not None]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 130 after Ctrl-C, 1 if one of our own trials did not survive."""
    args = _arguments(argv)
    end_as_by_ctrl_c()
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    measurements: list[Measurement] = []
    stopped = False
    try:
        for found in measure(args, folder):
            measurements.append(found)
            progress(str(found))
    except KeyboardInterrupt:
        stopped = True
    finally:
        if args.keep:
            progress(f"steps and logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    title = "from the event on: median (p95) of the trials that survived"
    show(title, [*COLUMNS, "samples lost", "twice", ""], list(rows(measurements)))
    return 130 if stopped else int(any(m.survived is False for m in measurements if m.contender == Local.name))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="repeatable")
    options.add_argument("--contender", action="append", choices=list(CONTENDERS), help="repeatable")
    options.add_argument("--repeats", type=count, default=5, metavar="N", help="trials of each (5)")
    options.add_argument(
        "--settle-s", type=float, default=SETTLE_S, metavar="S", help="seconds of training before each"
    )
    options.add_argument("--step-s", type=float, default=STEP_S, metavar="S", help="the least that a step takes")
    options.add_argument("--limit-s", type=float, metavar="S", help="how long a trial is watched after its event")
    options.add_argument("--keep", action="store_true", help="keep the recorded steps and the workers' logs")
    args = options.parse_args(argv)
    args.scenario = args.scenario or list(SCENARIOS)
    args.contender = args.contender or [name for name in CONTENDERS if not name.startswith("torchft")]
    return args


if __name__ == "__main__":
    sys.exit(main())
