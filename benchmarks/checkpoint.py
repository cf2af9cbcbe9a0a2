"""What checkpoints cost: how long training stalls, processor time, memory, and the time until commit and restore.

    python benchmarks/checkpoint.py [--size 64MB] [--ranks 1] [--repeats 5] [--quick] [--server versitygw] [--json FILE]

All contenders save the same state to the same server in memory. They take turns, each time in fresh processes, so that
first saves are included and a busy moment of the machine affects all of them. docs/performance.md describes the method
and has results. Ctrl-C ends everything that was started and shows the results so far.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.checkpoints import results, trials, versity
from benchmarks.checkpoints.results import Measurement, size_in_words
from benchmarks.checkpoints.trials import CLEANING, NEEDS, Failed, Plan, Server, Sink
from benchmarks.commandline import count, end_as_by_ctrl_c
from benchmarks.results import Spread

SIZES_BYTES = (64_000_000, 500_000_000, 2_000_000_000)
RANKS = (1, 2)
COMMITS = 10_000
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_LARGE_BYTES = 10**9
_LISTING_SINK_BYTES = 64 << 20


@dataclass(slots=True)
class Session:
    """One run of the benchmark, with its results so far."""

    say: Console
    measurements: list[Measurement] = field(default_factory=list)
    listing: dict[str, Any] = field(default_factory=dict)

    def measure(self, plan: Plan, sink: Server) -> None:
        """Run one trial and keep its result."""
        began_s = time.monotonic()
        found = trials.run_trial(plan, sink)
        self.measurements.append(found)
        self.say.print(_line(found, time.monotonic() - began_s), markup=False, soft_wrap=True)

    def list_commits(self) -> None:
        """Count the requests that finding the newest of many commits takes."""
        with Sink(_LISTING_SINK_BYTES) as sink:
            command = [sys.executable, "-m", "benchmarks.checkpoints.listing", sink.endpoint, str(COMMITS)]
            environ = trials.environment(sink.endpoint, "listing")
            done = subprocess.run(
                command, env=environ, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True
            )
        self.listing = json.loads(done.stdout)
        self.say.print(f"newest of {COMMITS} commits: {self.listing}", markup=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 130 after Ctrl-C, 1 if we missed an aim, failed, or restored something else than was
    saved."""
    args = _arguments(argv)
    end_as_by_ctrl_c()
    began_at = time.time()
    session = Session(Console(stderr=True, highlight=False))
    stopped = False
    try:
        _run(session, args)
    except KeyboardInterrupt:
        session.say.print("stopped; all processes have been ended")
        stopped = True
    except Failed as e:
        session.say.print(f"stopped: {e}", markup=False)
        stopped = True
    missed = _show(session, args, began_at)
    return 130 if stopped else int(missed)


def _run(session: Session, args: argparse.Namespace) -> None:
    sizes = [size_bytes for size_bytes in args.size if _fits(session, size_bytes, max(args.ranks))]
    if args.listing and sizes:
        session.list_commits()
    for repeat in range(args.repeats):
        for size_bytes in sizes:
            with versity.Versity() if args.server else Sink(trials.sink_bytes(size_bytes)) as sink:
                for ranks in args.ranks:
                    for contender in args.contender:
                        idle = args.idle_saves or (2 if size_bytes >= _LARGE_BYTES else 4)
                        session.measure(
                            Plan(contender, size_bytes, ranks, repeat, idle, args.busy_s, args.settle_s), sink
                        )


def _fits(session: Session, size_bytes: int, ranks: int) -> bool:
    """Return whether there is enough memory: a machine that swaps or kills processes measures nothing."""
    needed, free = trials.needed_bytes(size_bytes, ranks), psutil.virtual_memory().available
    if needed > free:
        session.say.print(
            f"{size_in_words(size_bytes)} with {ranks} ranks is left out: it takes {needed / 2**30:.1f} GiB of memory, "
            f"{free / 2**30:.1f} are free; close other programs, or give a smaller --size or fewer --ranks",
            markup=False,
            soft_wrap=True,
        )
    return needed <= free


def _show(session: Session, args: argparse.Namespace, began_at: float) -> bool:
    """Print and write the results; return whether something went wrong."""
    summaries = results.summarise(session.measurements)
    aims = results.aims(summaries)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if summaries:
        console.print(results.table(summaries))
        console.print(results.aims_table(aims))
    if args.json:
        parameters = {
            "command": shlex.join(["python", "benchmarks/checkpoint.py", *sys.argv[1:]]),
            "repeats": args.repeats,
            "sizesBytes": args.size,
            "ranks": args.ranks,
            "busyS": args.busy_s,
            "settleS": args.settle_s,
            "server": args.server or "sink",
        }
        found = results.as_json(parameters, session.measurements, began_at) | {"listing": session.listing}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.svg and summaries:
        from benchmarks.checkpoints import (
            plot,
        )  # needs matplotlib: takes seconds to import, and is only in the extra `dev`

        plot.save_svg(summaries, args.svg)
    one_page = sum(session.listing.get("requests", {}).values()) <= 2
    ours = [one for one in session.measurements if one.contender.startswith(results.OURS)]
    return not one_page or any(not aim.met for aim in aims) or any(not one.exact for one in ours)


def _line(found: Measurement, took_s: float) -> str:
    """Describe one trial in a line."""
    words = [size_in_words(found.size_bytes), f"x {found.ranks}", found.contender, f"#{found.repeat}"]
    if found.holds:
        hold, cpu = Spread.of(found.holds), Spread.of(found.cpu_s_per_gb[1:])
        words += [f"standstill {found.holds[0]:.2f} then {hold.p50:.2f} x memcpy", f"CPU {cpu.p50:.2f} s/GB"]
        words += [f"committed {Spread.of(found.commits_s[1:]).p50:.2f} s", f"restored {found.first_step_s:.2f} s"]
        words += [f"step rate {found.step_rate:.0%}", f"memory {(found.extra_bytes or 0) / 2**20:.0f} MiB"]
        words += [] if found.exact else ["NOT WHAT WAS SAVED"]
    return "  ".join([*words, found.note, f"({took_s:.0f} s)"])


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", type=_size, metavar="SIZE", help="state, as 64MB (may be repeated)")
    parser.add_argument("--ranks", action="append", type=count, metavar="N", help="1, 2 or more (may be repeated)")
    parser.add_argument("--contender", action="append", choices=list(NEEDS), help="these only (may be repeated)")
    parser.add_argument("--server", choices=[versity.PROGRAM], help="a real server on the PATH instead of the sink")
    parser.add_argument("--repeats", type=count, metavar="N", help="trials of each (5; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="once each, by default with 64 MB")
    parser.add_argument("--idle-saves", type=count, metavar="N", help="saves of an idle process, besides the first")
    parser.add_argument("--busy-s", type=float, default=1.0, metavar="S", help="seconds of uploads beside training (1)")
    parser.add_argument("--settle-s", type=float, default=5.0, metavar="S", help="seconds of training before saves (5)")
    parser.add_argument("--no-listing", action="store_false", dest="listing", help=f"leave out the {COMMITS} commits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the medians into this file")
    args = parser.parse_args(argv)
    if args.svg and find_spec("matplotlib") is None:
        parser.error("--svg needs matplotlib: pip install matplotlib")
    args.repeats = args.repeats or (1 if args.quick else 5)
    args.size = args.size or list(SIZES_BYTES[:1] if args.quick else SIZES_BYTES)
    args.ranks = args.ranks or list(RANKS)
    if args.server and shutil.which(args.server) is None:
        parser.error(f"--server {args.server}: there is no such program on the PATH")
    able = CLEANING if args.server else list(NEEDS)
    args.contender = args.contender or able
    if unable := set(args.contender) - set(able):
        names = ", ".join(sorted(unable))
        parser.error(f"--server {args.server}: not for {names}, whose old saves only the sink deletes")
    args.listing = args.listing and not args.server
    return args


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+) ?([KMG]B)", text.upper())
    if not found or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: a size is a number and KB, MB or GB, as 64MB")
    return round(float(found[1]) * _UNITS[found[2]])


if __name__ == "__main__":
    sys.exit(main())
