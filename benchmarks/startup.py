"""How long commands take to start, compared with the bare interpreter and with kubectl.

    python benchmarks/startup.py [--runs 15] [--json]

Prints for each command its median and lowest wall time and its median CPU time, in milliseconds. The commands take
turns, so that a busy moment of the machine affects all of them. Those that need a cluster use a local one of their own,
which is started before and stopped after.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.commandline import installed_environment

COMPLETE_VERB, COMPLETE_JOB = "complete `elasticctl s`", "complete `elasticctl status `"
AIM_MS = {"elasticctl --help": 150.0, COMPLETE_VERB: 150.0, COMPLETE_JOB: 150.0}


@dataclass(frozen=True, slots=True)
class Command:
    """What is run, and its additions to the environment."""

    argv: list[str]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """The duration of one run, in milliseconds."""

    wall_ms: float
    cpu_ms: float


def elasticctl() -> str:
    """Return the path of the installed script beside this interpreter."""
    found = Path(sys.executable).parent / "elasticctl"
    if not found.exists():
        raise SystemExit(f"{found} does not exist. FIX: install elasticctl into this environment: pip install -e .")
    return str(found)


def commands() -> dict[str, Command]:
    """Return what is measured, by the name under which it is shown."""
    verbs = (["--help"], ["submit", "--help"], ["version"], ["list"], ["list", "-o", "json"])
    found = {" ".join(["elasticctl", *verb]): Command([elasticctl(), *verb]) for verb in verbs}
    for name in (COMPLETE_VERB, COMPLETE_JOB):
        asked = {"_ELASTICCTL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": name.split("`")[1]}
        found[name] = Command([elasticctl()], asked)
    found["python -c pass"] = Command([sys.executable, "-c", "pass"])
    kubectl = shutil.which("kubectl")
    if kubectl:
        found["kubectl version --client"] = Command([kubectl, "version", "--client"])
    return found


def measure(runs: int, environ: Mapping[str, str]) -> dict[str, list[Sample]]:
    """Run each command `runs` times, in turns; the first turn only warms up."""
    samples: dict[str, list[Sample]] = {name: [] for name in commands()}
    for turn in range(runs + 1):
        for name, command in commands().items():
            sample = _time_once(command, environ)
            if turn:
                samples[name].append(sample)
    return samples


def _time_once(command: Command, environ: Mapping[str, str]) -> Sample:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        command.argv, env={**environ, **command.environ}, stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(wall_s * 1000, cpu_s * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print all times")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ec-", dir="/tmp") as home:
        environ = {**installed_environment(), "ELASTICCTL_HOME": home}
        try:
            samples = measure(args.runs, environ)
        finally:
            subprocess.run([elasticctl(), "local", "down"], env=environ, capture_output=True, check=False)
    if args.json:
        times = {name: [asdict(sample) for sample in found] for name, found in samples.items()}
        print(json.dumps({"unit": "ms", "cpus": os.cpu_count(), "times": times}))
        return
    print(f"{'command':<30}{'median ms':>11}{'lowest':>9}{'cpu ms':>9}{'aim':>7}")
    for name, found in samples.items():
        walls = [sample.wall_ms for sample in found]
        cpu_ms = statistics.median(sample.cpu_ms for sample in found)
        aim = f"{AIM_MS[name]:.0f}" if name in AIM_MS else ""
        print(f"{name:<30}{statistics.median(walls):>11.0f}{min(walls):>9.0f}{cpu_ms:>9.0f}{aim:>7}")


if __name__ == "__main__":
    main()
