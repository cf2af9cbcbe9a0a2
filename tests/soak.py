"""Rounds of the randomized tests with new seeds, until the time is over: `make soak MINUTES=120`."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

PYTEST = (sys.executable, "-m", "pytest", "-m", "randomized", "-n", "logical", "--dist", "worksteal")
SHORTLY = ("-q", "--tb=short", "--no-summary")
"""Failures are shown immediately; see tests/support/watching.py."""
TO_END_S = 60.0
"""How long a round that is cut off has to clean up."""


@dataclass(slots=True)
class Sums:
    """What all rounds together came to. `failed`: the commands that repeat what failed."""

    rounds: int = 0
    tests: int = 0
    examples: int = 0
    failed: list[str] = field(default_factory=list)

    def add(self, seed: int, tally: Path) -> None:
        """Add the results of one round; see tests/support/randomness.py."""
        for line in tally.read_text().splitlines():
            examples, outcome, test = line.split("\t")
            self.tests += outcome != "skipped"
            self.examples += int(examples)
            if outcome == "failed":
                self.failed.append(f"make soak SEED={seed} TEST={shlex.quote(test.replace('$', '$$'))}")
                print(f"to repeat it: {self.failed[-1]}", flush=True)


def play(seed: int, tests: list[str], tally: Path, seconds: float) -> int:
    """One round; returns how pytest ended, or 0 if the time was over."""
    command = [*PYTEST, *SHORTLY, f"--seed={seed}", f"--tally={tally}", *tests]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": str(seed)}, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 0
    finally:
        if process.poll() is None:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop it as Ctrl-C does; if that takes too long, tests/support/cleanup.py ends its processes."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(TO_END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def main(minutes: float, tests: list[str]) -> int:
    """Search for so long, in all randomized tests or in these; returns the exit code."""
    sums, until, code = Sums(), time.monotonic() + 60 * minutes, 0
    with tempfile.TemporaryDirectory(prefix="ec-soak-") as folder:
        try:
            while code in (0, 1) and time.monotonic() < until:
                seed, tally = random.SystemRandom().randrange(10**9), Path(folder, str(sums.rounds))
                tally.touch()
                sums.rounds += 1
                print(f"round {sums.rounds}, seed {seed}", flush=True)
                try:
                    code = play(seed, tests, tally, until - time.monotonic())
                finally:
                    sums.add(seed, tally)
        except KeyboardInterrupt:
            print("interrupted")
    found = f"{sums.rounds} rounds, {sums.tests} tests, {sums.examples} examples; {len(sums.failed)} failed"
    print(found, *sums.failed, sep="\n")
    return code if code > 1 else len(sums.failed) > 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
