"""The contenders of the recovery benchmark: stock torchrun, tuned torchrun, and elasticctl on its local cluster.

Each runs the same training script with the same arguments on the loopback interface. Lost workers are replaced on both
sides: by elasticctl's controller, and for torchrun by `AgentsJob.tend`, which restarts an agent `REPLACE_AFTER_S` after
it has ended for any reason, like a controller with restart policy OnFailure.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from benchmarks import processes
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.spec import LABEL_INDEX
from elasticctl.api.status import Cause, Phase
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import HOME_VARIABLE, local_paths
from elasticctl.cluster.local.supervisor_client import shut_down

SCRIPT = str(Path(__file__).with_name("train.py"))
ROOT = Path(__file__).resolve().parents[2]
STORE_SERVER = str(Path(__file__).with_name("store_server.py"))
MAX_WORKERS = 3
REPLACE_AFTER_S = 1.0
HANG_TIMEOUT_S = 5.0
END_PATIENCE_S = 15.0
PID_ANNOTATION = "local.elasticctl/pid"


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the training script; `name` is unique, `folder` its own. `watch_hangs`: by the contender's own
    means."""

    name: str
    folder: Path
    workers: int
    step_s: float
    save_every_steps: int
    watch_hangs: bool = False
    marks: bool = False

    @property
    def steps_file(self) -> Path:
        return self.folder / "steps.jsonl"

    @property
    def marks_file(self) -> Path:
        return self.folder / "marks.jsonl"

    @property
    def arguments(self) -> list[str]:
        """Return the training script's arguments."""
        return [
            f"--storage={(self.folder / 'checkpoints').as_uri()}",
            f"--steps={self.steps_file}",
            f"--step-s={self.step_s}",
            f"--save-every-steps={self.save_every_steps}",
            *([f"--marks={self.marks_file}"] if self.marks else []),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Return additions to the processes' environment; the mark identifies them in the end."""
        known = {processes.MARK: self.name, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return {**known, "PYTHONPATH": str(ROOT)}


class Job(Protocol):
    """A running job. `replaces`: a lost worker is replaced by another one."""

    replaces: bool

    def agents(self) -> dict[int, int]:
        """Return worker number -> pid of its agent, for each running worker."""

    def tend(self) -> None:
        """Do what a controller has to do now; called several times a second."""

    def scale(self, workers: int) -> float:
        """Request another number of workers; return when, in seconds since the epoch."""

    def restarted(self) -> int:
        """Return how many workers have been restarted so far."""

    def note(self) -> str:
        """Return what a reader of the measurement should know, or ""."""

    def generations(self) -> list[dict[str, Any]]:
        """Return the re-formings in the job's own status; empty if it has none."""

    def end(self) -> None:
        """End the job; processes with the trial's mark may be left to `processes.sweep`."""


class Contender(AbstractContextManager["Contender"], Protocol):
    """A way to run jobs; entered once for all trials."""

    name: str

    def start(self, trial: Trial) -> Job:
        """Start a job."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How torchrun is called; `collective_timeout_s` is passed to the script if hangs are to be detected."""

    options: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    store_outside: bool = False
    collective_timeout_s: float | None = None


# The elastic call of torch's own documentation. The first agent that gets the port hosts the store: on loopback any
# agent can, which is easier than on separate machines, where only the one that the endpoint names can.
DEFAULTS = Settings(options=("--max-restarts=3",))
TUNED = Settings(
    options=(
        "--max-restarts=100",
        "--monitor-interval=0.1",
        "--rdzv-conf=is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
    ),
    environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    store_outside=True,
    collective_timeout_s=HANG_TIMEOUT_S,
)


class Torchrun(Contender):
    """Stock torchrun with its c10d rendezvous, one agent for each worker."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self._settings = name, settings
        self._server: subprocess.Popen[str] | None = None
        self._port = 0

    def __enter__(self) -> Torchrun:
        if self._settings.store_outside:
            command = [sys.executable, STORE_SERVER, "0"]
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._port = int(self._server.stdout.readline()) if self._server.stdout else 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()

    def start(self, trial: Trial) -> Job:
        settings, port = self._settings, self._port or processes.free_port()
        arguments = trial.arguments
        if trial.watch_hangs and settings.collective_timeout_s is not None:
            arguments.append(f"--collective-timeout-s={settings.collective_timeout_s}")
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{MAX_WORKERS}", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={trial.name}",
            "--local-addr=127.0.0.1", *settings.options, SCRIPT, *arguments,
        ]  # fmt: skip
        return AgentsJob(trial, [command], [settings.environment])


class AgentsJob(Job):
    """A process for each worker, and the little that a controller would do for them.

    `commands` and `environments` are those of each worker; further workers use the last one's. Without `replaces`,
    nobody replaces a lost worker.
    """

    def __init__(
        self,
        trial: Trial,
        commands: Sequence[list[str]],
        environments: Sequence[Mapping[str, str]],
        *,
        replaces: bool = True,
    ) -> None:
        self._trial, self._commands, self._environments = trial, commands, environments
        self.replaces = replaces
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._ended_s: dict[int, float] = {}
        self._replaced = 0
        self._wanted = trial.workers
        for number in range(trial.workers):
            self._start(number)

    def _start(self, number: int) -> None:
        own = self._environments[min(number, len(self._environments) - 1)]
        with (self._trial.folder / f"worker-{number}.log").open("ab") as log:
            self._agents[number] = subprocess.Popen(
                self._commands[min(number, len(self._commands) - 1)],
                env={**os.environ, **self._trial.environment, "GLOO_SOCKET_IFNAME": "lo", **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._trial.folder,
                start_new_session=True,
            )

    def agents(self) -> dict[int, int]:
        return {number: agent.pid for number, agent in self._agents.items() if agent.poll() is None}

    def tend(self) -> None:
        now_s = time.monotonic()
        for number in range(self._wanted if self.replaces else 0):
            if self._agents[number].poll() is None:
                self._ended_s.pop(number, None)
            elif now_s - self._ended_s.setdefault(number, now_s) >= REPLACE_AFTER_S:
                self._replaced += 1
                self._start(number)

    def scale(self, workers: int) -> float:
        at, before, self._wanted = time.time(), self._wanted, workers
        for number in range(before, workers):
            self._start(number)
        for number in range(workers, before):
            processes.send(self._agents[number].pid, signal.SIGTERM)
        return at

    def restarted(self) -> int:
        return self._replaced

    def note(self) -> str:
        return ""

    def generations(self) -> list[dict[str, Any]]:
        return []

    def end(self) -> None:
        processes.kill_trees(self.agents().values())
        for agent in self._agents.values():
            agent.wait()


class Local(Contender):
    """elasticctl on an embedded cluster of its own, used like a user would: the shipped template without any
    settings."""

    name = "elasticctl"

    def __init__(self) -> None:
        self._home = ""
        self._cluster: LocalCluster | None = None

    def __enter__(self) -> Local:
        self._home = tempfile.mkdtemp(prefix="ec-", dir="/tmp")  # a short path, because it contains sockets
        os.environ[HOME_VARIABLE] = self._home
        self._cluster = LocalCluster(local_paths())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            shut_down(local_paths(), keep_jobs=False, say=lambda line: None)
        finally:
            processes.sweep(self._home, HOME_VARIABLE)
            shutil.rmtree(self._home, ignore_errors=True)
            del os.environ[HOME_VARIABLE]

    def start(self, trial: Trial) -> Job:
        if self._cluster is None:
            raise RuntimeError("the contender has not been entered")
        variables = [f"--env={name}={value}" for name, value in trial.environment.items()]
        hangs = [f"--set=spec.policy.hangTimeoutSeconds={HANG_TIMEOUT_S}"] if trial.watch_hangs else []
        elasticctl(
            "submit", "--context=local", f"--name={trial.name}", f"--workers={trial.workers}", "--min-workers=1",
            f"--max-workers={MAX_WORKERS}", *variables, *hangs, "--detach", SCRIPT, "--", *trial.arguments,
        )  # fmt: skip
        return LocalJob(self._cluster, trial)


class LocalJob(Job):
    """A job of the local cluster; the supervisor manages it."""

    replaces = True

    def __init__(self, cluster: LocalCluster, trial: Trial) -> None:
        self._cluster, self._trial = cluster, trial

    def agents(self) -> dict[int, int]:
        found = {}
        for pod in self._cluster.list_pods("default", self._trial.name):
            pid = pod["metadata"].get("annotations", {}).get(PID_ANNOTATION)
            if pid and pod["status"].get("phase") == "Running":
                found[int(pod["metadata"]["labels"][LABEL_INDEX])] = int(pid)
        return found

    def tend(self) -> None:
        return

    def scale(self, workers: int) -> float:
        at = time.time()
        patch = {"spec": {"replicaSpecs": {"Worker": {"replicas": workers}}}}
        self._cluster.patch_job("default", self._trial.name, patch)
        return at

    def restarted(self) -> int:
        restarts: dict[str, int] = self._status().get("restarts", {})
        return sum(number for cause, number in restarts.items() if Cause(cause).interruption)

    def note(self) -> str:
        phase = self._status().get("phase")
        return "" if phase in (Phase.RUNNING, Phase.RESTARTING) else f"the job is {phase}"

    def generations(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._status().get("generations", [])
        return found

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._cluster.get_job("default", self._trial.name).get("status", {})
        return status

    def end(self) -> None:
        self._save_logs()
        try:
            self._cluster.delete_job("default", self._trial.name)
            deadline = time.monotonic() + END_PATIENCE_S
            processes.kill_trees(self.agents().values())  # nothing has to be saved, so do not wait
            while self._cluster.list_pods("default", self._trial.name) and time.monotonic() < deadline:
                time.sleep(0.05)
        except NotFoundError:
            return

    def _save_logs(self) -> None:
        """Keep the workers' output, like torchrun's, beside the steps."""
        for log in self._cluster.paths.pods.glob("*/log"):
            shutil.copy(log, self._trial.folder / f"{log.parent.name}.log")


def elasticctl(*arguments: str) -> str:
    """Run the installed command and return its output. Raises ElasticctlError if it fails."""
    command = [str(Path(sys.executable).with_name("elasticctl")), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise ElasticctlError(f"elasticctl {arguments[0]}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "torchrun": lambda: Torchrun("torchrun", DEFAULTS),
    "torchrun-tuned": lambda: Torchrun("torchrun-tuned", TUNED),
    Local.name: Local,
}
"""What can be measured, by name, the worst first."""
