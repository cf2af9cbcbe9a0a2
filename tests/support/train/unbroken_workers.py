"""Workers of a job that loses them, at random too.

python -m tests.support.train.unbroken_workers 10    # how long a group goes without a step when a machine vanishes
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticctl_controller.core.group.failures import GroupRules
from tests.support.launcher_lab import Lab
from tests.support.processes import has_ended
from tests.support.vanish import come_back, vanish


@dataclass(frozen=True, slots=True)
class Ledger:
    """The lines of all processes, in order of time."""

    rows: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """Read what there is by now."""
        rows = []
        for file in folder.glob("ledger-*"):
            for line in file.read_text().splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:  # a process that was killed while it wrote
                    continue
        return cls(tuple(sorted(rows, key=lambda row: row["at"])))

    @property
    def made(self) -> list[dict[str, Any]]:
        """The lines of steps that were made."""
        return [row for row in self.rows if row["made"]]

    @property
    def furthest(self) -> int:
        """The last step that was made."""
        return max((row["step"] for row in self.made), default=0)

    @property
    def epoch(self) -> int:
        """The last epoch that was begun."""
        return max((row["epoch"] for row in self.rows), default=0)

    @property
    def pids(self) -> set[int]:
        """All processes that have trained."""
        return {row["pid"] for row in self.rows}

    def samples(self) -> dict[int, Counter[int]]:
        """How often each sample counts, by epoch.

        A step counts in the last group that made it: ranks that made it in an earlier one were lost with their state.
        Ranks that drain and do not stay make their last step without a word: others have gone on from there.
        """
        last: dict[int, int] = defaultdict(int)
        known, furthest = {row["step"] for row in self.made}, self.furthest
        for row in self.rows:
            if row["made"] or (row["step"] not in known and row["step"] < furthest):
                last[row["step"]] = max(last[row["step"]], row["group"])
        counted: dict[int, Counter[int]] = defaultdict(Counter)
        for row in self.rows:
            if not row["made"] and "jump" not in row and last.get(row["step"]) == row["group"]:
                counted[row["epoch"]].update(row["names"])
        return counted

    def redone(self) -> int:
        """How many steps a process has made that it had made before."""
        made = Counter((row["pid"], row["step"]) for row in self.made)
        return sum(count - 1 for count in made.values())

    def losses(self) -> dict[tuple[int, int], float]:
        """The loss of each step that was made, by step and the first sample of the rank's part."""
        return {(row["step"], row["names"][0]): row["loss"] for row in self.made if row["names"]}


SCRIPT, EVERY_KIND, IN_STAGES, COMPILED, BY_NUMBER, WITHOUT_LOADER = (
    Path(__file__).with_name(f"{name}.py")
    for name in ("unbroken", "every_kind", "in_stages", "compiled", "by_number", "without_loader")
)
SAMPLES = {SCRIPT: 240, EVERY_KIND: 250, COMPILED: 240}
ENDLESS = 100_000
ROOT = Path(__file__).resolve().parents[3]
POINTS = ("forward", "backward", "optimizer", "after", "step")
"""Places in a step where `unbroken` can be made to die."""


class Workers:
    """Workers of one job that run `unbroken`, or another script."""

    def __init__(
        self,
        lab: Lab,
        count: int,
        epochs: int,
        script: Path = SCRIPT,
        options: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        self.lab, self.epochs, self.script, self.options = lab, epochs, script, options
        self.environment = {"EPOCHS": str(epochs), "PYTHONPATH": str(ROOT), **environment}
        self.names = [f"w{number}" for number in range(count)]
        lab.add(*self.names)
        for name in self.names:
            self.start(name)

    def start(self, name: str, faults: str = "") -> None:
        known = {"FAULTS": faults} if faults else {}
        environment: dict[str, Any] = {"LAB": str(self.lab.folder), "NCCL_HOSTID": name, **self.environment, **known}
        command = sys.executable, str(self.script)
        self.lab.start(name, *command, options=self.options, forks=True, **environment)

    def join(self, name: str, faults: str = "") -> None:
        """A machine comes."""
        self.lab.add(name)
        self.names.append(name)
        self.start(name, faults)

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
        """Let training end with a later epoch that no rank has begun, and none will while this is being said."""
        before, now = self.ledger().epoch, self.ledger().epoch
        self.epochs = now + 3 + 4 * (now - before)
        (self.lab.folder / f"stop-before-{self.epochs}").touch()

    def finish(self) -> list[float]:
        """Wait for the end; returns steps, sum and norm of the final state, which is equal on all ranks.

        A worker that was still getting ready then has not trained.
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


class Storm:
    """Losses at random: of machines and of ranks, at any moment or at a point of a step, also several at once.

    Newcomers take their places. `largest`: so many workers at most. What no survivor holds is lost rightly, so one
    worker that trains is always left.
    """

    def __init__(self, lab: Lab, dice: random.Random, largest: int) -> None:
        self.lab, self.dice, self.largest = lab, dice, largest
        lab.rules = GroupRules(limit=ENDLESS)  # ranks that are killed are failures, of which there are many
        step_s = str(dice.choice((0.0, 0.01, 0.03)))
        self.workers = Workers(lab, dice.randint(2, largest), ENDLESS, STEP_S=step_s)
        self._lost = 0
        self._striking: set[str] = set()
        self.workers.train_to(5)

    def _struck(self) -> list[str]:
        """The workers whose ranks have died at their points."""
        return [file.name.rpartition("-")[2] for file in self.lab.folder.glob("struck-*")]

    def rage(self, losses: int) -> None:
        """Until so many are lost. Without survivors that train, more are waited for."""
        while self._lost + len(self._struck()) < losses:
            time.sleep(self.dice.choice((0.02, 0.1, 0.5, 3.0)) * self.dice.random())
            if len(self.workers.names) < self.largest and self.dice.random() < 0.5:
                self._add_one()
            else:
                self._lose_one()

    def _lose_one(self) -> None:
        training = self._training()
        striking = self._striking - set(self._struck())
        ready = self.dice.random() < 0.9  # else one that gets ready while the group trains
        names = [name for name in self.workers.names if (name in training) == ready]
        names = [name for name in names if set(training) - {name} - striking]
        if not names:
            return
        name = self.dice.choice(names)
        if not ready:
            self.workers.lose(name)
        elif self.dice.random() < 0.5:
            with suppress(ProcessLookupError):  # it may have died at its own point in the meantime
                os.kill(training[name], signal.SIGKILL)
        else:
            self.workers.lose(name)
        self._lost += 1

    def _add_one(self) -> None:
        name = f"n{len(self.lab.workers)}"
        fate = ""
        if self.dice.random() < 0.5:
            self._striking.add(name)
            fate = f"{self.dice.choice(POINTS)}:+{self.dice.randint(2, 100)}:{name}"
        self.workers.join(name, fate)

    def _training(self) -> dict[str, int]:
        """The process of each worker that has made the last steps, in the newest group."""
        made = self.workers.ledger().made[-4 * self.largest :]
        newest = max((row["group"] for row in made), default=0)
        found = {row["worker"]: row["pid"] for row in made if row["group"] == newest}
        return {name: pid for name, pid in found.items() if name in self.workers.names and not has_ended(pid)}


def lose_at_random(lab: Lab, dice: random.Random, losses: int, largest: int) -> None:
    """Lose workers; no survivor may have made a step again, and the samples have to be right."""
    storm = Storm(lab, dice, largest)
    workers = storm.workers
    storm.rage(losses)
    workers.train_to(workers.ledger().furthest + 10)
    workers.end_soon()
    workers.finish()
    workers.check_samples()
    assert workers.ledger().redone() == 0


def vanish_again_and_again(lab: Lab, dice: random.Random, times: int) -> Iterator[float]:
    """Let one of three machines vanish, and come back when the others train; yields how long they went without a step.

    In the end no sample may have been missed.
    """
    workers = Workers(lab, 3, ENDLESS, STEP_S="0.02", ELASTICCTL_RDZV_ENDPOINT=f"http://{lab.site.address}")

    def first_step(ranks: int, after: float) -> float:
        def made() -> list[float]:
            return [row["at"] for row in workers.ledger().made if row["of"] == ranks and row["at"] > after]

        lab.until(lambda: bool(made()))
        return min(made())

    for _ in range(times):
        workers.begin(100)  # for two seconds and more: what a step takes is known then
        pids = vanish(lab.workers[dice.choice(workers.names)].pid)
        gone = time.time()
        without_it = first_step(2, gone)
        yield without_it - gone
        come_back(pids)
        first_step(3, without_it)
    workers.end_soon()
    workers.finish()
    workers.check_samples()


def main() -> None:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="el-") as folder:
        lab = Lab(Path(folder))
        try:
            for took_s in vanish_again_and_again(lab, random.Random(1), times=int(sys.argv[1])):
                print(f"without it after {took_s:.2f} s", flush=True)
        finally:
            lab.close()


if __name__ == "__main__":
    main()
