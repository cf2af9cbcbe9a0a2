"""Contenders of the recovery benchmark that keep processes, too: torchft, and NVRx's in-process restart; and plain DDP.

They run with the interpreter of another virtual environment (`$OTHER_LIBRARIES`, the path of its `python`), because
their packages would change ours: `pip install torch torchft nvidia-resiliency-ext numpy`. Workers are started as in
their own examples. NVRx and plain DDP cannot admit a new worker, so lost ones are not replaced there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from benchmarks import processes
from benchmarks.recoveries.contenders import STORE_SERVER, AgentsJob, Contender, Job, Trial
from elasticctl.api.errors import ElasticctlError

VARIABLE = "OTHER_LIBRARIES"
_FOLDER = Path(__file__).parent
_LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000")


def python() -> str:
    """Return the other environment's interpreter. Raises ElasticctlError if none is named."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        raise ElasticctlError(f"set {VARIABLE} to the python of an environment with torchft and nvidia-resiliency-ext")
    return path


class TorchFT(Contender):
    """torchft: a lighthouse, and a torchrun for each replica group of one process."""

    def __init__(self, name: str, wrapper: str) -> None:
        self.name, self._wrapper = name, wrapper
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TorchFT:
        python()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_lighthouse()

    def start(self, trial: Trial) -> Job:
        self._end_lighthouse()
        port = processes.free_port()
        command = [str(Path(python()).with_name("torchft_lighthouse")), f"--bind=127.0.0.1:{port}", *_LIGHTHOUSE]
        with (trial.folder / "lighthouse.log").open("wb") as log:
            self._lighthouse = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        script = [
            str(_FOLDER / "torchft_loop.py"),
            f"--steps={trial.steps_file}",
            f"--step-s={trial.step_s}",
            f"--wrapper={self._wrapper}",
        ]
        command = [python(), "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
        commands = [[*command, f"--master-port={processes.free_port()}", *script] for _ in range(trial.workers)]
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


class PlainDDP(Contender):
    """DistributedDataParallel with a process per rank; with `restarts`, in NVRx's wrapper, and with a separate
    store."""

    def __init__(self, name: str, *, restarts: bool) -> None:
        self.name, self._restarts = name, restarts
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> PlainDDP:
        python()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_server()

    def start(self, trial: Trial) -> Job:
        self._end_server()
        script = [
            python(),
            str(_FOLDER / "ddp.py"),
            f"--storage={trial.folder / 'checkpoint.pt'}",
            f"--steps={trial.steps_file}",
            f"--step-s={trial.step_s}",
            f"--save-every-steps={trial.save_every_steps}",
        ]
        if self._restarts:
            command = [sys.executable, STORE_SERVER, "0"]
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            script.append(f"--nvrx-store-port={int(self._server.stdout.readline()) if self._server.stdout else 0}")
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
        environments = [
            {**shared, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(trial.workers)}
            for rank in range(trial.workers)
        ]
        return AgentsJob(trial, [script] * trial.workers, environments, replaces=False)

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()


OTHERS: dict[str, Callable[[], Contender]] = {
    "torchft": lambda: TorchFT("torchft", "DistributedDataParallel"),
    "torchft-pure": lambda: TorchFT("torchft-pure", "PureDistributedDataParallel"),
    "nvrx": lambda: PlainDDP("nvrx", restarts=True),
    "ddp": lambda: PlainDDP("ddp", restarts=False),
}
"""What else can be measured, by name."""
