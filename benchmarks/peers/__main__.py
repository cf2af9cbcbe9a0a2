"""The command line: see the package."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import benchmarks.peers
from benchmarks import results
from benchmarks.clusterload import Missing
from benchmarks.commandline import count, end_as_by_ctrl_c
from benchmarks.peers.contenders import CONTENDERS, KEPT
from benchmarks.peers.events import EVENTS, LAB, Happened, running
from benchmarks.recoveries.timeline import Outcome
from benchmarks.results import percentile
from elasticctl.api.errors import ElasticctlError
from elasticctl.kubeapi.connection import Connection, connect

FOLDER = Path("/tmp/kubelab-host/peers")
OPERATOR = "deployment/training-operator"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if something did not happen in time, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=benchmarks.peers.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="repeatable; all by default")
    parser.add_argument("--event", action="append", choices=EVENTS, help="repeatable; all by default")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="trials of each event (5)")
    parser.add_argument(
        "--settle-s", type=float, default=8.0, metavar="S", help="seconds of training before each event (8)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: show the results in these files"
    )
    args = parser.parse_args(argv)
    if args.merge:
        Console(width=160).print(table([one for path in args.merge for one in _read(path)]))
        return 0
    end_as_by_ctrl_c()
    say, code, began_at = Console(stderr=True, highlight=False), 0, time.time()
    found: list[Happened] = []
    try:
        _measure(args, found, say)
    except KeyboardInterrupt:
        code = 130
    except (ElasticctlError, Missing) as e:
        say.print(f"stopped: {e}", markup=False, soft_wrap=True)
        code = 1
    Console(width=160).print(table(found))
    if args.json:
        parameters = {name: str(value) for name, value in vars(args).items()} | versions()
        happened = [asdict(one) for one in found]
        args.json.write_text(
            json.dumps({**results.circumstances(parameters, began_at), "happened": happened}, indent=1) + "\n"
        )
    return code


def _measure(args: argparse.Namespace, found: list[Happened], say: Console) -> None:
    api = connect()
    FOLDER.mkdir(parents=True, exist_ok=True)
    FOLDER.chmod(0o777)  # workers run as arbitrary users
    have_operator()
    for number in range(args.repeats):
        for name in args.contender or list(CONTENDERS):
            _repeat(api, name, args, found, say)
            say.print(f"{name}: repeat {number + 1} of {args.repeats}", markup=False)


def _repeat(api: Connection, name: str, args: argparse.Namespace, found: list[Happened], say: Console) -> None:
    with CONTENDERS[name](api, FOLDER) as contender, running(api, contender, FOLDER) as job:
        for event in args.event or list(EVENTS):
            found.append(job.happens(event, args.settle_s))
            say.print(f"{found[-1]}; load average {os.getloadavg()[0]:.1f}", markup=False, soft_wrap=True)
            if found[-1].cost is None:
                job.renew()


def have_operator() -> None:
    """Ensure that the training-operator runs, on a node that no event affects."""
    if not LAB:
        raise Missing("the lab: set $ELASTICCTL_TEST_LAB to its command")
    there = subprocess.run(["kubectl", "-n", "kubeflow", "get", OPERATOR], capture_output=True, check=False, timeout=60)
    if there.returncode:
        subprocess.run([LAB, "install", "training-operator"], check=True, timeout=300)
    where = json.dumps({"spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": KEPT}}}}})
    kubectl = ["kubectl", "-n", "kubeflow"]
    subprocess.run([*kubectl, "patch", OPERATOR, "-p", where], check=True, capture_output=True, timeout=60)
    subprocess.run([*kubectl, "rollout", "status", OPERATOR], check=True, capture_output=True, timeout=120)


def versions() -> dict[str, str]:
    """Return the versions of what is compared, and of what it runs on."""
    text = subprocess.run(["kubectl", "version", "-o", "json"], capture_output=True, text=True, check=False).stdout
    server = json.loads(text).get("serverVersion", {}) if text else {}
    return {"kubernetes": server.get("gitVersion", ""), "torch": importlib.metadata.version("torch")}


def _read(path: Path) -> list[Happened]:
    def cost(figures: dict[str, Any] | None) -> Outcome | None:
        return None if figures is None else Outcome(**figures)

    happened = json.loads(path.read_text())["happened"]
    return [Happened(one["contender"], one["event"], cost(one["cost"])) for one in happened]


def table(found: Sequence[Happened]) -> Table:
    """Return medians with maxima in brackets; "none" if a job did not train again within the limit."""
    shown = Table(title="standstill in seconds; steps done again")
    names = list(dict.fromkeys(one.contender for one in found))
    for heading in ("", *(f"{name}: {what}" for name in names for what in ("standstill", "redone"))):
        shown.add_column(heading, justify="right" if heading else "left")
    for event in dict.fromkeys(one.event for one in found):
        shown.add_row(event, *(cell for name in names for cell in _cells(found, name, event)))
    return shown


def _cells(found: Sequence[Happened], name: str, event: str) -> tuple[str, str]:
    all_of_it = [one.cost for one in found if (one.contender, one.event) == (name, event)]
    costs = [cost for cost in all_of_it if cost is not None and cost.standstill_s is not None]
    lost = f"; {len(all_of_it) - len(costs)} of {len(all_of_it)}: none" if len(costs) < len(all_of_it) else ""
    if not costs:
        return lost.removeprefix("; "), ""
    still = sorted(cost.standstill_s for cost in costs if cost.standstill_s is not None)
    redone = sorted(float(cost.steps_redone) for cost in costs)
    numbers = f"{percentile(still, 0.5):.2f} ({still[-1]:.2f}){lost}"
    return numbers, f"{percentile(redone, 0.5):.0f} ({redone[-1]:.0f})"


if __name__ == "__main__":
    sys.exit(main())
