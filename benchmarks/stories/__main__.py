"""The command line: see the package."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

import benchmarks.stories
from benchmarks import results
from benchmarks.clusterload import Missing
from benchmarks.commandline import count, end_as_by_ctrl_c
from benchmarks.leaders.account import controller, install_rights
from benchmarks.replicas import Replicas, prepare
from benchmarks.results import percentile
from benchmarks.stories.arrangements import ARRANGEMENTS
from benchmarks.stories.play import Told, telling
from benchmarks.stories.story import EVENTS
from elasticctl.api.errors import ElasticctlError
from elasticctl.kubeapi.connection import connect


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if jobs did not come to rest, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=benchmarks.stories.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arrangement", action="append", choices=ARRANGEMENTS, required=True, help="repeatable")
    parser.add_argument("--stories", type=count, default=20, metavar="N", help="stories to tell (20)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the seed of the first story (0)")
    parser.add_argument("--events", type=count, default=EVENTS, metavar="N", help=f"events in each story ({EVENTS})")
    parser.add_argument("--train", action="store_true", help="have workers train, and count repeated steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    args = parser.parse_args(argv)
    end_as_by_ctrl_c()
    say, code, began_at = Console(stderr=True, highlight=False), 0, time.time()
    told: dict[str, list[Told]] = {name: [] for name in args.arrangement}
    try:
        for name in args.arrangement:
            _tell(name, args, told[name], say)
    except KeyboardInterrupt:
        code = 130
    except (ElasticctlError, Missing) as e:
        say.print(f"stopped: {e}", markup=False, soft_wrap=True)
        code = 1
    Console(width=160).print(table(told))
    if args.json:
        parameters = {name: str(value) for name, value in vars(args).items()}
        stories = {name: [asdict(one) for one in found] for name, found in told.items()}
        args.json.write_text(
            json.dumps({**results.circumstances(parameters, began_at), "stories": stories}, indent=1) + "\n"
        )
    return code


def _tell(name: str, args: argparse.Namespace, told: list[Told], say: Console) -> None:
    arrangement, api = ARRANGEMENTS[name], connect()
    prepare(api)
    install_rights(api)  # otherwise the controller runs as the administrator, whom the audit log does not cover
    with tempfile.TemporaryDirectory() as folder:
        replicas = Replicas(Path(folder))
        try:
            replicas.start(controller(Path(folder)), flags=arrangement.flags)
            replicas.leader()
            with telling(api, arrangement, train=args.train) as teller:
                for seed in range(args.first, args.first + args.stories):
                    told.append(teller.tell(seed, args.events))
                    say.print(f"{name}, story {seed}:", markup=False)
                    for came in told[-1].came:
                        worse = "" if came.rest.is_ideal else f"  {came.rest}"
                        say.print(
                            f"  {came.event}: {came.settled_s:.1f} s, {came.stands}{worse}",
                            markup=False,
                            soft_wrap=True,
                        )
        finally:
            replicas.stop()


def table(told: dict[str, list[Told]]) -> Table:
    """Return the figures as a table."""
    shown = Table(title="stories of three jobs in two projects on six GPUs")
    headings = ("stories", "events", "settled s: median", "p95", "idle GPUs: mean", "ends with idle GPUs")
    for heading in ("", *headings, "ends where a minimum waits", "requests an event", "steps redone, of"):
        shown.add_column(heading, justify="right" if heading else "left")
    for name, stories in told.items():
        if stories:
            shown.add_row(name, *figures(stories))
    return shown


def figures(stories: Sequence[Told]) -> list[str]:
    """Return the row of one arrangement."""
    came = [one for story in stories for one in story.came]
    settled = sorted(one.settled_s for one in came)
    requests: Counter[str] = Counter()
    for story in stories:
        requests.update(story.requests)
    redone = [story.steps_redone for story in stories if story.steps_redone is not None]
    return [
        f"{len(stories)}",
        f"{len(came)}",
        f"{percentile(settled, 0.5):.1f}",
        f"{percentile(settled, 0.95):.1f}",
        f"{statistics.mean(one.rest.idle for one in came):.2f}",
        f"{sum(bool(one.rest.idle) for one in came)}",
        f"{sum(bool(one.rest.waits) for one in came)}",
        ", ".join(f"{who} {number / len(came):.0f}" for who, number in sorted(requests.items())),
        f"{sum(redone)}, {sum(story.steps for story in stories)}" if redone else "",
    ]


if __name__ == "__main__":
    sys.exit(main())
