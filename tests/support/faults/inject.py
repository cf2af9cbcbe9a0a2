"""The events that `chaos` causes to a job on the local cluster, each with a random target."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.spec import ElasticJob, Manifest
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.supervisor_client import supervisor_info
from elasticctl_controller.local.objects import ANNOTATION_PID
from elasticctl_protocol import variables
from elasticctl_store.checkpoints.commits import read_commits, read_entries
from elasticctl_store.storage.local import LocalStorage
from tests.support.faults.checks import Record, Resume

NAMESPACE = "default"
GRACE_S = 30.0
POLL_S = 0.02
UNDISTURBED_S = 3.0
"""A group that still makes steps this long after an event was not affected by it."""
SHARES = {"rank": 4, "worker": 4, "launcher": 2, "supervisor": 2, "hang": 2, "scale": 3, "notice": 3}
"""How many of each kind there are in a deck of events."""


class DidNotHappen(Exception):
    """Something that had to happen did not."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done, when, with which newest commit at that time (0: none), to a group of which size."""

    kind: str
    target: str
    at: float
    committed: int
    world_before: int


class Jobs(Protocol):
    """Where a job is stored."""

    def get_job(self, namespace: str, name: str) -> Manifest:
        """Return the job as stored."""


@dataclass(slots=True)
class Job:
    """A job, the folder of its state, and the record of its training script, read as it grows."""

    cluster: Jobs
    name: str
    folder: Path
    record: Record = field(default_factory=Record)
    _read_bytes: int = 0

    @property
    def record_file(self) -> Path:
        """The file that the training script writes."""
        return self.folder / "record.jsonl"

    @property
    def end_file(self) -> Path:
        """The file from which the training script reads its last epoch."""
        return self.folder / "end"

    @property
    def storage(self) -> LocalStorage:
        """The job's checkpoints."""
        return LocalStorage(self.folder / "state")

    def read(self) -> Record:
        """Read what has been recorded since the last call."""
        with contextlib.suppress(FileNotFoundError), self.record_file.open("rb") as file:
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")[0]
            self._read_bytes += len(whole) + bool(whole)
            self.record.add(whole.decode())
        return self.record

    def entries(self) -> list[object]:
        """Return the journal's entries."""
        return [entry for _, entry in read_entries(self.storage)]

    def last_committed_step(self) -> int:
        """Return the step of the newest commit, 0 if there is none."""
        return next((commit.step for commit in read_commits(self.storage)), 0)

    def job(self) -> ElasticJob:
        """The job as stored."""
        return ElasticJob.from_manifest(self.cluster.get_job(NAMESPACE, self.name))

    def set_end(self, epoch: int) -> None:
        """End training before `epoch`."""
        temporary = self.end_file.with_suffix(".tmp")
        temporary.write_text(str(epoch))
        temporary.replace(self.end_file)

    def wait(self, what: str, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait until `condition` holds. Raises DidNotHappen if the job ends or `timeout_s` pass before that."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            status = self.job().status
            if status.phase.terminal:
                raise DidNotHappen(f"{what}: {self.name} is {status.phase.value}: {status.message}")
            if time.monotonic() > deadline:
                raise DidNotHappen(f"{what}: not within {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def goes_on(self, at: float) -> bool:
        """Return whether training is past an event at `at`: it was not affected, or a new generation has made a
        step."""
        steps = self.read().steps
        before = {step.generation for step in steps if step.at <= at}
        return any(step.at > at and (step.generation not in before or step.at > at + UNDISTURBED_S) for step in steps)


class FaultInjector:
    """Causes events to `job` on the local cluster, with `low` to `high` workers."""

    def __init__(self, job: Job, cluster: LocalCluster, dice: random.Random, low: int, high: int) -> None:
        self._job, self._cluster, self._dice, self._low, self._high = job, cluster, dice, low, high
        self._kinds: Mapping[str, Callable[[], str | None]] = {
            "rank": lambda: self._signal_rank(signal.SIGKILL),
            "worker": self._kill_worker,
            "launcher": self._kill_launcher,
            "supervisor": self._kill_supervisor,
            "hang": lambda: self._signal_rank(signal.SIGSTOP),
            "scale": self._scale,
            "notice": self._give_notice,
        }

    def deck(self, count: int) -> Iterator[str]:
        """Return the kinds of `count` events: shuffled decks, one after the other."""
        kinds = [
            kind for kind, share in SHARES.items() for _ in range(share) if kind != "scale" or self._low < self._high
        ]
        for number in range(count):
            if number % len(kinds) == 0:
                self._dice.shuffle(kinds)
            yield kinds[number % len(kinds)]

    def inject(self, kind: str, timeout_s: float) -> Event:
        """Cause the event, as soon as there is a target."""
        deadline = time.monotonic() + timeout_s
        while True:
            resumes = self._job.read().resumes
            world = resumes[-1].world if resumes else 0
            committed, at = self._job.last_committed_step(), time.time()
            target = self._kinds[kind]()
            if target is not None:
                return Event(kind, target, at, committed, world)
            if time.monotonic() > deadline:
                raise DidNotHappen(f"{kind}: for {timeout_s:.0f} s there was no target")
            time.sleep(POLL_S)

    def _signal_rank(self, number: signal.Signals) -> str | None:
        ranks = [resume for resume in self._newest_ranks() if _runs(resume)]
        if not ranks:
            return None
        victim = self._dice.choice(sorted(ranks, key=lambda r: r.rank))
        return f"rank {victim.rank}, {victim.worker}" if _signal(victim.pid, number) else None

    def _kill_worker(self) -> str | None:
        """Kill a worker: the shim first, so that it cannot report the others' end."""
        pod = self._choose_pod()
        launcher = _process_of(pod) if pod else None
        if pod is None or launcher is None:
            return None
        with contextlib.suppress(psutil.Error):
            shim = launcher.parent()
            for process in [*([shim] if shim else []), launcher, *launcher.children(recursive=True)]:
                _signal(process.pid, signal.SIGKILL)
        return str(pod["metadata"]["name"])

    def _kill_launcher(self) -> str | None:
        pod = self._choose_pod()
        launcher = _process_of(pod) if pod else None
        if pod is None or launcher is None or not _signal(launcher.pid, signal.SIGKILL):
            return None
        return str(pod["metadata"]["name"])

    def _kill_supervisor(self) -> str | None:
        info = supervisor_info(self._cluster.paths)
        if info is None or not _signal(info.pid, signal.SIGKILL):
            return None
        time.sleep(self._dice.uniform(0.0, 1.0))  # no supervisor is running
        self._cluster.list_jobs(None)  # starts it again
        return f"process {info.pid}"

    def _scale(self) -> str | None:
        job = self._job.job()
        wanted = self._dice.choice([n for n in range(self._low, self._high + 1) if n != job.desired])
        patch = {"spec": {"replicaSpecs": {"Worker": {"replicas": wanted}}}}
        self._cluster.patch_job(NAMESPACE, self._job.name, patch)
        return f"{job.desired} -> {wanted}"

    def _give_notice(self) -> str | None:
        pod = self._choose_pod()
        if pod is None:
            return None
        try:
            self._cluster.evict_pod(NAMESPACE, pod["metadata"]["name"], grace_s=GRACE_S)
        except (NotFoundError, ConflictError):  # the job has just ended by itself
            return None
        return str(pod["metadata"]["name"])

    def _newest_ranks(self) -> list[Resume]:
        resumes = self._job.record.resumes
        newest = max((resume.generation for resume in resumes), default=0)
        return [resume for resume in resumes if resume.generation == newest]

    def _choose_pod(self) -> Manifest | None:
        pods = self._cluster.list_pods(NAMESPACE, self._job.name)
        running = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and _process_of(pod)]
        return self._dice.choice(running) if running else None


def _runs(resume: Resume) -> bool:
    """Return whether the process is still the one that resumed, and its pid has not been reused."""
    try:
        process = psutil.Process(resume.pid)
        return process.create_time() < resume.at and process.status() not in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_STOPPED,
        )
    except psutil.Error:
        return False


def _process_of(pod: Manifest) -> psutil.Process | None:
    """Return a worker's own process, the launcher; None if it is gone."""
    try:
        process = psutil.Process(int(pod["metadata"]["annotations"][ANNOTATION_PID]))
        return process if process.environ().get(variables.POD_UID) == pod["metadata"]["uid"] else None
    except (psutil.Error, KeyError):
        return None


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
