"""One trial: the ranks of one contender save in fresh processes and others restore, with a sink of their own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.checkpoints.results import GB, Measurement, merge
from benchmarks.checkpoints.versity import KEY, Versity

NEEDS: Mapping[str, Sequence[str]] = {
    "boto3": ("boto3",),
    "dcp-thread": ("boto3",),
    "dcp-process": ("boto3",),
    "s3torchconnector": ("s3torchconnector", "s3torchconnectorclient", "tenacity"),
    "torchsnapshot": ("torchsnapshot", "aiobotocore", "aiofiles", "nest_asyncio"),
    "elasticctl": ("boto3",),
    "elasticctl-tier": ("boto3",),
    "obstore": ("obstore",),
}
"""Contender -> the packages that it needs."""

CLEANING = ("elasticctl", "elasticctl-tier", "obstore")
"""Contenders that delete their old saves. For the others the sink deletes them, so they run on no other server."""

TIER_VARIABLE = "ELASTICCTL_LOCAL_TIER"
_BUCKET = "benchmark"
_SHARED_MEMORY = Path("/dev/shm")
_MIB = 1 << 20
_PROCESS_BYTES = 500 * _MIB
_LIMIT_S = 120.0
_LIMIT_S_PER_GB = 150.0
_END_LIMIT_S = 20.0


class Failed(Exception):
    """A trial cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one trial measures. `rank.Task` describes the numbers of saves."""

    contender: str
    size_bytes: int
    ranks: int
    repeat: int
    idle_saves: int
    busy_s: float
    settle_s: float

    @property
    def name(self) -> str:
        return f"{self.contender}-{self.size_bytes}-{self.ranks}-{self.repeat}-{os.getpid()}"


def sink_bytes(size_bytes: int) -> int:
    """Return the memory of a sink that holds the newest save and the one being written, in chunks that are not all
    full."""
    return 2 * size_bytes + size_bytes // 8 + 128 * _MIB


def needed_bytes(size_bytes: int, ranks: int) -> int:
    """Return the most memory that a trial needs: that of the sink, and what the largest contenders were seen to use."""
    first = size_bytes + size_bytes // ranks + 3 * size_bytes
    others = size_bytes + size_bytes // ranks + 2 * size_bytes
    return sink_bytes(size_bytes) + first + (ranks - 1) * others + ranks * _PROCESS_BYTES


class Sink:
    """The server's process, and its accounts."""

    def __init__(self, size_bytes: int) -> None:
        command = [sys.executable, "-m", "benchmarks.checkpoints.sink", "--size-mib", str(-(-size_bytes // _MIB))]
        # A terminal's Ctrl-C, which goes to a whole process group, must not reach it: it is needed until the end.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            port = self._process.stdout.readline() if self._process.stdout else ""
            if not port:
                raise Failed("the sink did not start")
        except BaseException:
            self.__exit__()
            raise
        self.endpoint = f"http://127.0.0.1:{int(port)}"

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its standard input, which ends it
            self._process.kill()

    def ask(self, verb: str, **query: str) -> dict[str, Any]:
        """Send `stats`, `reset` or `drop`; return the sink's processor time and the requests that it has received."""
        url = f"{self.endpoint}/-/{verb}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


Server = Sink | Versity


def environment(endpoint: str, mark: str) -> dict[str, str]:
    """Return the environment of a process that talks to the sink, without real cloud settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "ELASTICCTL_"))}
    return kept | {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "OMP_NUM_THREADS": "1",
        processes.MARK: mark,
    }


def run_trial(plan: Plan, sink: Server) -> Measurement:
    """Measure once; a failure is a result, too. Everything that was started has ended when this returns."""
    plain = Measurement(plan.size_bytes, plan.ranks, plan.contender, plan.repeat)
    missing = [package for package in NEEDS[plan.contender] if find_spec(package) is None]
    if missing:
        return replace(plain, note=f"not measured: pip install {' '.join(missing)}")
    try:
        with _folder(plan) as tier:
            before = sink.ask("stats")["cpuS"]
            saves = _phase("save", plan, sink, tier, newest=0)
            sink_cpu_s = sink.ask("stats")["cpuS"] - before
            restores = _phase("restore", plan, sink, tier, newest=saves[0]["newest"])
            found = merge(plain, saves, restores)
            stored_gb = found.state_bytes * len(found.holds) / GB
            return replace(found, sink_cpu_s_per_gb=sink_cpu_s / stored_gb)
    except Failed as e:
        return replace(plain, note=f"failed: {e}")
    finally:
        processes.sweep(plan.name)
        sink.ask("drop", prefix=f"{_BUCKET}/")


@contextlib.contextmanager
def _folder(plan: Plan) -> Iterator[str]:
    """Return a folder for the local tier, for the contender that has one; "" otherwise."""
    if not plan.contender.endswith("-tier"):
        yield ""
        return
    folder = tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=_SHARED_MEMORY)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _phase(phase: str, plan: Plan, sink: Server, tier: str, newest: int) -> list[dict[str, Any]]:
    """Have all ranks save or restore; return what each measured. Raises Failed."""
    port = processes.free_port()
    environ = environment(sink.endpoint, plan.name) | ({TIER_VARIABLE: tier} if tier else {})
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(plan.ranks):
            task = {
                "phase": phase, "contender": plan.contender, "size_bytes": plan.size_bytes, "rank": rank,
                "world_size": plan.ranks, "port": port, "endpoint": sink.endpoint, "prefix": plan.name,
                "seed": 1 if phase == "save" else 2, "idle_saves": plan.idle_saves, "busy_s": plan.busy_s,
                "settle_s": plan.settle_s, "newest": newest, "tier": tier,
            }  # fmt: skip
            ranks.append(stack.enter_context(RankProcess(task, environ)))
        until_s = time.monotonic() + _LIMIT_S + _LIMIT_S_PER_GB * plan.size_bytes / GB * plan.ranks
        for process in ranks:
            process.line(until_s)
        for process in ranks:
            process.go()
        return [json.loads(process.line(until_s))["found"] for process in ranks]


class RankProcess:
    """A process of `rank`, which is killed on exit."""

    def __init__(self, task: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed when this is left
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.checkpoints.rank", json.dumps(task)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, env=environ, text=True,
        )  # fmt: skip
        self._name = f"{task['phase']}, rank {task['rank']}"
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # it has said all it had to say
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_LIMIT_S)
        processes.kill_trees([self._process.pid])
        with self._said, contextlib.suppress(BrokenPipeError), self._process:
            pass

    def go(self) -> None:
        """Let it begin."""
        if self._process.stdin:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def line(self, until_s: float) -> str:
        """Return the next line that it prints. Raises Failed if it exits without one, or at `until_s` (monotonic)."""
        try:
            line = self._lines.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise Failed(f"{self._name}: not done in time; it was ended") from None
        if not line:
            self._said.seek(0)
            words = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
            raise Failed(f"{self._name}: {(words or ['no word'])[-1][:200]}")
        return line

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")
