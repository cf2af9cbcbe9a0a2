"""One rank of a trial, in a fresh process: it saves during training and measures, or restores and measures.

    python -m benchmarks.checkpoints.rank '{"contender": "boto3", …}'

It prints a line when it is ready, waits for a line, measures, and prints the result as JSON. See `Task` and
`TimedSaves`.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from benchmarks.checkpoints.contenders import BUCKET, CONTENDERS, Place
from benchmarks.checkpoints.training_state import Loop, Stretch, Trainee, Yardstick

_MOST_BUSY_SAVES = 12
_LEAST_QUIET_S = 0.25
_GROUP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank has to do. It trains for `settle_s` before its first save.

    `busy_s`: it saves during training until it has seen that many seconds of uploads.
    """

    phase: str
    contender: str
    size_bytes: int
    rank: int
    world_size: int
    port: int
    endpoint: str
    prefix: str
    seed: int
    idle_saves: int = 3
    busy_s: float = 1.0
    settle_s: float = 5.0
    newest: int = 0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class TimedSave:
    """One save. `kind`: the first of the process, one of an idle process, or one during training (`busy`).

    Training was stopped for `hold_s`; `commit_s` is the time from its start until it was complete in the storage;
    `cpu_s` is that of this process and its descendants (idle only). `copy_s`: a memcpy of the rank's share just before.
    Steps were counted just before the save (`quiet`), and between `hold_s` and the commit.
    """

    kind: str
    hold_s: float
    commit_s: float
    copy_s: float
    cpu_s: float | None = None
    quiet: Stretch | None = None
    during: Stretch | None = None


@dataclass(slots=True)
class TimedSaves:
    """The result of a saving rank.

    `extra_bytes`: the increase of the highest resident memory since before anything was prepared, of this process and
    its descendants, and the size of the local tier.
    """

    size_bytes: int
    saves: list[TimedSave] = field(default_factory=list)
    extra_bytes: int = 0
    digest: int = 0
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Restore:
    """The result of a restoring rank: seconds until the state was restored and the first step was done."""

    first_step_s: float
    digest: int


class MeasuredRank:
    """A process that trains, and the contender that it saves with."""

    def __init__(self, task: Task) -> None:
        self.task = task
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task.port)}
        os.environ |= {"RANK": str(task.rank), "WORLD_SIZE": str(task.world_size), "LOCAL_RANK": str(task.rank)}
        os.environ["LOCAL_WORLD_SIZE"] = str(task.world_size)
        dist.init_process_group("gloo", timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
        self.trainee = Trainee(task.size_bytes, task.seed)
        self.loop = Loop(task.world_size)
        self.loop.run_for(0.1)
        entry = CONTENDERS[task.contender]
        for module in entry.modules:
            importlib.import_module(module)
        self.contender = entry.make(Place(task.endpoint, task.prefix), task.rank)

    def save(self) -> TimedSaves:
        """Save while idle, then during training; see `TimedSaves`."""
        self.trainee.train_once()
        found = TimedSaves(self.trainee.size_bytes())
        yardstick = Yardstick(self.trainee, self.task.world_size)
        yardstick.copy_s()
        before_bytes = _start_of_peak()
        _rendezvous()
        self.contender.prepare(self.trainee)
        self.loop.run_for(self.task.settle_s)
        spent_s, unmapped_bytes = 0.0, 0
        while found.newest <= self.task.idle_saves or (spent_s < self.task.busy_s and self._more(found.newest)):
            found.newest += 1
            self.trainee.mark(found.newest)
            dist.barrier()
            copy_s = min(yardstick.copy_s() for _ in range(2))
            dist.barrier()
            if found.newest <= self.task.idle_saves + 1:
                save = self._save_idle("first" if found.newest == 1 else "idle", found.newest, copy_s)
            else:
                save = self._save_busy(found.newest, copy_s, found.saves[-1].commit_s)
                spent_s += self._broadcast_from_rank_0(save.commit_s - save.hold_s)
            found.saves.append(save)
            unmapped_bytes = max(unmapped_bytes, _unmapped_bytes(self.task.tier) // self.task.world_size)
            dist.barrier()
            if self.task.rank == 0 and not self.contender.cleans_up and found.newest > 1:
                self._drop(found.newest - 1)
        found.extra_bytes = _peak_bytes() - before_bytes + unmapped_bytes
        found.digest = self.trainee.digest()
        self.contender.close()
        return found

    def restore(self) -> Restore:
        """Restore the newest save, and make a step."""
        _rendezvous()
        dist.barrier()
        began_s = time.perf_counter()
        self.contender.restore(self.trainee, self.task.newest)
        self.loop.step()
        first_step_s = time.perf_counter() - began_s
        found = Restore(first_step_s, self.trainee.digest())
        self.contender.close()
        return found

    def _save_idle(self, kind: str, number: int, copy_s: float) -> TimedSave:
        cpu_before_s = _cpu_s()
        began_s = time.perf_counter()
        self.contender.save(self.trainee, number)
        hold_s = time.perf_counter() - began_s
        self.contender.wait()
        cpu_s = _cpu_s() - cpu_before_s
        return TimedSave(kind, hold_s, self._commit_s(began_s), copy_s, cpu_s=cpu_s)

    def _save_busy(self, number: int, copy_s: float, like_s: float) -> TimedSave:
        """Make steps without an upload for as long as an upload takes, then save and make steps until it is
        committed."""
        quiet = self.loop.run_for(max(_LEAST_QUIET_S, like_s))
        began_s = time.perf_counter()
        self.contender.save(self.trainee, number)
        hold_s = time.perf_counter() - began_s
        main = self.task.rank == 0
        during = self.loop.run(lambda: main and self.contender.committed_at_s() is not None)
        self.contender.wait()
        return TimedSave("busy", hold_s, self._commit_s(began_s), copy_s, quiet=quiet, during=during)

    def _commit_s(self, began_s: float) -> float:
        at_s = self.contender.committed_at_s()
        if at_s is None:
            raise RuntimeError("the save is over and was not committed")
        return at_s - began_s

    def _more(self, number: int) -> bool:
        return number <= self.task.idle_saves + _MOST_BUSY_SAVES

    def _broadcast_from_rank_0(self, value: float) -> float:
        """Return rank 0's value, so that all ranks make the same number of saves."""
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(tensor, src=0)
        return float(tensor)

    def _drop(self, number: int) -> None:
        """Have the server delete an old save, for contenders that leave that to the script."""
        query = urllib.parse.urlencode({"prefix": f"{BUCKET}/{self.task.prefix}/save-{number}/"})
        urllib.request.urlopen(f"{self.task.endpoint}/-/drop?{query}").close()


def _rendezvous() -> None:
    """Report to the parent process that this one is ready, and wait for its response."""
    print(json.dumps({"ready": os.getpid()}), flush=True)
    if not sys.stdin.readline():
        sys.exit(1)


def _cpu_s() -> float:
    """Return the processor time of this process and all its descendants, in seconds."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        seconds += times.user + times.system
    return seconds


def _start_of_peak() -> int:
    """Have the kernel record the highest resident memory from now on; return the present value in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def _peak_bytes() -> int:
    """Return the highest resident memory of this process, plus the unshared memory of its descendants."""
    below = [_status(child.pid) for child in psutil.Process().children(recursive=True)]
    return _status(os.getpid())["VmHWM"] + sum(found["VmHWM"] - found["RssShmem"] for found in below)


def _status(pid: int) -> dict[str, int]:
    """Return what the kernel reports about a process's memory, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def _unmapped_bytes(folder: str) -> int:
    """Return the size of the local tier's files that no rank has mapped, so that none counts them."""
    if not folder:
        return 0
    ranks = psutil.Process(os.getppid()).children()
    mapped = "".join(Path(f"/proc/{rank.pid}/maps").read_text() for rank in ranks)
    files = [path for path in Path(folder).rglob("*") if path.is_file() and str(path) not in mapped]
    return sum(path.stat().st_blocks * 512 for path in files)


def main() -> int:
    """Execute the task that the argument describes."""
    rank = MeasuredRank(Task(**json.loads(sys.argv[1])))
    found = rank.save() if rank.task.phase == "save" else rank.restore()
    dist.barrier()
    print(json.dumps({"found": asdict(found)}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
