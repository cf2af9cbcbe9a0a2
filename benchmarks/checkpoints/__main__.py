"""What checkpoints cost: how long training stalls, processor time, memory, and the time until commit and restore.

    python -m benchmarks.checkpoints [--contender NAME ...] [--size 64MB ...] [--ranks 1 ...] [--repeats 5]

All contenders save the same state to the same server in memory. They take turns, each time in fresh processes, so that
first saves are included. docs/performance.md describes the method and has results. Contenders whose packages are not
installed are left out. Ctrl-C ends everything that was started and shows the results so far.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import psutil

from benchmarks.checkpoints.results import COLUMNS, GB, MIB, OURS, SaveTrial, goals, merge, rows, size_in_words
from benchmarks.checkpoints.s3_server import S3Server
from benchmarks.figures import progress, show
from benchmarks.programs import MARK, count, end_as_by_ctrl_c, free_port, kill_trees, parser, sweep

SIZES_BYTES, RANKS = (64_000_000, 500_000_000, 2_000_000_000), (1, 2)
NEEDS: Mapping[str, Sequence[str]] = {
    "boto3": ("boto3",),
    "dcp": ("boto3",),
    "s3torchconnector": ("s3torchconnector", "s3torchconnectorclient", "tenacity"),
    "elasticctl": ("boto3",),
    "elasticctl-tier": ("boto3",),
    "obstore": ("obstore",),
}
"""Contender -> the packages that it needs."""
KEY, BUCKET, TIER_VARIABLE = "benchmark", "benchmark", "ELASTICCTL_LOCAL_TIER"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_PROCESS_BYTES = 500 * MIB
_LIMIT_S, _LIMIT_S_PER_GB, _END_LIMIT_S = 120.0, 150.0, 20.0


class TrialFailed(Exception):
    """A trial cannot be measured; the message says why."""


def server_bytes(size_bytes: int) -> int:
    """Return the memory of a server that holds the newest save and the one being written, in chunks that are not all
    full."""
    return 2 * size_bytes + size_bytes // 8 + 128 * MIB


def needed_bytes(size_bytes: int, ranks: int) -> int:
    """Return the most memory that a trial needs: the server's, and what the largest contenders were seen to use."""
    first = size_bytes + size_bytes // ranks + 3 * size_bytes
    others = size_bytes + size_bytes // ranks + 2 * size_bytes
    return server_bytes(size_bytes) + first + (ranks - 1) * others + ranks * _PROCESS_BYTES


def environment(endpoint: str, mark: str) -> dict[str, str]:
    """Return the environment of a process that talks to the server, without real cloud settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "ELASTICCTL_"))}
    return kept | {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }


def run_trial(contender: str, size_bytes: int, ranks: int, args: argparse.Namespace, server: S3Server) -> SaveTrial:
    """Measure once; a failure is a result, too. Everything that was started has ended when this returns."""
    name = f"{contender}-{size_bytes}-{ranks}-{os.getpid()}"
    plan: dict[str, Any] = {
        "contender": contender, "size_bytes": size_bytes, "world_size": ranks, "endpoint": server.endpoint,
        "prefix": name, "idle_saves": args.idle_saves, "busy_s": args.busy_s, "settle_s": args.settle_s,
    }  # fmt: skip
    try:
        with local_tier(contender) as tier:
            plan["tier"] = tier
            saves = run_ranks({**plan, "phase": "save", "seed": 1})
            restores = run_ranks({**plan, "phase": "restore", "seed": 2, "newest": saves[0]["newest"]})
            return SaveTrial(size_bytes, ranks, contender, merge(saves, restores))
    except TrialFailed as e:
        return SaveTrial(size_bytes, ranks, contender, note=f"failed: {e}")
    finally:
        sweep(name)
        server.drop(f"{BUCKET}/")


@contextlib.contextmanager
def local_tier(contender: str) -> Iterator[str]:
    """Return a folder for the local tier, for the contender that has one; "" otherwise."""
    if not contender.endswith("-tier"):
        yield ""
        return
    folder = tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir="/dev/shm")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_ranks(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Have all ranks save or restore; return what each measured. Raises TrialFailed."""
    tier = {TIER_VARIABLE: plan["tier"]} if plan["tier"] else {}
    environ, port = environment(plan["endpoint"], plan["prefix"]) | tier, free_port()
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(RankProcess({**plan, "rank": rank, "port": port}, environ))
            for rank in range(plan["world_size"])
        ]
        until_s = time.monotonic() + _LIMIT_S + _LIMIT_S_PER_GB * plan["size_bytes"] / GB * plan["world_size"]
        for process in ranks:
            process.read_line(until_s)
        for process in ranks:
            process.go()
        return [json.loads(process.read_line(until_s))["found"] for process in ranks]


class RankProcess:
    """A process of `rank`, which is killed on exit."""

    def __init__(self, task: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when this is left
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.checkpoints.rank", json.dumps(task)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environ, text=True,
        )  # fmt: skip
        self._name = f"{task['phase']}, rank {task['rank']}"
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # it has printed all its results
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_LIMIT_S)
        kill_trees([self._process.pid])
        with self._errors, contextlib.suppress(BrokenPipeError), self._process:
            pass

    def go(self) -> None:
        """Let it begin."""
        if self._process.stdin:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def read_line(self, until_s: float) -> str:
        """Return the next line that it prints. Raises TrialFailed if it exits without one, or at `until_s`
        (monotonic)."""
        try:
            line = self._lines.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise TrialFailed(f"{self._name}: not done in time; it was ended") from None
        if not line:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            raise TrialFailed(f"{self._name}: {next((one for one in reversed(lines) if one.strip()), 'no output')}")
        return line

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")


def measure(args: argparse.Namespace) -> Iterator[SaveTrial]:
    """Run all trials, of the sizes for which there is enough memory: a machine that swaps measures nothing."""
    for repeat in range(args.repeats):
        for size_bytes in args.size:
            needed, free = needed_bytes(size_bytes, max(args.ranks)), psutil.virtual_memory().available
            if needed > free:
                progress(f"{size_in_words(size_bytes)}: needs {needed / GB:.1f} GB of memory, {free / GB:.1f} are free")
                continue
            with S3Server(server_bytes(size_bytes)) as server:
                for ranks in args.ranks:
                    for contender in args.contender[:: -1 if repeat % 2 else 1]:
                        yield run_trial(contender, size_bytes, ranks, args, server)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 130 after Ctrl-C, 1 if we missed a goal, failed, or restored something else than was
    saved."""
    args = _arguments(argv)
    end_as_by_ctrl_c()
    trials: list[SaveTrial] = []
    stopped = False
    try:
        for trial in measure(args):
            trials.append(trial)
            progress(str(trial))
    except KeyboardInterrupt:
        stopped = True
    found = list(goals(trials))
    show("saves and restores: median (p95)", COLUMNS, list(rows(trials)))
    show("goals", ["state, ranks", "contender", "figure", "", "goal", ""], found)
    wrong = any(one.found is None or not one.found.exact for one in trials if one.contender.startswith(OURS))
    return 130 if stopped else int(wrong or any(row[-1] != "met" for row in found))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--size", action="append", type=_size, metavar="SIZE", help="state, as 64MB (repeatable)")
    options.add_argument("--ranks", action="append", type=count, metavar="N", help="1, 2 or more (repeatable)")
    options.add_argument("--contender", action="append", choices=list(NEEDS), help="these only (repeatable)")
    options.add_argument("--repeats", type=count, default=5, metavar="N", help="trials of each (5)")
    options.add_argument("--idle-saves", type=count, default=4, metavar="N", help="saves without training (4)")
    options.add_argument("--busy-s", type=float, default=1.0, metavar="S", help="uploads during training (1)")
    options.add_argument("--settle-s", type=float, default=5.0, metavar="S", help="training before saves (5)")
    args = options.parse_args(argv)
    args.size, args.ranks = args.size or list(SIZES_BYTES), args.ranks or list(RANKS)
    wanted = args.contender or list(NEEDS)
    missing = {name: [one for one in NEEDS[name] if find_spec(one) is None] for name in wanted}
    args.contender = [name for name in wanted if not missing[name]]
    for name in wanted:
        if missing[name]:
            progress(f"{name} is left out: pip install {' '.join(missing[name])}")
    return args


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+) ?([KMG]B)", text.upper())
    if not found or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: a size is a number and KB, MB or GB, as 64MB")
    return round(float(found[1]) * _UNITS[found[2]])


if __name__ == "__main__":
    sys.exit(main())
