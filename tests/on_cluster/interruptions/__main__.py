"""An hour on spot machines: notices and silent losses at random, and the proof of what they cost.

    export KUBECONFIG=… ELASTICCTL_TEST_LAB=…        # kubelab with two nodes and Karpenter
    python -m tests.on_cluster.interruptions [--for-s 3600] [--calm-s 240] [--cloud gcp] [--seed S] [--keep DIR]

A job of three workers trains on spot machines that Karpenter launches. It is first left alone, for comparison. Then
workers get notice in every way that a cloud or an administrator gives it, and are lost in every way without notice, one
event after the other, each once the group is complete again. In the end, the script's records and the journal must show
that no step was repeated if there was notice, that every sample was used exactly once, that the group was complete
again after each event, and that the final weights are those of an undisturbed run. Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.spec import API_VERSION, KIND, LABEL_JOB, PLURAL, WORKER_CONTAINER
from elasticctl.kubeapi.connection import Connection, connect, resource_path
from tests.on_cluster.interruptions.account import (
    Cost,
    Event,
    costs,
    deck,
    never_whole,
    pace,
    redone_after_notice,
    rows,
)
from tests.on_cluster.interruptions.faults import (
    NOTICE_S,
    NOTICES,
    RECOMMENDATION,
    SCRIPT,
    SILENT,
    Fault,
    FaultInjector,
)
from tests.on_cluster.interruptions.metadata import Metadata
from tests.on_cluster.replicas import ADDRESS, Replicas, prepare
from tests.on_cluster.spot_market import POOLS, node_pool
from tests.on_cluster.trainer import HOST_FOLDER
from tests.on_cluster.waiting import wait_until
from tests.support.faults.checks import Record, Task, committed_line, differing_weights, lost_commits, misused_samples
from tests.support.faults.inject import NAMESPACE, DidNotHappen, Job

NAME, IMAGE, STATE = "interruptions", "lab/trainer:dev", "/state"
WORKERS, STEP_S, SAVE_EVERY_STEPS, GRACE_S = 3, 0.2, 25, 60
SAMPLES, GLOBAL_BATCH, EPOCHS_TO_GO = 250, 16, 3
MACHINES = 8
START_LIMIT_S, WHOLE_LIMIT_S, END_LIMIT_S, POLL_S = 300.0, 240.0, 300.0, 0.2
NEVER = 1_000_000
PAUSE_S = 2.0
"""The longest time between two events, in addition to what the first one takes."""
TRIES_S = 20.0


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of the cluster."""

    api: Connection

    def get_job(self, namespace: str, name: str) -> Manifest:
        """See `Jobs` of `faults.inject`."""
        found: Manifest = self.api.request("GET", resource_path(API_VERSION, namespace, PLURAL, name))
        return found


def manifest(folder: Path, seed: int, cloud: str, metadata_url: str) -> Manifest:
    """Return the job, each of whose workers needs a machine of its own."""
    options = {"record": f"{STATE}/record.jsonl", "end": f"{STATE}/end", **_task(seed), "step-s": STEP_S}
    script = [sys.executable, str(SCRIPT), *(f"--{key}={value}" for key, value in options.items())]
    environ = {
        "ELASTICCTL_STORAGE": f"file://{STATE}/state",
        "ELASTICCTL_NOTICE_SOURCE": "aws-rebalance" if cloud == "aws" else cloud,
        "ELASTICCTL_METADATA_URL": metadata_url,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    worker = {
        "name": WORKER_CONTAINER,
        "image": IMAGE,
        "command": [str(Path(sys.executable).with_name("elasticctl-launch")), "--nproc-per-node", "1", "--"],
        "args": [*script, f"--workers={WORKERS}", "--stay"],
        "env": [{"name": name, "value": value} for name, value in environ.items()],
        "volumeMounts": [{"name": "state", "mountPath": STATE}],
        "resources": {"requests": {"cpu": 1}, "limits": {"nvidia.com/gpu": 1}},  # otherwise other pods come first
    }
    volume = {"name": "state", "hostPath": {"path": str(folder), "type": "Directory"}}
    pod = {"terminationGracePeriodSeconds": GRACE_S, "containers": [worker], "volumes": [volume]}
    replicas = {"replicas": WORKERS, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "minReplicas": 1,
            "maxReplicas": WORKERS,
            "backoffLimit": 1000,
            "replicaSpecs": {"Worker": replicas},
        },
    }


def _task(seed: int) -> dict[str, Any]:
    return {"seed": seed, "samples": SAMPLES, "global-batch": GLOBAL_BATCH, "save-every-steps": SAVE_EVERY_STEPS}


@dataclass(slots=True)
class Session:
    """One run, and its results so far."""

    api: Connection
    job: Job
    faults: FaultInjector
    dice: random.Random
    say: Console
    events: list[Event] = field(default_factory=list)
    calm: tuple[float, float] = (0.0, 0.0)

    def wait_calmly(self, calm_s: float) -> None:
        """Let the whole group train undisturbed."""
        begun = time.time()
        self.job.wait("the first steps of all", lambda: self._whole(begun, frozenset()), START_LIMIT_S)
        time.sleep(5.0)
        self.calm = (time.time(), time.time() + calm_s)
        while time.time() < self.calm[1]:
            time.sleep(1.0)

    def disturb(self, for_s: float, notices: Mapping[str, int], report: Any) -> None:
        """Cause one event after the other; `notices` are the kinds with notice."""
        end, kinds = time.time() + for_s, list[str]()
        while time.time() < end:
            time.sleep(self.dice.uniform(0.0, PAUSE_S))
            if not kinds:
                kinds = deck(notices) + deck(SILENT)
                self.dice.shuffle(kinds)
            kind = kinds.pop()
            committed = self.job.last_committed_step()
            fault = self._inject(kind)
            if fault is None:
                self.say.print(f"{kind}: found no target; skipped", markup=False)
                continue
            try:
                whole_s = self._await_whole(fault)
            finally:
                fault.clear_up()
            load = os.getloadavg()[0]
            event = Event(kind, kind in NOTICES, fault.target, fault.at, time.time(), committed, load, whole_s)
            self.events.append(event)
            report(self)

    def _inject(self, kind: str) -> Fault | None:
        give_up = time.monotonic() + TRIES_S
        while time.monotonic() < give_up:
            with suppress(ElasticctlError):
                if fault := self.faults.inject(kind):
                    return fault
            time.sleep(POLL_S)
        return None

    def _await_whole(self, fault: Fault) -> float | None:
        give_up = time.time() + WHOLE_LIMIT_S
        while time.time() < give_up:
            fault.keep_time()
            if self._whole(fault.at, fault.gone):
                return time.time() - fault.at
            time.sleep(POLL_S)
        return None

    def _whole(self, at: float, gone: frozenset[str]) -> bool:
        """Return whether a group that formed since then trains with all workers, and none of `gone` is in it."""
        steps = self.job.read().steps
        if not steps or steps[-1].world != WORKERS or steps[-1].at <= at:
            return False
        newest = steps[-1].generation
        own = []
        for step in reversed(steps):
            if step.generation != newest:
                break
            own.append(step)
        if any(step.at <= at for step in own) or len({step.rank for step in own}) < WORKERS:
            return False
        try:
            pods = self.faults.staying()
        except ElasticctlError:
            return False
        return len(pods) == WORKERS and not gone & {pod["metadata"]["uid"] for pod in pods}

    def finish(self) -> int:
        """Let training come to its end; return the number of epochs."""
        epochs = self.job.read().steps[-1].epoch + EPOCHS_TO_GO
        self.job.set_end(epochs)
        deadline = time.monotonic() + END_LIMIT_S
        while not self.job.job().status.phase.terminal:
            if time.monotonic() > deadline:
                raise DidNotHappen(f"{NAME} did not end within {END_LIMIT_S:.0f} s")
            time.sleep(1.0)
        self.job.read()
        return epochs


def undisturbed(folder: Path, seed: int, epochs: int) -> Record:
    """Train the same in one process without any events."""
    folder.mkdir(exist_ok=True)
    (folder / "end").write_text(str(epochs))
    options = {"record": folder / "record.jsonl", "end": folder / "end", **_task(seed), "step-s": 0.0}
    options["save-every-steps"] = NEVER
    argv = [sys.executable, str(SCRIPT), *(f"--{key}={value}" for key, value in options.items())]
    environ = {**os.environ, "ELASTICCTL_STORAGE": (folder / "state").as_uri(), "OMP_NUM_THREADS": "1"}
    subprocess.run(argv, check=True, env=environ, stdout=subprocess.DEVNULL)
    record = Record()
    record.add((folder / "record.jsonl").read_text())
    return record


def prove(session: Session, prices: Sequence[Cost], epochs: int, calm: Record) -> dict[str, list[str]]:
    """Return each property to be proven -> what contradicts it."""
    entries: Any = session.job.entries()
    damaged = [str(entry) for entry in entries if isinstance(entry, Exception)]
    entries = [entry for entry in entries if not isinstance(entry, Exception)]
    status, record = session.job.job().status, session.job.record
    task = Task(SAMPLES, GLOBAL_BATCH, epochs)
    weights, how = differing_weights(record, calm)
    acknowledged = [(event.at, event.committed) for event in session.events]
    ended = status.phase.value
    return {
        "the job succeeded": [] if ended == "Succeeded" else [f"{ended}: {status.message}"],
        "no step was done again after a notice": redone_after_notice(session.events, prices),
        f"all trained again within {WHOLE_LIMIT_S:.0f} s of each event": never_whole(session.events),
        "every entry of the journal is whole": damaged,
        f"no committed step was lost ({len(committed_line(entries))} groups committed)": lost_commits(
            entries, record, acknowledged
        ),
        f"every sample of {epochs} epochs was used exactly once": misused_samples(entries, record, task),
        f"the final weights are those of an undisturbed run ({how})": weights,
    }


def goodput(session: Session) -> dict[str, float]:
    """Return steps per second undisturbed and during the events, and their ratio."""
    steps = session.job.record.steps
    calm = pace(steps, *session.calm)
    if not (session.events and calm):
        return {}
    disturbed = pace(steps, session.calm[1], session.events[-1].until)
    return {"undisturbed": calm, "disturbed": disturbed, "goodput": disturbed / calm}


def show(session: Session, prices: Sequence[Cost], proofs: dict[str, list[str]]) -> None:
    """Print what was done, what it cost and what is proven."""
    table = Table("event", "", "times", "standstill", "all train again", "steps done again", title=NAME)
    for row in rows(session.events, prices):
        times = [f"{p50:.2f} s (p95 {p95:.2f})" for p50, p95 in (row.standstill_s, row.whole_s)]
        redone = f"{row.redone} (most {row.most_redone})"
        table.add_row(row.kind, "notice" if row.notice else "", str(row.events), *times, redone)
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False, markup=False)
    console.print(table)
    for what, faults in proofs.items():
        console.print(f"{'NOT PROVEN' if faults else 'proven':<11}{what}")
        for fault in faults:
            console.print(f"           {fault}")
    for what, number in goodput(session).items():
        console.print(f"{what}: {number:.4f}{'' if what == 'goodput' else ' steps a second'}")
    loads = sorted(event.load for event in session.events)
    if loads:
        console.print(f"load: {median(loads):.1f} in the median, {loads[-1]:.1f} at most")


@contextmanager
def controllers(api: Connection, folder: Path) -> Iterator[None]:
    """Run two controllers, and set up Karpenter's spot machines for the job."""
    prepare(api)
    for pool in api.request("GET", POOLS)["items"]:
        api.request("DELETE", f"{POOLS}/{pool['metadata']['name']}", {"propagationPolicy": "Foreground"})
    wait_until(lambda: not api.request("GET", POOLS)["items"])
    api.request("POST", POOLS, node_pool("spot", MACHINES))
    replicas = Replicas(folder)
    try:
        for _ in range(2):
            replicas.start()
        replicas.leader()
        yield
    finally:
        replicas.stop()


@contextmanager
def running(api: Connection, body: Manifest) -> Iterator[None]:
    """Create the job; delete it afterwards."""
    path = resource_path(API_VERSION, NAMESPACE, PLURAL)
    api.request("POST", path, body)
    try:
        yield
    finally:
        with suppress(NotFoundError):
            api.request("DELETE", f"{path}/{NAME}", {"propagationPolicy": "Foreground"})


def run(options: argparse.Namespace, folder: Path, say: Console) -> int:
    """Interrupt the job, let it finish, and check the proofs; logs are kept in `folder`."""
    api, metadata = connect(), Metadata(ADDRESS)
    host = HOST_FOLDER / NAME
    shutil.rmtree(host, ignore_errors=True)
    host.mkdir(parents=True)
    host.chmod(0o777)  # workers run as arbitrary users
    dice, job = random.Random(options.seed), Job(Jobs(api), NAME, host)
    label = f"{LABEL_JOB}={NAME}"
    notices = {kind: times for kind, times in NOTICES.items() if options.cloud == "aws" or kind != RECOMMENDATION}
    session = Session(api, job, FaultInjector(api, job, metadata, dice, label, NOTICE_S[options.cloud]), dice, say)

    def report(session: Session) -> None:
        event, cost = session.events[-1], costs(session.events, job.read().steps)[-1]
        whole = "NEVER WHOLE" if event.whole_s is None else f"whole after {event.whole_s:.1f} s"
        line = f"{len(session.events):>4} {event.kind} ({event.target}): {whole}, stood {cost.standstill_s:.2f} s"
        line += f" in {cost.groups} groups, {cost.redone} done again; load {event.load:.1f}"
        say.print(line, markup=False, soft_wrap=True)

    proofs: dict[str, list[str]] = {}
    try:
        with controllers(api, folder), running(api, manifest(host, options.seed, options.cloud, metadata.url)):
            session.wait_calmly(options.calm_s)
            with suppress(KeyboardInterrupt):
                session.disturb(options.for_s, notices, report)
            epochs = session.finish()
            calm = undisturbed(folder / "undisturbed", options.seed, epochs)
            proofs = prove(session, costs(session.events, job.record.steps), epochs, calm)
    finally:
        metadata.stop()
        if job.record_file.exists():  # it may not have got so far
            shutil.copy(job.record_file, folder)
            show(session, costs(session.events, job.read().steps), proofs)
    return int(not proofs or any(proofs.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if something was not proven, 130 after Ctrl-C."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--for-s", type=float, default=3600.0, metavar="S", help="seconds with events")
    parser.add_argument(
        "--calm-s", type=float, default=240.0, metavar="S", help="seconds of undisturbed training before that"
    )
    parser.add_argument("--cloud", choices=NOTICE_S, default="aws", help="whose metadata service gives notice (aws)")
    parser.add_argument("--seed", type=int, default=0, help="of the events, and of the training")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the controllers' logs and the record in this folder"
    )
    options = parser.parse_args(argv)
    say = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return run(options, folder, say)
        except KeyboardInterrupt:
            return 130
        except (ElasticctlError, AssertionError, DidNotHappen) as e:
            say.print(f"stopped: {e}", markup=False, soft_wrap=True)
            return 1


if __name__ == "__main__":
    sys.exit(main())
