"""Workers of a job that loses them, and a search for a loss that costs a step.

python -m tests.support.train.unbroken_workers --losses 1500 [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.launcher_lab import Lab
from tests.support.train.ledger import Ledger

SCRIPT, EVERY_KIND = (Path(__file__).with_name(name) for name in ("unbroken.py", "every_kind.py"))
SAMPLES = {SCRIPT: 240, EVERY_KIND: 250}
ENDLESS = 100_000
ROOT = Path(__file__).resolve().parents[3]
PER_JOB = 25


class Workers:
    """Workers of one job that run `unbroken`, or another script."""

    def __init__(self, lab: Lab, count: int, epochs: int, script: Path = SCRIPT, **environment: str) -> None:
        self.lab, self.epochs, self.script = lab, epochs, script
        self.environment = {"EPOCHS": str(epochs), "PYTHONPATH": str(ROOT), **environment}
        self.names = [f"w{number}" for number in range(count)]
        lab.add(*self.names)
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        self.lab.start(name, sys.executable, str(self.script), LAB=str(self.lab.folder), **self.environment)

    def ledger(self) -> Ledger:
        return Ledger.read(self.lab.folder)

    def train_to(self, step: int) -> None:
        self.lab.until(lambda: self.ledger().furthest >= step)

    def begin(self, steps: int) -> None:
        """Until all train together, and have made so many steps."""
        self.lab.until(lambda: any(row["of"] == len(self.names) for row in self.ledger().made))
        self.train_to(self.ledger().furthest + steps)

    def lose(self, name: str) -> None:
        """A machine is gone, with all that ran on it."""
        self.lab.kill(name)
        self.names.remove(name)

    def end_soon(self) -> None:
        """Let training end with a later epoch that no rank has begun."""
        self.epochs = self.ledger().epoch + 3
        (self.lab.folder / f"stop-before-{self.epochs}").touch()

    def finish(self) -> list[float]:
        """Wait for the end; returns steps, sum and norm of the final state, which is equal on all ranks.

        Whoever was still getting ready then has not trained.
        """
        assert {self.lab.wait(name) for name in self.names} == {0}
        ends = [json.loads(file.read_text()) for file in self.lab.folder.glob("end-*")]
        assert ends
        assert all(end == ends[0] for end in ends)
        found: list[float] = ends[0]
        return found

    def check_samples(self) -> None:
        """Each sample of each epoch was trained on exactly once."""
        counted = self.ledger().samples()
        assert sorted(counted) == list(range(self.epochs))
        for epoch, samples in counted.items():
            assert sorted(samples) == list(range(SAMPLES[self.script])), epoch
            assert set(samples.values()) == {1}, epoch


def lose_at_random(lab: Lab, dice: random.Random, losses: int) -> Workers:
    """Lose workers at any moment, sometimes several at once, each for a new one; the samples have to be right."""
    workers = Workers(lab, dice.randint(2, 4), ENDLESS, STEP_S=str(dice.choice((0.0, 0.01, 0.03))))
    workers.train_to(5)
    lost = 0
    while lost < losses:
        time.sleep(dice.choice((0.02, 0.1, 0.5, 3.0)) * dice.random())
        if len(workers.names) > 1 and dice.random() < 0.6:
            workers.lose(dice.choice(workers.names))
            lost += 1
        elif len(workers.names) < 5:
            name = f"n{len(lab.workers)}"
            lab.add(name)
            workers.start(name)
            workers.names.append(name)
    workers.train_to(workers.ledger().furthest + 10)
    workers.end_soon()
    workers.finish()
    workers.check_samples()
    return workers


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    for number in range(-(-flags.losses // PER_JOB)):
        seed = flags.seed + number
        with tempfile.TemporaryDirectory(prefix="el-", dir="/tmp") as folder:
            lab = Lab(Path(folder))
            try:
                workers = lose_at_random(lab, random.Random(seed), PER_JOB)
                made = workers.ledger().furthest
                sys.stdout.write(f"seed {seed}: {PER_JOB} losses in {made} steps, none of them lost\n")
                sys.stdout.flush()
            finally:
                lab.close()


if __name__ == "__main__":
    main()
