"""How long a user waits for the command line: to start, compared with kubectl, and until a job's first step.

    python -m benchmarks.command_line startup [--runs 15]        # make startup
    python -m benchmarks.command_line kubectl [--runs 20] [--jobs 1000]
    python -m benchmarks.command_line first-step [--runs 3]

`startup` times whole processes on a local cluster of their own. `kubectl` times them next to kubectl, on a small API
server that answers immediately, with one job and with many. `first-step` submits a small DistributedDataParallel script
with two workers to a new local cluster: the first submit of a run, which is called cold, starts that cluster, and three
warm ones follow. Commands take turns; the first turn only warms up.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, in_turns, percentile, show, show_figures
from benchmarks.programs import count, elasticctl, installed_environment, local_cluster, parser
from elasticctl.api.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION, worker_name
from elasticctl.settings import contexts
from elasticctl.settings.contexts import Config, Context
from elasticctl_protocol import variables
from tests.support.certificates import issue, pem, server_context
from tests.support.fakeapi import FakeApi, Object, Request
from tests.support.jobs import shell_job

JOBS = f"/apis/{API_VERSION}/namespaces/default/{PLURAL}"
NAME = "api.benchmark"
_VERBS = ["get", "list", "watch", "create", "patch", "delete"]
WARM, WORKERS = 3, 2
GOALS_MS = {"elasticctl --help": 150.0, "complete `elasticctl s`": 150.0, "complete `elasticctl status `": 150.0}
_SCRIPT = """\
import time

import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    if step == 0:
        print("first step at", time.time(), flush=True)
"""
_FIRST_STEP = re.compile(rb"first step at ([\d.]+)")

Command = tuple[Sequence[str], Mapping[str, str]]
"""The argv, and what is added to the environment."""
Times = dict[str, list[tuple[float, float]]]
"""Command -> (wall, processor) milliseconds of each run."""


def time_commands(commands: Mapping[str, Command], environ: Mapping[str, str], runs: int) -> Times:
    """Run each command `runs` times after a first turn. Raises SystemExit if one fails."""
    found: Times = {name: [] for name in commands}
    for turn, (name, (argv, more)) in in_turns([*commands.items()], runs + 1):
        began = time.perf_counter()
        process = subprocess.Popen(
            argv,
            env={**environ, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
        wall_ms = (time.perf_counter() - began) * 1000
        process.returncode = status
        if status:
            raise SystemExit(f"{' '.join(argv)} ended with status {status}")
        if turn:
            found[name].append((wall_ms, (used.ru_utime + used.ru_stime) * 1000))
    return found


def cells(times: Sequence[tuple[float, float]]) -> list[str]:
    """Return the medians of wall and processor time, with the lowest in parentheses."""
    return [f"{percentile(found, 0.5):.0f} ({min(found):.0f})" for found in zip(*times, strict=True)]


def startup(runs: int) -> None:
    """Time commands on a local cluster, and the bare interpreter."""
    verbs = (["--help"], ["version"], ["submit", "--help"], ["list"], ["list", "-o", "json"])
    commands: dict[str, Command] = {" ".join(["elasticctl", *verb]): ([elasticctl(), *verb], {}) for verb in verbs}
    for name in ("complete `elasticctl s`", "complete `elasticctl status `"):
        asked = {"_ELASTICCTL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": name.split("`")[1]}
        commands[name] = ([elasticctl()], asked)
    commands["python -c pass"] = ([sys.executable, "-c", "pass"], {})
    with local_cluster() as environ:
        found = time_commands(commands, environ, runs)
    rows = [[name, *cells(times), f"{GOALS_MS[name]:.0f}" if name in GOALS_MS else ""] for name, times in found.items()]
    show("ms of a command: median (lowest)", ["command", "wall", "CPU", "goal"], rows)


def compare_with_kubectl(runs: int, jobs: int) -> None:
    """Time commands and their counterparts of kubectl, with one job and with `jobs`."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise SystemExit("kubectl is not installed")
    ours, theirs = {"list": ["list"]}, {"list": [kubectl, "get", PLURAL]}
    ours |= {"list -o json": ["list", "-o", "json"], "status JOB": ["status", "job-0000"]}
    theirs |= {"list -o json": [*theirs["list"], "-o", "json"], "status JOB": [*theirs["list"], "job-0000"]}
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="ec-", dir="/tmp") as home,
        serving(Path(home)) as (server, environ),
    ):
        for number in sorted({1, jobs}):
            fill(server, number)
            commands: dict[str, Command] = {f"our {name}": ([elasticctl(), *words], {}) for name, words in ours.items()}
            commands |= {f"their {name}": (argv, {}) for name, argv in theirs.items()}
            found = time_commands(commands, environ, runs)
            for name in ours:
                pair = zip(cells(found[f"our {name}"]), cells(found[f"their {name}"]), strict=True)
                rows.append([f"{name} of {number:,}", *(cell for cells_ in pair for cell in cells_)])
    columns = ["command", *(f"{who}, {what}" for what in ("wall", "CPU") for who in ("elasticctl", "kubectl"))]
    show("ms of a command on an API server that answers immediately: median (lowest)", columns, rows)


def first_step(runs: int) -> bool:
    """Time submits until the first byte of output, and until the end of the job's first step."""
    waited: dict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="ec-", dir="/tmp") as folder, local_cluster() as environ:
            script = Path(folder, "train.py")
            script.write_text(_SCRIPT)
            for start in ("cold", *["warm"] * WARM):
                byte_s, step_s = _submit(script, environ)
                waited["byte"].append(byte_s)
                waited[start].append(step_s)
    figures = [
        Figure("first step, local cluster not yet running", "s", waited["cold"], 12.0),
        Figure("first step, local cluster running", "s", waited["warm"], 5.0),
        Figure("first byte of output", "s", waited["byte"], 0.3),
    ]
    return show_figures(f"from `elasticctl submit` on, {WORKERS} workers", figures)


def _submit(script: Path, environ: Mapping[str, str]) -> tuple[float, float]:
    """Submit a job and follow it until it ends. Raises SystemExit if it fails."""
    began_at = time.time()
    argv = [elasticctl(), "submit", script.name, "--workers", str(WORKERS)]
    with subprocess.Popen(
        argv, cwd=script.parent, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None
        said = os.read(run.stdout.fileno(), 65536)
        first_byte_s = time.time() - began_at
        said += run.stdout.read()
    found = _FIRST_STEP.search(said)
    if run.returncode or found is None:
        raise SystemExit(f"the submit ended with {run.returncode}:\n{said.decode(errors='replace')}")
    return first_byte_s, float(found[1]) - began_at


def discovery() -> dict[str, Object]:
    """Return path -> what kubectl reads there before it knows what a job or a pod is."""
    group = {"groupVersion": API_VERSION, "version": VERSION}
    jobs = {"name": PLURAL, "singularName": "elasticjob", "namespaced": True, "kind": KIND, "verbs": _VERBS}
    return {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [{"name": GROUP, "versions": [group], "preferredVersion": group}],
        },
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        f"/apis/{API_VERSION}": {"kind": "APIResourceList", "groupVersion": API_VERSION, "resources": [jobs]},
    }


class JobServer(FakeApi):
    """The tests' server, which answers immediately, with the discovery that kubectl needs before its first request."""

    _known = discovery()

    def answer(self, request: Request) -> tuple[int, Any]:
        if request.path in self._known:
            return 200, self._known[request.path]
        status, content = super().answer(request)
        if request.method == "GET" and isinstance(content, dict) and "items" in content:
            content = {"kind": f"{KIND}List", "apiVersion": API_VERSION, **content}
        return status, content


def running_job(name: str) -> Object:
    """Return a job as a controller leaves it after some hours: what a list has to carry."""
    job: Object = shell_job(name, "python train.py", 4, minReplicas=1, maxReplicas=8)
    now = time.time()

    def at(ago_s: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - ago_s))

    job["metadata"] |= {"uid": name, "creationTimestamp": at(7200)}
    workers = [{"name": worker_name(name, i), "uid": f"{name}-{i}", "index": i, "phase": "Running"} for i in range(4)]
    names = [worker["name"] for worker in workers]
    job["status"] = {
        "phase": "Running",
        "active": 4,
        "desired": 4,
        "startTime": at(7190),
        "workers": [{**worker, "startedAt": at(7180), "node": f"node-{worker['index']}"} for worker in workers],
        "restarts": {"Preempted": 10},
        "interruptions": [
            {"at": at(600 * n + 60), "worker": names[n % 4], "cause": "Preempted", "recoveryS": 2.5, "stepsRedone": 0}
            for n in range(10, 0, -1)
        ],
        "generations": [
            {"generation": 11 - n, "workers": names, "formedAt": at(600 * n), "firstStepAt": at(600 * n - 2)}
            for n in range(10, 0, -1)
        ],
        "progress": {"at": at(0), "step": 12_000, "totalSteps": 90_000, "epoch": 3, "samplesPerS": 8123.0},
        "checkpoint": {"step": 11_990, "at": at(5), "committed": 700, "url": f"s3://bucket/{name}"},
    }
    return job


def fill(server: JobServer, jobs: int) -> None:
    """Create that many jobs."""
    for number in range(jobs):
        name = f"job-{number:04}"
        server.put(f"{JOBS}/{name}", running_job(name))


@contextmanager
def serving(home: Path) -> Iterator[tuple[JobServer, Mapping[str, str]]]:
    """Serve over TLS; yield the server, and the environment in which elasticctl and kubectl use it. `home`: for their
    files."""
    authority = issue("the benchmark's authority")
    server = JobServer(server_context(pem(issue(NAME, authority))))
    trusted = base64.b64encode(pem(authority).certificate).decode()
    cluster = {"server": server.url, "tls-server-name": NAME, "certificate-authority-data": trusted}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "me", "namespace": "default"}}],
        "clusters": [{"name": "bench", "cluster": cluster}],
        "users": [{"name": "me", "user": {"token": "none"}}],
    }
    path = home / "kubeconfig"
    path.write_text(json.dumps(kubeconfig))
    context = Context("bench", contexts.KUBERNETES)
    contexts.save_config(Config("bench", (Context(contexts.LOCAL, contexts.LOCAL), context)), home / "config.yaml")
    # kubectl caches its discovery below HOME.
    environ = {**installed_environment(), variables.HOME: str(home), "KUBECONFIG": str(path), "HOME": str(home)}
    try:
        yield server, environ
    finally:
        server.close()


def main(argv: list[str] | None = None) -> int:
    """Print one table; return 1 if a goal of `first-step` is missed."""
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("what", choices=["startup", "kubectl", "first-step"])
    options.add_argument("--runs", type=count, metavar="N", help="of each command (15, 20, 3)")
    options.add_argument("--jobs", type=count, default=1000, metavar="N", help="that `kubectl` lists (1000)")
    args = options.parse_args(argv)
    if args.what == "first-step":
        return int(not first_step(args.runs or 3))
    if args.what == "startup":
        startup(args.runs or 15)
    else:
        compare_with_kubectl(args.runs or 20, args.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
