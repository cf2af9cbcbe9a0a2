"""How long training stops when a worker is lost, gets notice, hangs, is added or is removed.

    python benchmarks/recovery.py [--repeats 5] [--quick] [--json FILE] [--svg FILE]

Runs each scenario with each contender in turns, so that a busy moment of the machine affects all of them, each time
with a new job. `--contender torchft`, `nvrx` and `ddp` need an environment of their own: see `other_libraries`. All
figures are derived from the steps that the training script recorded; `timeline` defines them. docs/performance.md has
results. Ctrl-C ends everything that was started and shows the results so far.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from benchmarks import results
from benchmarks.commandline import count, end_as_by_ctrl_c
from benchmarks.recoveries import phases
from benchmarks.recoveries.contenders import CONTENDERS as STOCK
from benchmarks.recoveries.contenders import HANG_TIMEOUT_S, MAX_WORKERS, REPLACE_AFTER_S, Contender, Trial
from benchmarks.recoveries.other_libraries import OTHERS
from benchmarks.recoveries.scenarios import QUICK, SCENARIOS
from benchmarks.recoveries.trials import Record, StepsFile, run_trial
from benchmarks.results import Measurement
from elasticctl.api.errors import ElasticctlError

CONTENDERS = {**STOCK, **OTHERS}
STEP_S = 0.02
SAVE_EVERY_STEPS = 20
SETTLE_S = 15.0
"""Longer than any contender's preparations after a start, such as the import of torch in spare processes."""


@dataclass(slots=True)
class Session:
    """One run of the benchmark: what it measures, and the results so far."""

    folder: Path
    settle_s: float
    marks: bool
    say: Console
    step_s: float
    limit_s: float | None = None
    measurements: list[Measurement] = field(default_factory=list)
    reached: dict[tuple[str, str], list[dict[str, float]]] = field(default_factory=dict)

    def measure(self, contender: Contender, name: str, repeat: int) -> None:
        """Run one trial and keep its result; an error of a contender is a result, too."""
        scenario = SCENARIOS[name]
        if self.limit_s is not None:
            scenario = replace(scenario, limit_s=self.limit_s)
        trial = Trial(
            name=f"{name}-{contender.name}-{repeat}",
            folder=self.folder / f"{name}-{contender.name}-{repeat}",
            workers=scenario.workers,
            step_s=self.step_s,
            save_every_steps=SAVE_EVERY_STEPS,
            watch_hangs=scenario.hang,
            marks=self.marks,
        )
        try:
            record = run_trial(contender, scenario, trial, repeat, self.settle_s)
        except ElasticctlError as error:
            record = Record(Measurement(name, contender.name, repeat, note=str(error)))
        self.measurements.append(record.measurement)
        self._keep_phases(record, trial)
        self.say.print(_line(record.measurement), markup=False, soft_wrap=True)

    def _keep_phases(self, record: Record, trial: Trial) -> None:
        if record.injected_at is None or not trial.marks_file.exists():
            return
        found = phases.reached(
            trial.marks_file.read_text(),
            StepsFile(trial.steps_file).read(),
            record.injected_at,
            SCENARIOS[record.measurement.scenario].expected,
            record.generations,
        )
        key = (record.measurement.scenario, record.measurement.contender)
        self.reached.setdefault(key, []).append(found)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 130 after Ctrl-C, 1 if one of our own trials did not survive."""
    args = _arguments(argv)
    end_as_by_ctrl_c()
    began_at = time.time()
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    session = Session(
        folder, args.settle_s, args.phases, Console(stderr=True, highlight=False), args.step_s, args.limit_s
    )
    stopped = False
    try:
        _run(session, args)
    except KeyboardInterrupt:
        session.say.print("stopped; all processes have been ended")
        stopped = True
    finally:
        if args.keep:
            session.say.print(f"steps and logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    _show(session, args, began_at)
    if stopped:
        return 130
    return int(any(m.survived is False for m in session.measurements if m.contender == "elasticctl"))


def _run(session: Session, args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        contenders = [stack.enter_context(CONTENDERS[name]()) for name in args.contender]
        for repeat in range(args.repeats):
            for name in args.scenario:
                for contender in contenders:
                    session.measure(contender, name, repeat)


def _show(session: Session, args: argparse.Namespace, began_at: float) -> None:
    summaries = results.summarise(session.measurements)
    titles = {name: scenario.title for name, scenario in SCENARIOS.items()}
    console = Console() if sys.stdout.isatty() else Console(width=220)
    console.print(results.table(summaries, titles))
    for contender in dict.fromkeys(contender for _, contender in session.reached):
        of_contender = {scenario: trials for (scenario, name), trials in session.reached.items() if name == contender}
        console.print(phases.table(contender, of_contender))
    if args.json:
        parameters = {
            "command": shlex.join(["python", "benchmarks/recovery.py", *sys.argv[1:]]),
            "repeats": args.repeats,
            "settleS": args.settle_s,
            "stepS": args.step_s,
            "saveEverySteps": SAVE_EVERY_STEPS,
            "maxWorkers": MAX_WORKERS,
            "replaceAfterS": REPLACE_AFTER_S,
            "hangTimeoutS": HANG_TIMEOUT_S,
            "limitS": {name: args.limit_s or scenario.limit_s for name, scenario in SCENARIOS.items()},
        }
        found = results.as_json(parameters, session.measurements, began_at)
        found["phases"] = [
            {"scenario": scenario, "contender": contender, "reachedS": trials}
            for (scenario, contender), trials in session.reached.items()
        ]
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.svg:
        from benchmarks import plot  # needs matplotlib: takes seconds to import, and is only in the extra `dev`

        plot.save_svg(summaries, titles, args.svg)


def _line(measurement: Measurement) -> str:
    """Describe one trial in a line."""
    values = {key: value for key, value in asdict(measurement).items() if value not in (None, "")}
    words = [f"{key}={value:.2f}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]
    return " ".join(words)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="repeatable")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS), help="repeatable")
    parser.add_argument("--repeats", type=count, metavar="N", help="trials of each (5; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help=f"once each, by default: {', '.join(QUICK)}")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, metavar="S", help="seconds of training before each")
    parser.add_argument(
        "--step-s", type=float, default=STEP_S, metavar="S", help="the least that a step takes, in seconds"
    )
    parser.add_argument(
        "--limit-s", type=float, metavar="S", help="the longest that a trial is watched after its event, in seconds"
    )
    parser.add_argument("--phases", action="store_true", help="show where the time to the first step goes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the medians into this file")
    parser.add_argument("--keep", action="store_true", help="keep the recorded steps and the workers' logs")
    args = parser.parse_args(argv)
    if args.svg and find_spec("matplotlib") is None:
        parser.error("--svg needs matplotlib: pip install matplotlib")
    args.repeats = args.repeats or (1 if args.quick else 5)
    args.scenario = args.scenario or list(QUICK if args.quick else SCENARIOS)
    args.contender = args.contender or list(STOCK)
    return args


if __name__ == "__main__":
    sys.exit(main())
