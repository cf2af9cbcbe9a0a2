"""Submit a job, kill a worker, scale up and finish; then show what the job's status says about it.

    make demo                          # or: python examples/digits/demo.py
    make demo EPOCHS=60                # train for longer: by default, what fits how fast workers start on this machine

It uses only the `elasticctl` command, and SIGKILL for the worker's processes. If something does not happen as expected,
it says what, and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ELASTICCTL = str(Path(sys.executable).with_name("elasticctl"))
NAME = f"digits-{os.getpid()}"
EPOCHS, STEP_DELAY_S = 30, 0.06
QUICK_START_S = 2.0
"""Where importing torch takes no longer than this, EPOCHS are enough for two workers to start one after the other."""
WARM_EPOCHS = 5  # about 8 s
ACCURACY_AIM = 0.95
PATIENCE_S = 300.0
"""How long a job may show no change at all: a slow machine's takes long, but goes on."""
LIFE = ("phase", "activity", "progress", "workers", "generations")
"""What of a job's status changes as long as it goes on."""


class DidNotHappen(Exception):
    """Something that the demo expects did not happen."""


def choose_epochs() -> int:
    """Return for how many epochs to train, so that the job does not end before a slow machine has started its workers.

    Every worker imports torch. The second import is timed, because the first may have to read it from disk.
    """
    for _ in range(2):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        took_s = time.monotonic() - began
    return math.ceil(EPOCHS * max(1.0, took_s / QUICK_START_S))


def elasticctl(*arguments: str) -> str:
    """Run one command and return what it prints; its messages go to the terminal. Raises DidNotHappen if it fails."""
    done = subprocess.run([ELASTICCTL, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise DidNotHappen(f"elasticctl {' '.join(arguments)}: exit code {done.returncode}")
    return done.stdout


def status() -> dict[str, Any]:
    """Return the job's status as JSON."""
    job: dict[str, Any] = json.loads(elasticctl("status", NAME, "-o", "json"))
    found: dict[str, Any] = job["status"]
    return found


def until(what: str, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Wait until `condition` holds for the job's status, and return it.

    Raises DidNotHappen if the job ends first, or stands still.
    """
    before: list[Any] = []
    while True:
        now = status()
        if condition(now):
            return now
        if now.get("phase") in ("Failed", "Succeeded", "Cancelled"):
            raise DidNotHappen(f"{what}: the job is already {now['phase']}: {now.get('message', '')}")
        signs = [now.get(key) for key in LIFE]
        if signs != before:
            before, changed_at = signs, time.monotonic()
        elif time.monotonic() - changed_at > PATIENCE_S:
            raise DidNotHappen(f"{what}: the job has shown no change for {PATIENCE_S:.0f} s")
        time.sleep(0.3)


def kill_process_tree(uid: str) -> int:
    """Send SIGKILL to every process of a worker, including its keeper, as if its machine had failed; return how
    many."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ELASTICCTL_POD_UID") == uid:
                found += [process, process.parent()] if "shim" in " ".join(process.parent().cmdline()) else [process]
        except (psutil.Error, AttributeError):
            continue
    pids = {process.pid for process in found}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


@contextmanager
def logs_followed() -> Iterator[None]:
    """Print the workers' output while the job runs; what is still to come of a job that has ended is printed too."""
    following = subprocess.Popen([ELASTICCTL, "logs", "-f", NAME])
    try:
        yield
        with suppress(subprocess.TimeoutExpired):
            following.wait(30)
    finally:
        following.terminate()
        following.wait()


def step_of(now: dict[str, Any]) -> int:
    """Return the highest step reported so far."""
    return int(now.get("progress", {}).get("step", 0))


def mid_epoch(now: dict[str, Any]) -> bool:
    """Return whether training is in the middle half of an epoch, once the workers' spares have had time to warm up."""
    progress = now.get("progress", {})
    steps = progress.get("totalSteps", 0) // max(1, progress.get("totalEpochs", 1))
    return bool(steps) and step_of(now) > WARM_EPOCHS * steps and 0.25 < step_of(now) % steps / steps < 0.75


def run(epochs: int) -> dict[str, Any]:
    """Run the demo; return the final status."""
    say = Console(stderr=True, highlight=False).print
    elasticctl(
        "submit", "--context", "local", "--name", NAME, "--workers", "3", "--min-workers", "1", "--max-workers", "4",
        "--detach", str(HERE / "train.py"), "--", "--epochs", str(epochs), "--step-delay-s", str(STEP_DELAY_S),
    )  # fmt: skip
    with logs_followed():
        now = until("training on 3 workers", lambda s: mid_epoch(s) and s.get("active") == 3)
        victim = now["workers"][1]
        killed = kill_process_tree(victim["uid"])
        say(f"[bold red]demo: killed {victim['name']} outright ({killed} processes) at step {step_of(now)}[/]")
        until("a step after the loss", lambda s: (s.get("interruptions") or [{}])[-1].get("recoveredAt"))
        now = until("3 workers again", lambda s: len(s["generations"][-1]["workers"]) == 3)
        say(f"[bold green]demo: scaling 3 -> 4 at step {step_of(now)}[/]")
        elasticctl("scale", NAME, "--to", "4")
        return until("the end of training", lambda s: s.get("phase") == "Succeeded")


def report(final: dict[str, Any]) -> list[str]:
    """Print the table; return what did not happen."""
    accuracy = final.get("progress", {}).get("metrics", {}).get("test_accuracy", 0.0)
    interruptions = final.get("interruptions", [])
    first = interruptions[0] if interruptions else {}
    scalings = final.get("scalings", [])
    committed = final.get("checkpoint", {}).get("committed", 0)
    scaled = [f"{s['fromWorkers']} -> {s['toWorkers']}" for s in scalings if s.get("doneAt")]
    table = Table(title=f"{NAME}: {final.get('phase')}", show_header=False)
    table.add_row("final test accuracy", f"{accuracy:.4f}")
    table.add_row("interruptions", f"{len(interruptions)} ({first.get('worker')}: {first.get('cause')})")
    table.add_row("loss to next training step", f"{first.get('recoveryS', float('nan')):.2f} s")
    table.add_row(
        "steps done again", f"{first.get('stepsRedone')} after the loss, {final.get('stepsRedone', 0)} in all"
    )
    table.add_row("scaled", ", ".join(scaled) or "not at all")
    table.add_row("checkpoints committed", str(committed))
    Console().print(table)
    checks = {
        "the job succeeded": final.get("phase") == "Succeeded",
        f"test accuracy >= {ACCURACY_AIM}": accuracy >= ACCURACY_AIM,
        "exactly 1 interruption": len(interruptions) == 1,
        "its cause is known": bool(first.get("cause")),
        "training went on after it": first.get("recoveryS") is not None,
        "steps done again are known": first.get("stepsRedone") is not None,
        "scaled 3 -> 4": "3 -> 4" in scaled,
        "checkpoints were committed": committed > 0,
    }
    return [what for what, held in checks.items() if not held]


def main() -> int:
    """Run the demo; return 0 if everything happened as expected."""
    parser = argparse.ArgumentParser(description="Lose a worker, scale up, finish.")
    parser.add_argument("--epochs", type=int, help="how long to train: by default, longer on a slow machine")
    epochs: int = parser.parse_args().epochs or choose_epochs()
    try:
        missing = report(run(epochs))
    except DidNotHappen as error:
        missing = [str(error)]
    for what in missing:
        print(f"demo: did not happen: {what}", file=sys.stderr)
    if any("scaled" in what or "already Succeeded" in what for what in missing):
        print(f"FIX: the job ended first; train for longer: make demo EPOCHS={2 * epochs}", file=sys.stderr)
    if not missing:
        print(f"\nLook closer:  {ELASTICCTL} history {NAME}\nStop it all:  {ELASTICCTL} local down")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
