"""A real rendezvous service on a Unix socket, and real launchers against it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from elasticctl.api.codec import Manifest
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.group.failures import GroupRules
from elasticctl_controller.core.interruption_notices import Leaving
from elasticctl_controller.rendezvous.listener import Listener
from elasticctl_controller.rendezvous.service import RendezvousService
from tests.support.forked.launcher import ForkedLauncher
from tests.support.jobs import LIGHT
from tests.support.ports import free_port

KEY, JOB_UID = "default/job", "job-uid"
PATIENCE_S = 240.0
"""Launchers and ranks import torch, which takes long on a machine that is busy."""
TOKEN = "right-token"  # a test's, not a secret

RANK = """
import json, os, socket, sys, time
e = os.environ
known = {"rank": int(e["RANK"]), "generation": int(e["ELASTICCTL_GENERATION"])}
wire = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def report(kind, step):
    wire.sendto(json.dumps({"kind": kind, "step": step, **known}).encode(), e["ELASTICCTL_AGENT_SOCKET"])
steps = 0
if "SILENT" not in e:
    report("progress", 1)
print(f"rank {e['RANK']} of {e['WORLD_SIZE']} generation {e['ELASTICCTL_GENERATION']} pid {os.getpid()}", flush=True)
while not os.path.exists(e["LAB"] + "/done"):
    if os.path.exists(e["LAB"] + "/fail-" + e["ELASTICCTL_WORKER"]):
        raise ValueError("the loss is not a number")
    if os.path.exists(e["ELASTICCTL_NOTICE_FILE"]) and "STUBBORN" not in e:
        mark = f"{e['LAB']}/reached-{known['generation']}-"
        open(mark + e["RANK"], "w").close()  # the library's ranks agree on a step; these ones wait for each other
        while not all(os.path.exists(mark + str(rank)) for rank in range(int(e["WORLD_SIZE"]))):
            time.sleep(0.02)
        report("drained", 7)
        time.sleep(60)
    if "COUPLED" in e:  # in step with the others, as training is
        steps = steps + 1
        counter = f"{e['LAB']}/steps-{known['generation']}-"
        with open(counter + e["RANK"], "a") as file:
            file.write("x")
        for rank in range(int(e["WORLD_SIZE"])):
            while not os.path.exists(counter + str(rank)) or os.path.getsize(counter + str(rank)) < steps:
                if os.path.exists(e["LAB"] + "/done"):
                    break  # the other has seen it first
                time.sleep(0.01)
        report("progress", steps)
    time.sleep(0.02)
"""
"""A rank that behaves as the training library does."""


class Site:
    """A RendezvousService served from a thread of its own until `stop`; `verbs` are those that were called.

    `changed` are the jobs that it has called for, `address` is where it listens besides (host:port).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: dict[str, Manifest] = {}
        self.changed: list[str] = []
        self.service = RendezvousService(lambda uid, number: TOKEN, self.changed.append, find_job=self.jobs.get)
        self.verbs: set[str] = set()
        self.address = f"127.0.0.1:{free_port()}"
        self._started = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(PATIENCE_S)

    async def _serve(self) -> None:
        @web.middleware
        async def note_verb(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.verbs.add(request.path.rpartition("/")[2])
            return await handler(request)

        app = self.service.app()
        app.middlewares.append(note_verb)
        listener = Listener(app, self.service)
        await listener.open_unix(str(self.path))
        host, port = self.address.split(":")
        await listener.open_tcp(host, int(port))
        self._started.set()
        while not self._stop.is_set():
            await asyncio.sleep(0.02)
        await listener.cleanup()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)


class Lab:
    """Workers of one job: start a launcher per worker, say who is alive, read what they printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = Site(folder / "r.sock")
        self.alive: dict[str, str] = {}
        self.rules = GroupRules()
        self.leaving = Leaving()
        self.minimum = 1
        self.workers: dict[str, subprocess.Popen[bytes] | ForkedLauncher] = {}
        (folder / "token").write_text(TOKEN)

    def tell(self, status: JobStatus | None = None) -> None:
        self.site.service.set_group(
            KEY,
            status=status or JobStatus(),
            job_uid=JOB_UID,
            alive=dict(self.alive),
            minimum=self.minimum,
            leaving=self.leaving,
            rules=self.rules,
        )

    def restart_service(self, status: JobStatus) -> None:
        self.site.stop()
        self.site = Site(self.folder / "r.sock")
        self.tell(status)

    def start(self, name: str, *command: str, options: tuple[str, ...] = (), forks: bool = False, **env: str) -> None:
        """Start our launcher for the worker `name`; `options` are the launcher's. Its spares are `LIGHT` otherwise.

        `forks`: the ranks of a script that imports torch are to be forked, as it takes seconds of a processor for each.
        """
        with self._log(name) as log:
            argv = [*LIGHT, *options, "--", *command]
            environ = self._environment(name, env)
            self.workers[name] = ForkedLauncher(argv, environ, self.folder, log, forks=forks)

    def start_script(self, name: str, **env: str) -> None:
        """Start our launcher for the worker `name` with `RANK`."""
        self.start(name, sys.executable, "-c", RANK, LAB=str(self.folder), **env)

    def run(self, name: str, argv: list[str], **env: str) -> None:
        """Run any process as the worker `name`."""
        with self._log(name) as log:
            environment = self._environment(name, env)
            self.workers[name] = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, cwd=self.folder)

    def _log(self, name: str) -> BinaryIO:
        return (self.folder / f"{name}.log").open("wb")

    def _environment(self, name: str, env: Mapping[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            "ELASTICCTL_JOB": "job",
            "ELASTICCTL_WORKER": name,
            "ELASTICCTL_POD_UID": f"uid-{name}",
            "ELASTICCTL_RDZV_ENDPOINT": f"unix://{self.folder}/r.sock",
            "ELASTICCTL_RDZV_TOKEN_FILE": str(self.folder / "token"),
            "ELASTICCTL_TERMINATION_LOG": str(self.folder / f"{name}.end"),
            **env,
        }

    def add(self, *names: str) -> None:
        self.alive |= {f"uid-{name}": name for name in names}
        self.tell()

    def kill(self, name: str) -> None:
        """SIGKILL to the launcher alone: its ranks have to go by themselves."""
        self.workers[name].send_signal(signal.SIGKILL)
        self.workers[name].wait()
        del self.alive[f"uid-{name}"]
        self.tell()

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def message(self, name: str) -> dict[str, object]:
        loaded: dict[str, object] = json.loads((self.folder / f"{name}.end").read_text())
        return loaded

    def wait(self, name: str) -> int:
        """Wait for a launcher's end; returns its exit code."""
        self.until(lambda: self.workers[name].poll() is not None)
        return self.workers[name].wait()

    def until(self, condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self.output(name)}" for name in self.workers)
                pytest.fail(f"condition not met within {timeout_s} s\n{logs}")
            time.sleep(0.02)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()
        self.site.stop()


def _make_lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="el-") as folder:
        made = Lab(Path(folder))
        yield made
        made.close()


@pytest.fixture
def lab() -> Iterator[Lab]:
    yield from _make_lab()


@pytest.fixture
def another_lab() -> Iterator[Lab]:
    """With a job of its own."""
    yield from _make_lab()
