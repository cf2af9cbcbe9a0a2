"""What keeping ranks in their processes costs a step in which nothing fails, compared with DistributedDataParallel.

    python -m benchmarks.step_overhead [--workers 3] [--blocks 40] [--step-s 0.01]

Both train in turns in the same processes, in blocks of steps, with the same model and the same group, so that other
load on the machine affects both alike. The output is the median duration of a step of rank 0, and the processor time of
a step without its sleep, which is meaningful on a busy machine, too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.figures import show
from benchmarks.programs import ROOT, count, local_cluster, parser, run_elasticctl
from benchmarks.recovery.task import GLOBAL_BATCH, build_data, build_model, build_optimizer
from elasticctl_train import Run, SavePolicy

STEPS_OF_BLOCK = 25
OURS, PLAIN = "elasticctl", "DistributedDataParallel"
GOAL = 0.02
"""Of a plain step."""


class Clock:
    """The duration of each step, and the processor time of each block, by contender."""

    def __init__(self) -> None:
        self.wall_s: dict[str, list[float]] = {OURS: [], PLAIN: []}
        self.cpu_s: dict[str, list[float]] = {OURS: [], PLAIN: []}

    @contextmanager
    def block(self, name: str) -> Iterator[list[float]]:
        """Time a block of steps; append the time after each step to the list."""
        began, marks = time.process_time(), [time.perf_counter()]
        yield marks
        self.cpu_s[name].append((time.process_time() - began) / (len(marks) - 1))
        self.wall_s[name] += [after - before for before, after in pairwise(marks)]

    def result(self) -> dict[str, dict[str, float]]:
        """Return milliseconds: the median of a step, and of a block's mean processor time."""
        return {
            name: {"stepMs": 1000 * median(self.wall_s[name]), "cpuMs": 1000 * median(self.cpu_s[name])}
            for name in (PLAIN, OURS)
        }


class Both:
    """A rank that trains in both ways; each is a generator that makes one step when it is advanced."""

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, step_s: float) -> None:
        self.run, self.data, self.step_s = run, build_data(), step_s
        self.steps = {OURS: self._steps_of_ours(optimizer)}
        next(self.steps[OURS])  # must come first: a collective of the script's own would keep ranks from staying
        self.steps[PLAIN] = self._plain_steps()
        next(self.steps[PLAIN])

    def _steps_of_ours(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        for _ in self.run.epochs(1_000_000):
            for inputs, labels, _ in self.run.loader(self.data, global_batch=GLOBAL_BATCH, shuffle=True):
                time.sleep(self.step_s)
                loss = nn.functional.cross_entropy(self.run.model(inputs), labels)
                optimizer.zero_grad()
                self.run.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                self.run.step(loss=loss)
                yield

    def _plain_steps(self) -> Iterator[None]:
        net = build_model()
        model, optimizer = nn.parallel.DistributedDataParallel(net), build_optimizer(net)
        sampler: DistributedSampler[object] = DistributedSampler(self.data)
        for epoch in range(1_000_000):
            sampler.set_epoch(epoch)
            for inputs, labels, _ in DataLoader(self.data, GLOBAL_BATCH // self.run.world_size, sampler=sampler):
                time.sleep(self.step_s)
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                loss.item()  # like a script that prints its loss, and like `run.step(loss=loss)`
                yield


def train() -> None:
    """Train as a rank; rank 0 prints the result as JSON."""
    torch.set_num_threads(1)
    model, clock = build_model(), Clock()
    optimizer = build_optimizer(model)
    never = SavePolicy(every_s=100_000.0)
    with Run(os.environ["STORAGE"], model=model, optimizer=optimizer, save=never) as run:
        both = Both(run, optimizer, float(os.environ["STEP_S"]))
        for turn in range(int(os.environ["BLOCKS"]) + 1):
            for name in (PLAIN, OURS):
                with (clock if turn else Clock()).block(name) as marks:  # the first ones warm up
                    for _ in range(STEPS_OF_BLOCK):
                        next(both.steps[name])
                        marks.append(time.perf_counter())
        if run.rank == 0:
            print("RESULT " + json.dumps({**clock.result(), "ranks": run.world_size}), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Train on a local cluster, and print what rank 0 measured; return 1 if the goal is missed."""
    options = parser(__doc__)
    options.add_argument("--workers", type=count, default=3)
    options.add_argument("--blocks", type=count, default=40, help=f"blocks of {STEPS_OF_BLOCK} steps, of each kind")
    options.add_argument("--step-s", type=float, default=0.01, help="the least that a step takes, in seconds")
    args = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, local_cluster() as environ:
        known = {"BLOCKS": args.blocks, "STEP_S": args.step_s, "STORAGE": Path(folder, "state").as_uri()}
        known |= {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, "RANK_OF_BENCHMARK": 1}
        size = [f"--workers={args.workers}", f"--min-workers={args.workers}"]
        variables = [f"--env={name}={value}" for name, value in known.items()]
        printed = run_elasticctl("submit", "--name=overhead", *size, *variables, __file__, environ=environ)
    lines = [line.partition("RESULT ")[2] for line in printed.splitlines() if "RESULT " in line]
    found = json.loads(lines[0])
    plain_ms = found[PLAIN]["stepMs"]
    rows = []
    for kind, title in (("stepMs", "a step"), ("cpuMs", "its processor time, without its sleep")):
        more_ms = found[OURS][kind] - found[PLAIN][kind]
        figures = (found[PLAIN][kind], found[OURS][kind], more_ms)
        rows.append([title, *(f"{value:.3f}" for value in figures), f"{100 * more_ms / plain_ms:.1f} %"])
    columns = ["", f"{PLAIN}, ms", f"{OURS}, ms", "more, ms", "of a plain step"]
    show(f"{found['ranks']} ranks; goal: at most {100 * GOAL:.0f} % more than a plain step", columns, rows)
    return int(found[OURS]["stepMs"] > (1 + GOAL) * plain_ms)


if __name__ == "__main__":
    if os.environ.get("RANK_OF_BENCHMARK"):
        train()
    else:
        sys.exit(main())
