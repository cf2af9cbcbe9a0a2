"""How long commands take, compared with kubectl on the same cluster, and what following many workers costs.

    python benchmarks/cli.py [--runs 9] [--jobs 1000] [--workers 64] [--json FILE] [--place local --place fake]

Places are a local cluster, a small API server that answers immediately (`fake`), and, if $KUBECONFIG is set, the
cluster that it points at (`kube`; --image and --python say what its workers run). Whole processes are timed, in turns;
the first turn only warms up. The lines that a follower prints are checked: each has to appear once, and those of each
worker in order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.commandline import count
from benchmarks.commands.places import TALKER, Place, Talk, fake, kube, kubectl, local
from benchmarks.startup import elasticctl
from elasticctl.api.spec import PLURAL

HELP_AIM_MS, MANY_AIM_MS, RATIO_AIM, CORES_AIM = 150.0, 1000.0, 2.0, 1.0
_LINE = re.compile(rb"worker-(\d+)\b.*line (\d+)$")
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Timed:
    """One run of a command: milliseconds of wall time, and of processor time (user and system)."""

    place: str
    jobs: int
    command: str
    wall_ms: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Followed:
    """What a follower has read: how many lines were missing, duplicated, or out of order.

    `cores`: its processor time divided by the wall time in which lines arrived.
    """

    place: str
    follower: str
    workers: int
    lines: int
    per_s: float
    lost: int
    doubled: int
    disordered: int
    cores: float


def pairs(name: str, rivals: bool) -> dict[str, list[str]]:
    """Return the commands to measure, by name; with `rivals`, also kubectl's counterparts."""
    ours = {
        "elasticctl --help": [elasticctl(), "--help"],
        "elasticctl list": [elasticctl(), "list"],
        "elasticctl list -o json": [elasticctl(), "list", "-o", "json"],
        f"elasticctl status {name}": [elasticctl(), "status", name],
    }
    theirs = {
        "kubectl --help": kubectl("--help"),
        "kubectl get": kubectl("get", PLURAL),
        "kubectl get -o json": kubectl("get", PLURAL, "-o", "json"),
        f"kubectl get {name}": kubectl("get", PLURAL, name),
    }
    return {**ours, **{name: argv for name, argv in theirs.items() if rivals and argv}}


def time_commands(place: Place, jobs: int, runs: int) -> Iterator[Timed]:
    """Run each command `runs` times, in turns."""
    commands = pairs("job-0000", rivals=place.name != "local")
    for turn in range(runs + 1):
        for name, argv in commands.items():
            wall_ms, cpu_ms = _run(argv, place.environ)
            if turn:
                yield Timed(place.name, jobs, name, wall_ms, cpu_ms)


def follow(place: Place, name: str, argv: Sequence[str], talk: Talk) -> Followed:
    """Read everything that the workers of the job `talks` print."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(argv, env=place.environ, stdout=output, stdin=subprocess.DEVNULL)
        first_at, last_at = _span_of_lines(output.fileno(), process)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(argv)} ended with status {status}")
        output.seek(0)
        said = output.read()
    lost, doubled, disordered = reckon(said, talk)
    lines, took_s = talk.workers * talk.lines, max(last_at - first_at, 1e-3)
    cores = (used.ru_utime + used.ru_stime) / took_s
    return Followed(place.name, name, talk.workers, lines, lines / took_s, lost, doubled, disordered, cores)


def reckon(said: bytes, talk: Talk) -> tuple[int, int, int]:
    """Return how many lines are missing, duplicated, and after a later line of the same worker."""
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    for line in said.splitlines():
        found = _LINE.search(line)
        if found:
            numbers[int(found[1])].append(int(found[2]))
    whole = sum(len(set(each)) for each in numbers.values())
    doubled = sum(len(each) for each in numbers.values()) - whole
    in_turn = (pair for each in numbers.values() for pair in itertools.pairwise(each))
    return talk.workers * talk.lines - whole, doubled, sum(later < earlier for earlier, later in in_turn)


def _span_of_lines(descriptor: int, process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Return when a process started to write and when it last wrote, observed from outside, which does not slow it
    down."""
    first_at = last_at = time.monotonic()
    deadline, size = first_at + _LIMIT_S, 0
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        now, grown = time.monotonic(), os.fstat(descriptor).st_size
        if grown != size:
            first_at, last_at, size = (now if not size else first_at), now, grown
        if now > deadline:
            process.kill()
        time.sleep(0.05)
    return first_at, last_at


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[float, float]:
    """Return milliseconds of wall and of processor time; the command must succeed, and its output is not a terminal."""
    began = time.perf_counter()
    process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall_ms = (time.perf_counter() - began) * 1000
    process.returncode = status
    if status:
        raise SystemExit(f"{' '.join(argv)} ended with status {status}")
    return wall_ms, (used.ru_utime + used.ru_stime) * 1000


def measure(place: Place, args: argparse.Namespace) -> tuple[list[Timed], list[Followed]]:
    """Measure everything at one place."""
    timed: list[Timed] = []
    for jobs in sorted({1, args.jobs}):
        place.fill(jobs)
        timed += time_commands(place, jobs, args.runs)
    followed = []
    if args.workers:
        every_s = args.workers / args.lines_per_s
        talk = Talk(args.workers, max(1, round(args.seconds / every_s)), every_s, args.settle_s)
        place.talk(talk)
        followed.append(follow(place, "elasticctl logs -f", [elasticctl(), "logs", "-f", TALKER], talk))
    return timed, followed


def tables(timed: Sequence[Timed], followed: Sequence[Followed]) -> Iterator[Table]:
    """Return the results as tables."""
    times = Table("place", "jobs", "command", "median ms", "lowest", "cpu ms", "aim ms", title="Commands")
    medians = {key: statistics.median(item.wall_ms for item in items) for key, items in group_runs(timed).items()}
    for (place, jobs, command), items in group_runs(timed).items():
        cpu_ms = statistics.median(item.cpu_ms for item in items)
        aim = _aim(place, jobs, command, medians)
        median, lowest = medians[place, jobs, command], min(item.wall_ms for item in items)
        cells = (f"{median:.0f}", f"{lowest:.0f}", f"{cpu_ms:.0f}", "" if aim is None else f"{aim:.0f}")
        times.add_row(place, str(jobs), command, *cells)
    yield times
    titles = ("place", "follower", "workers", "lines", "lines/s", "lost", "double", "disordered", "cores")
    logs = Table(*titles, title="Logs")
    for each in followed:
        figures = (each.workers, each.lines, f"{each.per_s:,.0f}", each.lost, each.doubled, each.disordered)
        logs.add_row(each.place, each.follower, *map(str, figures), f"{each.cores:.2f}")
    yield logs


def group_runs(timed: Sequence[Timed]) -> dict[tuple[str, int, str], list[Timed]]:
    """Return the runs of each command at each place."""
    found: defaultdict[tuple[str, int, str], list[Timed]] = defaultdict(list)
    for item in timed:
        found[item.place, item.jobs, item.command].append(item)
    return dict(found)


def _aim(place: str, jobs: int, command: str, medians: Mapping[tuple[str, int, str], float]) -> float | None:
    """Return the limit for a command; twice kubectl's time if that was measured."""
    if command == "elasticctl --help":
        return HELP_AIM_MS
    if command == "elasticctl list" and jobs >= 1000:
        return MANY_AIM_MS
    rival = {"elasticctl list": "kubectl get", "elasticctl list -o json": "kubectl get -o json"}
    theirs = medians.get((place, jobs, rival.get(command, command.replace("elasticctl status", "kubectl get"))))
    return None if theirs is None or command.startswith("kubectl") else RATIO_AIM * theirs


def places(names: Sequence[str], args: argparse.Namespace) -> Iterator[AbstractContextManager[Place]]:
    """Return the requested places; by default all that are available."""
    known = names or ["local", "fake", *(["kube"] if os.environ.get("KUBECONFIG") else [])]
    for name in known:
        if name == "local":
            yield local()
        elif name == "fake":
            yield fake()
        else:
            yield kube(args.image, args.python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", action="append", choices=["local", "fake", "kube"], default=[])
    parser.add_argument("--runs", type=count, default=9)
    parser.add_argument("--jobs", type=count, default=1000, help="jobs in the long list")
    parser.add_argument("--workers", type=int, default=64, help="workers whose output is followed; 0: none")
    parser.add_argument("--lines-per-s", type=float, default=2000.0, help="lines that all workers print together")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the workers print")
    parser.add_argument("--settle-s", type=float, default=30.0, help="how long to wait for the workers to start")
    parser.add_argument("--image", default="lab/base:dev", help="the image of workers on Kubernetes")
    parser.add_argument("--python", default="python3", help="the Python interpreter in that image")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to this file")
    args = parser.parse_args()
    began_at, timed, followed = datetime.now(UTC), list[Timed](), list[Followed]()
    for opened in places(args.place, args):
        with opened as place:
            print(f"measuring: {place.name}", file=sys.stderr)
            here, read = measure(place, args)
            timed, followed = timed + here, followed + read
    for table in tables(timed, followed):
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    if args.json:
        args.json.write_text(json.dumps(as_json(timed, followed, began_at), indent=1) + "\n")


def as_json(timed: Sequence[Timed], followed: Sequence[Followed], began_at: datetime) -> dict[str, Any]:
    """Return all results as JSON."""
    return {
        "benchmark": "cli",
        "schema": results.SCHEMA,
        "began_at": began_at.isoformat(timespec="seconds"),
        "machine": results.machine(),
        "versions": results.versions(),
        "commands": [asdict(item) for item in timed],
        "logs": [asdict(item) for item in followed],
    }


if __name__ == "__main__":
    main()
