"""How the controller on Kubernetes performs with a thousand workers and more, compared with the Job controller.

    export KUBECONFIG=…        # kubelab with two nodes, ten hollow ones, and JobSet if it is to be compared
    python -m benchmarks.controller [--part NAME ...] [--workers 1000] [--held 5000] [--repeats 2] [--kills 20]

Two controllers run as processes next to the cluster, as in its tests. The parts:

- `create`: how fast pods are created and replaced, by us and others. No scheduler accepts these pods, so that running
  them does not compete with creating them for this machine's processors.
- `loss`: pods "run" on hollow nodes, without containers; single pods are lost, then two nodes.
- `rest`: what the controllers use while many pods exist and nothing happens, and how fast one starts.
- `fail-over`: the leader is killed together with a worker, of twenty jobs of one worker on real nodes.

One watch records when a pod was created, by any controller. docs/performance.md has results.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.cluster import NOBODY, Load, NotInTime, names, until
from benchmarks.figures import Figure, percentile, progress, show_figures
from benchmarks.pod_controllers import JOB_CONTROLLER, OURS, compare
from benchmarks.programs import count, end_as_by_ctrl_c, parser
from elasticctl.api.errors import ElasticctlError
from elasticctl.kubeapi.connection import Connection, connect
from tests.on_cluster.commands import LAB_HOME
from tests.on_cluster.replicas import Replica, Replicas, prepare

QUIET_S, REST_S = 10.0, 60.0
SMALL_JOBS, SMALL_WORKERS = 50, 20
LOSS_PAUSE_S, GROWTH, REAL = 0.1, 100, {"kubelab/real": "true"}
_WRITES = re.compile(r'^elasticctl_api_requests_total\{.*verb="(POST|PUT|PATCH|DELETE)".*\} ([\d.]+)', re.MULTILINE)
_LISTED = re.compile(r"/api/v1/pods: (\d+) objects listed in ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Bench:
    """What is under load."""

    api: Connection
    load: Load
    replicas: Replicas


def create(bench: Bench, workers: int, repeats: int) -> Iterator[Figure]:
    """Measure how fast pods of one large job, and of many small ones, are created and replaced: ours and others'."""
    shapes = [(1, workers), (SMALL_JOBS, SMALL_WORKERS)]
    for work, by_whom in compare(bench.load, bench.api, shapes, repeats).items():
        theirs = by_whom.get(JOB_CONTROLLER)
        goal = percentile(theirs, 0.5) if theirs else None
        for who, values in by_whom.items():
            yield Figure(f"{work}: {who}", "s", values, goal if who == OURS else None)


def lose_pods(bench: Bench, workers: int, samples: int) -> Iterator[Figure]:
    """Measure how fast deleted pods are created again, one after the other, and those of lost nodes."""
    load, found = bench.load, []
    load.create_ours("large", 1, most=workers)
    load.grow("large", workers, GROWTH)
    for name in random.Random(0).sample(sorted(load.pods.uids()), min(samples, workers)):
        found.append(_replace(load, name))
        time.sleep(LOSS_PAUSE_S)
    yield Figure(f"a pod of {workers} lost, until it is created again", "s", found, 0.5, 0.99)
    nodes = [node["metadata"]["name"] for node in bench.api.request("GET", "/api/v1/nodes")["items"]]
    gone, silent = [name for name in nodes if name.startswith("hollow-") and load.pods.on(name)][-2:]
    for node, how in ((gone, "deleted"), (silent, "silent")):
        lost = load.pods.on(node)
        os.kill(int((LAB_HOME / "pid" / node).read_text().split()[0]), signal.SIGKILL)
        if how == "deleted":
            bench.api.request("DELETE", f"/api/v1/nodes/{node}")
        else:
            until(lambda: _is_silent(bench.api, silent), 120, f"the end of {silent}")
        at = time.monotonic()
        last = max(_wait_replaced(load, name, uid) for name, uid in lost.items())
        yield Figure(f"{len(lost)} pods of a {how} node, until all are created again", "s", [last - at], 3.0)
    load.clear()


def rest(bench: Bench, workers: int, held: int) -> Iterator[Figure]:
    """Measure what the controllers use while nothing happens, and how long a new one takes to list all pods."""
    load, replicas = bench.load, bench.replicas
    for number, name in enumerate(names("held", -(-held // workers))):
        load.create_ours(name, min(workers, held - workers * number), schedulerName=NOBODY)
    until(lambda: len(load.pods) == held, 600, f"{held} pods")
    leader = replicas.leader()
    seen, since = _writes(leader), time.monotonic()
    while time.monotonic() < since + QUIET_S:
        if (now := _writes(leader)) != seen:
            seen, since = now, time.monotonic()
        time.sleep(1.0)
    processes = [psutil.Process(replica.process.pid) for replica in replicas.running]
    memory = [process.memory_info().rss / 2**20 for process in processes]
    yield Figure(f"resident memory with {held} pods, of each controller", "MiB", memory, 256.0, 1.0)
    process, began = psutil.Process(leader.process.pid), time.monotonic()
    used_s = sum(process.cpu_times()[:2])
    time.sleep(REST_S)
    share = 100 * (sum(process.cpu_times()[:2]) - used_s) / (time.monotonic() - began)
    yield Figure("processor at rest", "% of a core", [share], 1.0)
    yield Figure(f"writes in {REST_S:.0f} s at rest, but for the lease", "", [_writes(leader) - seen], 0.0)
    started = replicas.start()
    listed_s = until(lambda: _list_duration_s(started, held), 120, "a list of all pods")
    yield Figure(f"{held} pods listed by a controller that starts", "s", [listed_s], 3.0)
    load.clear()


def fail_over(bench: Bench, kills: int) -> Iterator[Figure]:
    """Measure how fast a worker that is lost with the leader is created again: of another job each time, because a job
    that loses many backs off."""
    load, replicas, took_s = bench.load, bench.replicas, []
    jobs = list(names("job", 20))
    for name in jobs:
        load.create_ours(name, 1, nodeSelector=REAL)
    for number in range(kills):
        until(lambda: load.pods.running() == len(jobs), 300, "all workers")
        leader = replicas.leader()
        leader.process.kill()
        took_s.append(_replace(load, sorted(load.pods.uids())[number % len(jobs)]))
        replicas.running.remove(leader)
        progress(f"leader killed: {took_s[-1]:.2f} s")
        started = replicas.start()
        until(lambda: "elasticjobs: " in started.log.read_text() and started.metrics(), 60, "a replica")  # noqa: B023
    yield Figure("a worker lost with the leader, until it is created again", "s", took_s, 5.0, 1.0)
    load.clear()


def _replace(load: Load, name: str) -> float:
    """Delete a pod; return the seconds until it is created again."""
    uid = load.pods.uids()[name]
    load.delete_pod(name)
    at = time.monotonic()
    return max(0.0, _wait_replaced(load, name, uid) - at)


def _wait_replaced(load: Load, name: str, uid: str) -> float:
    return until(lambda: load.pods.replaced_at(name, uid), 120, f"the replacement of {name}")


def _is_silent(api: Connection, node: str) -> bool:
    conditions = api.request("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
    return any((item["type"], item["status"]) == ("Ready", "Unknown") for item in conditions)


def _writes(replica: Replica) -> float:
    return sum(int(float(number)) for _, number in _WRITES.findall(replica.metrics()))


def _list_duration_s(replica: Replica, held: int) -> float | None:
    """Return how long listing that many pods took, once its log says so."""
    found = _LISTED.search(replica.log.read_text())
    return float(found.group(2)) if found and int(found.group(1)) >= held else None


@contextmanager
def opened() -> Iterator[Bench]:
    """Start controllers and create an empty namespace; end them afterwards."""
    api = connect(connections=32)
    prepare(api)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(api, Load(api), Replicas(Path(folder)))
        bench.load.open()
        try:
            for _ in range(2):
                bench.replicas.start()
            bench.replicas.leader()
            yield bench
        finally:
            bench.replicas.stop()
            bench.load.pods.stop()
            bench.load.close()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if a goal was missed or something did not happen, 130 after Ctrl-C."""
    options = parser(__doc__)
    parts = ("create", "loss", "rest", "fail-over")
    options.add_argument("--part", action="append", choices=parts, help="repeatable; all by default")
    options.add_argument("--workers", type=count, default=1000, metavar="N", help="workers of the large job")
    options.add_argument("--held", type=count, default=5000, metavar="N", help="pods that exist while nothing changes")
    options.add_argument("--losses", type=count, default=200, metavar="N", help="pods that are lost one by one")
    options.add_argument("--repeats", type=count, default=2, metavar="N", help="rounds of `create`")
    options.add_argument("--kills", type=count, default=20, metavar="N", help="leaders that are killed")
    args = options.parse_args(argv)
    end_as_by_ctrl_c()
    figures: list[Figure] = []
    code = 0
    try:
        with opened() as bench:
            measured = {
                "create": lambda: create(bench, args.workers, args.repeats),
                "loss": lambda: lose_pods(bench, args.workers, args.losses),
                "rest": lambda: rest(bench, args.workers, args.held),
                "fail-over": lambda: fail_over(bench, args.kills),
            }
            for part in args.part or parts:
                for figure in measured[part]():
                    figures.append(figure)
                    progress(f"{figure.name}: {percentile(figure.values, 0.5):.2f} {figure.unit}")
    except KeyboardInterrupt:
        code = 130
    except (ElasticctlError, NotInTime, AssertionError) as e:
        progress(f"stopped: {e}")
        code = 1
    met = show_figures("the controller on Kubernetes", figures)
    return code or int(not met)


if __name__ == "__main__":
    sys.exit(main())
