"""How long a researcher waits between `elasticctl submit` and the first step of a small script, on the local cluster.

    python benchmarks/first_step.py [--rounds 3] [--warm 3] [--workers 2]

Each round starts with a new, empty home. Its first submit starts the local cluster, and is called cold; the warm ones
follow it. The script trains a small model under DistributedDataParallel; its first step ends with the optimizer's.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.commandline import count, installed_environment
from benchmarks.results import Spread
from benchmarks.startup import elasticctl
from elasticctl.settings import contexts

AIM_S = {"cold": 12.0, "warm": 5.0}
FIRST_BYTE_AIM_S = 0.3
_SCRIPT = """\
import time

import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    if step == 0:
        print("first step at", time.time(), flush=True)
"""
_FIRST_STEP = re.compile(rb"first step at ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Waited:
    """Seconds from the start of a submit to its first byte of output, and to the end of its job's first step."""

    start: str
    first_byte_s: float
    first_step_s: float


def submit(script: Path, workers: int, start: str, environ: Mapping[str, str]) -> Waited:
    """Submit a job and follow it until it ends; return how long its first step took. Raises SystemExit if it fails."""
    began_at = time.time()
    argv = [elasticctl(), "submit", script.name, "--workers", str(workers)]
    with subprocess.Popen(
        argv, cwd=script.parent, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None
        said = os.read(run.stdout.fileno(), 65536)
        first_byte_s = time.time() - began_at
        said += run.stdout.read()
    found = _FIRST_STEP.search(said)
    if run.returncode or found is None:
        raise SystemExit(f"the submit ended with {run.returncode}:\n{said.decode(errors='replace')}")
    return Waited(start, first_byte_s, float(found[1]) - began_at)


def measure(rounds: int, warm: int, workers: int) -> Iterator[Waited]:
    """Yield every submit of every round, in order."""
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="ec-", dir="/tmp") as home:
            script = Path(home, "code", "train.py")
            script.parent.mkdir()
            script.write_text(_SCRIPT)
            kept = Path(home, "home")
            environ = {**installed_environment(), "ELASTICCTL_HOME": str(kept), "ELASTICCTL_CONTEXT": contexts.LOCAL}
            try:
                yield submit(script, workers, "cold", environ)
                for _ in range(warm):
                    yield submit(script, workers, "warm", environ)
            finally:
                subprocess.run([elasticctl(), "local", "down"], env=environ, capture_output=True, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--warm", type=count, default=3, help="submits after the first one of a round")
    parser.add_argument("--workers", type=count, default=2)
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", file=sys.stderr)
    waits = list(measure(args.rounds, args.warm, args.workers))
    for start, aim_s in AIM_S.items():
        those = [wait for wait in waits if wait.start == start]
        step, byte = Spread.of(wait.first_step_s for wait in those), Spread.of(wait.first_byte_s for wait in those)
        print(f"{start}, {len(those)} submits")
        print(f"  first step after {step.p50:.1f} s, p95 {step.p95:.1f} s (aim {aim_s:g} s)")
        print(f"  first byte after {byte.p50:.2f} s, p95 {byte.p95:.2f} s (aim {FIRST_BYTE_AIM_S:g} s)")


if __name__ == "__main__":
    main()
