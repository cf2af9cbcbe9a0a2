"""How long the command line takes to answer, beside the interpreter alone and beside kubectl.

    python benchmarks/startup.py [--runs 15] [--json]

Prints the median wall time of each command, in milliseconds. The commands take turns, so that a busy moment of the
machine touches all of them. `list` runs against a local cluster of its own, started before and ended after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

AIM_MS = {"elasticctl --help": 150.0}


def elasticctl() -> str:
    """The installed script beside this interpreter."""
    found = Path(sys.executable).parent / "elasticctl"
    if not found.exists():
        raise SystemExit(f"{found} is not there: install elasticctl into this environment first (pip install -e .)")
    return str(found)


def commands() -> dict[str, list[str]]:
    """What is measured, by the name it is shown under."""
    found = {
        "elasticctl --help": [elasticctl(), "--help"],
        "elasticctl list": [elasticctl(), "list"],
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    kubectl = shutil.which("kubectl")
    if kubectl:
        found["kubectl version --client"] = [kubectl, "version", "--client"]
    return found


def measure(runs: int, environ: Mapping[str, str]) -> dict[str, list[float]]:
    """Wall times in milliseconds of each command, `runs` each, in turns; the first turn only warms up."""
    times: dict[str, list[float]] = {name: [] for name in commands()}
    for turn in range(runs + 1):
        for name, argv in commands().items():
            started = time.perf_counter()
            subprocess.run(argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=True)
            if turn:
                times[name].append((time.perf_counter() - started) * 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print all times")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ec-", dir="/tmp") as home:
        environ = {**os.environ, "ELASTICCTL_HOME": home}
        try:
            times = measure(args.runs, environ)
        finally:
            subprocess.run([elasticctl(), "local", "down"], env=environ, capture_output=True, check=False)
    if args.json:
        print(json.dumps({"unit": "ms", "cpus": os.cpu_count(), "times": times}))
        return
    print(f"{'command':<26}{'median ms':>11}{'lowest':>9}{'aim':>7}")
    for name, values in times.items():
        aim = f"{AIM_MS[name]:.0f}" if name in AIM_MS else ""
        print(f"{name:<26}{statistics.median(values):>11.0f}{min(values):>9.0f}{aim:>7}")


if __name__ == "__main__":
    main()
