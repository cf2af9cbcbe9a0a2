"""Break one training job at random in every way we know, and prove that no training was lost.

    python -m tests.chaos [--events 200] [--seed S] [--workers 3] [--fixed-size] [--keep DIR]

A small job runs on a local cluster of its own. Ranks, launchers, whole workers and the supervisor are killed, ranks are
stopped, workers get notice, the job is scaled. Then it finishes. The records of its training script and the journal of
its storage must show that no committed step was lost, that each sample of each epoch was used exactly once on the
committed line of history, and that the final weights are those of an undisturbed run. Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import JobSpec
from elasticctl.api.status import Cause, JobStatus, Phase
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl.cluster.local.supervisor_client import shut_down
from elasticctl.templates import DEFAULT, find_template, render_manifest
from elasticctl_protocol import variables
from tests.support.faults.checks import Record, Task, committed_line, differing_weights, lost_commits, misused_samples
from tests.support.faults.inject import DidNotHappen, Event, FaultInjector, Job

SCRIPT = Path(__file__).parent / "support" / "faults" / "train.py"
SAMPLES, GLOBAL_BATCH, STEP_S, SAVE_EVERY_STEPS = 250, 16, 0.02, 10
POLICY = {"backoffSeconds": 0.1, "backoffMaxSeconds": 1.0, "hangTimeoutSeconds": 5.0, "stragglerSeconds": 5.0}
EPOCHS_TO_GO = 3
"""How far ahead the end is set: far enough that every rank learns of it in time."""
GOES_ON_TIMEOUT_S, END_TIMEOUT_S = 240.0, 480.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The effect of an event; None if the next event came first, or if training did not stop.

    `first_step_s`: from the event to the first step of a group formed after it, of `world_after` ranks; `standstill_s`:
    from the last step of the group before to that step; `redone`: how many steps of the group before it repeated.
    """

    first_step_s: float | None = None
    standstill_s: float | None = None
    world_after: int | None = None
    redone: int | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """The number of workers at the start, and its minimum and maximum."""

    workers: int
    low: int
    high: int


def make_job(cluster: LocalCluster, name: str, folder: Path, seed: int, *, step_s: float, size: Size) -> Job:
    """Submit the training script."""
    job = Job(cluster, name, folder / name)
    job.folder.mkdir()
    options = {
        "record": job.record_file,
        "end": job.end_file,
        "seed": seed,
        "samples": SAMPLES,
        "global-batch": GLOBAL_BATCH,
        "save-every-steps": SAVE_EVERY_STEPS,
        "step-s": step_s,
    }
    spec = JobSpec(
        name,
        (sys.executable, str(SCRIPT), *(f"--{key}={value}" for key, value in options.items())),
        workers=size.workers,
        min_workers=size.low,
        max_workers=size.high,
        storage=(job.folder / "state").as_uri(),
        env={"PYTHONFAULTHANDLER": "1"},
        backoff_limit=1000,
    )
    manifest = render_manifest(spec, find_template(DEFAULT, Path()))
    manifest["spec"]["policy"] = POLICY
    cluster.create_job(manifest)
    return job


def disturb(
    job: Job, faults: FaultInjector, dice: random.Random, count: int, say: Callable[[str], None]
) -> list[Event]:
    """Cause `count` events. Most wait until training has resumed after the previous one; some do not."""
    job.wait("the first step", lambda: job.goes_on(0.0), GOES_ON_TIMEOUT_S)
    events: list[Event] = []
    for kind in faults.deck(count):
        time.sleep(dice.uniform(0.0, 1.0))
        events.append(faults.inject(kind, GOES_ON_TIMEOUT_S))
        event = events[-1]
        say(f"{len(events):>4}  {event.kind:<11}{event.target}")
        if dice.random() < 0.7 or len(events) == count:
            what = f"a step after {kind} ({event.target})"
            job.wait(what, partial(job.goes_on, event.at), GOES_ON_TIMEOUT_S)
    return events


def finish(job: Job, timeout_s: float) -> int:
    """Let training come to its end; return the number of epochs."""
    epochs = job.read().steps[-1].epoch + EPOCHS_TO_GO
    return _finish_at(job, epochs, timeout_s)


def _finish_at(job: Job, epochs: int, timeout_s: float) -> int:
    job.set_end(epochs)
    deadline = time.monotonic() + timeout_s
    while not job.job().status.phase.terminal:
        if time.monotonic() > deadline:
            raise DidNotHappen(f"{job.name} did not end within {timeout_s:.0f} s")
        time.sleep(0.1)
    job.read()
    return epochs


def costs(events: Sequence[Event], record: Record) -> list[Cost]:
    """Return the effect of each event."""
    found = []
    for event, until in zip(events, [*(e.at for e in events[1:]), float("inf")], strict=True):
        before = {step.generation for step in record.steps if step.at <= event.at}
        new = [s for s in record.steps if event.at < s.at <= until and s.generation not in before]
        first = min(new, key=lambda s: s.at, default=None)
        if first is None:
            found.append(Cost())
            continue
        newest = max((s.generation for s in record.steps if s.generation < first.generation), default=0)
        last = max((s for s in record.steps if s.generation == newest), key=lambda s: s.at, default=first)
        redone = max(0, last.step - first.step + 1) if newest else 0
        found.append(Cost(first.at - event.at, first.at - last.at, first.world, redone))
    return found


def prove(job: Job, undisturbed: Job, task: Task, events: Sequence[Event], status: JobStatus) -> dict[str, list[str]]:
    """Return each property to be proven -> what contradicts it."""
    entries: Any = job.entries()
    damaged = [str(entry) for entry in entries if isinstance(entry, Exception)]
    entries = [entry for entry in entries if not isinstance(entry, Exception)]
    blamed = {cause: n for cause, n in status.restarts.items() if cause in (Cause.APPLICATION, Cause.OOM_KILLED)}
    ours = sum(
        event.kind in ("rank", "hang") for event in events
    )  # to its launcher, a rank that we kill looks like one that fails by itself
    blamed = blamed if sum(blamed.values()) > ours else {}
    weights, how = differing_weights(job.record, undisturbed.record)
    acknowledged = [(event.at, event.committed) for event in events]
    return {
        "the job succeeded": [] if status.phase is Phase.SUCCEEDED else [f"{status.phase.value}: {status.message}"],
        "only ranks that were killed were put down to the script": [f"{n} x {cause}" for cause, n in blamed.items()],
        "every entry of the journal is whole": damaged,
        f"no committed step was lost ({len(committed_line(entries))} groups committed)": lost_commits(
            entries, job.record, acknowledged
        ),
        f"every sample of {task.epochs} epochs was used exactly once": misused_samples(entries, job.record, task),
        f"the final weights are those of an undisturbed run ({how})": weights,
    }


def show(events: Sequence[Event], prices: Sequence[Cost], proofs: dict[str, list[str]], took_s: float) -> None:
    """Print what was done, what it cost and what is proven."""
    heads = ("#", "event", "to", "committed", "ranks", "next step after", "standstill", "steps done again")
    table = Table(*heads, title="chaos")
    for number, (event, cost) in enumerate(zip(events, prices, strict=True), 1):
        ranks = f"{event.world_before} -> {cost.world_after or '?'}"
        times = ["-" if value is None else f"{value:.2f} s" for value in (cost.first_step_s, cost.standstill_s)]
        redone = "-" if cost.redone is None else str(cost.redone)
        table.add_row(str(number), event.kind, event.target, str(event.committed), ranks, *times, redone)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    console.print(table)
    for what, faults in proofs.items():
        console.print(f"{'NOT PROVEN' if faults else 'proven':<11}{what}")
    console.print(f"{len(events)} events in {took_s:.0f} s")


def run(options: argparse.Namespace, folder: Path) -> int:
    """Break the job, let it finish, and check the proofs, all in `folder`; return the exit code."""
    began = time.monotonic()
    say = Console(stderr=True, highlight=False, markup=False).print
    dice = random.Random(options.seed)
    cluster = LocalCluster(local_paths(), say)
    fixed = Size(options.workers, options.workers, options.workers)
    size = fixed if options.fixed_size else Size(options.workers, 1, options.workers + 1)
    job = make_job(cluster, "chaos", folder, options.seed, step_s=STEP_S, size=size)
    events = disturb(job, FaultInjector(job, cluster, dice, size.low, size.high), dice, options.events, say)
    epochs = finish(job, END_TIMEOUT_S)
    status = job.job().status
    undisturbed = make_job(cluster, "undisturbed", folder, options.seed, step_s=0.0, size=fixed)
    _finish_at(undisturbed, epochs, END_TIMEOUT_S)
    proofs = prove(job, undisturbed, Task(SAMPLES, GLOBAL_BATCH, epochs), events, status)
    prices = costs(events, job.record)
    show(events, prices, proofs, time.monotonic() - began)
    for what, faults in proofs.items():
        for fault in faults:
            say(f"not proven: {what}: {fault}")
    return int(any(proofs.values()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the dice, and of the training")
    parser.add_argument("--workers", type=int, default=3, help="of the job; it may shrink to 1 and grow by 1")
    parser.add_argument("--fixed-size", action="store_true", help="no scaling; lost workers are waited for")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in and to leave as it is, with all logs")
    options = parser.parse_args(argv)
    folder = Path(options.keep.absolute() if options.keep else tempfile.mkdtemp(prefix="ec-", dir="/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[variables.HOME] = str(folder)
    try:
        return run(options, folder)
    except (DidNotHappen, ElasticctlError) as error:
        print(f"not proven: seed {options.seed}: {error}", file=sys.stderr)
        return 1
    finally:
        shut_down(local_paths(), keep_jobs=bool(options.keep), say=print)
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
