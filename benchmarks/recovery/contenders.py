"""The contenders of the recovery benchmark: torchrun with its defaults and tuned, torchft, and elasticctl.

Each runs on the loopback interface, elasticctl and torchrun with the same script and arguments. Lost workers are
replaced everywhere: by elasticctl's controller, and for the others by `AgentsJob.tend`, which restarts an agent
`REPLACE_AFTER_S` after it has ended for any reason, like a controller with restart policy OnFailure.

torchft runs with the interpreter of another virtual environment (`$OTHER_LIBRARIES`, the path of its `python`), because
its packages would change ours: `pip install torch torchft numpy`. Workers are started as in its own example.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import TCPStore

from benchmarks.programs import MARK, ROOT, free_port, kill_trees, local_cluster, run_elasticctl, send
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.spec import LABEL_INDEX
from elasticctl.api.status import Phase
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl_controller.local.objects import ANNOTATION_PID

SCRIPT = str(Path(__file__).with_name("train.py"))
TORCHFT_LOOP = str(Path(__file__).with_name("torchft_loop.py"))
MAX_WORKERS = 3
REPLACE_AFTER_S = 1.0
HANG_TIMEOUT_S = 5.0
END_PATIENCE_S = 15.0
OTHER_LIBRARIES = "OTHER_LIBRARIES"
LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000")


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

    @property
    def steps_file(self) -> Path:
        return self.folder / "steps.jsonl"

    @property
    def arguments(self) -> list[str]:
        """Return the training script's arguments."""
        return [
            f"--storage={(self.folder / 'checkpoints').as_uri()}",
            f"--steps={self.steps_file}",
            f"--step-s={self.step_s}",
            f"--save-every-steps={self.save_every_steps}",
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Return additions to the processes' environment; the mark identifies them in the end."""
        known = {MARK: self.name, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return {**known, "PYTHONPATH": str(ROOT)}


class TrainingJob(Protocol):
    """A running job."""

    def agents(self) -> dict[int, int]:
        """Return worker number -> pid of its agent, for each running worker."""

    def tend(self) -> None:
        """Do what a controller has to do now; called several times a second."""

    def scale(self, workers: int) -> float:
        """Request another number of workers; return when, in seconds since the epoch."""

    def remark(self) -> str:
        """Return what a reader of the measurement should know, or ""."""

    def end(self) -> None:
        """End the job; processes with the trial's mark may be left to `programs.sweep`."""


class Contender(AbstractContextManager["Contender"], Protocol):
    """A way to run jobs; entered once for all trials."""

    name: str

    def start(self, trial: Trial) -> TrainingJob:
        """Start a job."""


@dataclass(frozen=True, slots=True)
class TorchrunSettings:
    """How torchrun is called; `collective_timeout_s` is passed to the script if hangs are to be detected."""

    options: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    store_outside: bool = False
    collective_timeout_s: float | None = None


# The elastic call of torch's own documentation. The first agent that gets the port hosts the store: on loopback any
# agent can, which is easier than on separate machines, where only the one that the endpoint names can.
DEFAULTS = TorchrunSettings(options=("--max-restarts=3",))
TUNED = TorchrunSettings(
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

    def __init__(self, name: str, settings: TorchrunSettings) -> None:
        self.name, self._settings = name, settings
        self._store: TCPStore | None = None

    def __enter__(self) -> Torchrun:
        if self._settings.store_outside:
            self._store = open_store()
        return self

    def __exit__(self, *_: object) -> None:
        self._store = None

    def start(self, trial: Trial) -> TrainingJob:
        settings, port = self._settings, self._store.port if self._store else free_port()
        arguments = trial.arguments
        if trial.watch_hangs and settings.collective_timeout_s is not None:
            arguments.append(f"--collective-timeout-s={settings.collective_timeout_s}")
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{MAX_WORKERS}", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={trial.name}",
            "--local-addr=127.0.0.1", *settings.options, SCRIPT, *arguments,
        ]  # fmt: skip
        return AgentsJob(trial, [command], [settings.environment])


class AgentsJob(TrainingJob):
    """A process for each worker, and the little that a controller would do for them.

    `commands` and `environments` are those of each worker; further workers use the last one's.
    """

    def __init__(self, trial: Trial, commands: Sequence[list[str]], environments: Sequence[Mapping[str, str]]) -> None:
        self._trial, self._commands, self._environments = trial, commands, environments
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._ended_s: dict[int, float] = {}
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
        for number in range(self._wanted):
            if self._agents[number].poll() is None:
                self._ended_s.pop(number, None)
            elif now_s - self._ended_s.setdefault(number, now_s) >= REPLACE_AFTER_S:
                self._start(number)

    def scale(self, workers: int) -> float:
        at, before, self._wanted = time.time(), self._wanted, workers
        for number in range(before, workers):
            self._start(number)
        for number in range(workers, before):
            send(self._agents[number].pid, signal.SIGTERM)
        return at

    def remark(self) -> str:
        return ""

    def end(self) -> None:
        kill_trees(self.agents().values())
        for agent in self._agents.values():
            agent.wait()


class TorchFT(Contender):
    """torchft: a lighthouse, and a torchrun for each replica group of one process."""

    def __init__(self, name: str, wrapper: str) -> None:
        self.name, self._wrapper = name, wrapper
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TorchFT:
        other_python()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_lighthouse()

    def start(self, trial: Trial) -> TrainingJob:
        self._end_lighthouse()
        port = free_port()
        command = [str(Path(other_python()).with_name("torchft_lighthouse")), f"--bind=127.0.0.1:{port}", *LIGHTHOUSE]
        with (trial.folder / "lighthouse.log").open("wb") as log:
            self._lighthouse = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        script = [
            TORCHFT_LOOP,
            f"--steps={trial.steps_file}",
            f"--step-s={trial.step_s}",
            f"--wrapper={self._wrapper}",
        ]
        command = [other_python(), "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
        commands = [[*command, f"--master-port={free_port()}", *script] for _ in range(trial.workers)]
        environments = [
            {
                "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
                "REPLICA_GROUP_ID": str(number),
                "NUM_REPLICA_GROUPS": str(trial.workers),
            }
            for number in range(trial.workers)
        ]
        return AgentsJob(trial, commands, environments)

    def _end_lighthouse(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.wait()


class Local(Contender):
    """elasticctl on an embedded cluster of its own, used like a user would: the shipped template without any
    settings."""

    name = "elasticctl"

    def __init__(self) -> None:
        self._open = ExitStack()
        self._environ: dict[str, str] = {}

    def __enter__(self) -> Local:
        self._environ = self._open.enter_context(local_cluster())
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def start(self, trial: Trial) -> TrainingJob:
        variables = [f"--env={name}={value}" for name, value in trial.environment.items()]
        hangs = [f"--set=spec.policy.hangTimeoutSeconds={HANG_TIMEOUT_S}"] if trial.watch_hangs else []
        run_elasticctl(
            "submit", "--context=local", f"--name={trial.name}", f"--workers={trial.workers}", "--min-workers=1",
            f"--max-workers={MAX_WORKERS}", *variables, *hangs, "--detach", SCRIPT, "--", *trial.arguments,
            environ=self._environ,
        )  # fmt: skip
        return LocalJob(LocalCluster(local_paths(self._environ)), trial)


class LocalJob(TrainingJob):
    """A job of the local cluster; the supervisor manages it."""

    def __init__(self, cluster: LocalCluster, trial: Trial) -> None:
        self._cluster, self._trial = cluster, trial

    def agents(self) -> dict[int, int]:
        found = {}
        for pod in self._cluster.list_pods("default", self._trial.name):
            pid = pod["metadata"].get("annotations", {}).get(ANNOTATION_PID)
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

    def remark(self) -> str:
        phase = self._cluster.get_job("default", self._trial.name).get("status", {}).get("phase")
        return "" if phase in (Phase.RUNNING, Phase.RESTARTING) else f"the job is {phase}"

    def end(self) -> None:
        self._save_logs()
        try:
            self._cluster.delete_job("default", self._trial.name)
            deadline = time.monotonic() + END_PATIENCE_S
            kill_trees(self.agents().values())  # nothing needs to be saved, so do not wait
            while self._cluster.list_pods("default", self._trial.name) and time.monotonic() < deadline:
                time.sleep(0.05)
        except NotFoundError:
            return

    def _save_logs(self) -> None:
        """Keep the workers' output, like torchrun's, next to the steps."""
        for log in self._cluster.paths.pods.glob("*/log"):
            shutil.copy(log, self._trial.folder / f"{log.parent.name}.log")


def open_store() -> TCPStore:
    """Serve a c10d store from this process, outside of all workers, until the object is dropped."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def other_python() -> str:
    """Return the interpreter of torchft's environment. Raises ElasticctlError if none is named."""
    path = os.environ.get(OTHER_LIBRARIES, "")
    if not path:
        raise ElasticctlError(f"set {OTHER_LIBRARIES} to the python of an environment with torchft")
    return path


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "torchrun": lambda: Torchrun("torchrun", DEFAULTS),
    "torchrun-tuned": lambda: Torchrun("torchrun-tuned", TUNED),
    "torchft": lambda: TorchFT("torchft", "DistributedDataParallel"),
    "torchft-pure": lambda: TorchFT("torchft-pure", "PureDistributedDataParallel"),
    Local.name: Local,
}
"""What can be measured, by name."""
