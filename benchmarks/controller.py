"""How the controller on Kubernetes performs with a thousand workers and more, compared with the Job controller.

    export KUBECONFIG=…        # kubelab with ten hollow nodes, and JobSet if it is to be compared
    python benchmarks/controller.py [--workers 1000] [--held 5000] [--repeats 3] [--json FILE]

Two controllers run as processes beside the cluster, as in its tests. How fast pods are created is measured with pods
that no scheduler accepts, so that running them does not compete with creating them for this machine's processors. After
that they "run" on hollow nodes, without containers; two of those nodes are lost in the end. One watch tells when a pod
was created, whoever created it. docs/performance.md describes the method and has results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.clusterload import NOBODY, Load, Missing, names, until
from benchmarks.commandline import count, end_as_by_ctrl_c
from benchmarks.pod_controllers import JOB_CONTROLLER, OURS, compare
from benchmarks.replicas import Replica, Replicas, prepare
from benchmarks.results import percentile
from elasticctl.api.errors import ElasticctlError
from elasticctl.kubeapi.connection import Connection, connect

QUIET_S, REST_S = 10.0, 60.0
SMALL_JOBS, SMALL_WORKERS = 50, 20
LOSS_PAUSE_S = 0.1
GROWTH = 100
_WRITES = re.compile(r'^elasticctl_api_requests_total\{.*verb="(POST|PUT|PATCH|DELETE)".*\} ([\d.]+)', re.MULTILINE)
_LISTED = re.compile(r"/api/v1/pods: (\d+) objects listed in ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure; `fraction` is the percentile that is compared with `aim`; None: there is no aim."""

    name: str
    unit: str
    values: tuple[float, ...]
    aim: float | None = None
    fraction: float = 1.0

    @property
    def decisive(self) -> float:
        """The value that is compared with the aim."""
        return percentile(sorted(self.values), self.fraction)

    @property
    def met(self) -> bool | None:
        """Whether the aim is reached; None if there is none."""
        return None if self.aim is None else self.decisive <= self.aim


@dataclass(slots=True)
class Session:
    """One run: what is under load, and the results so far."""

    api: Connection
    load: Load
    replicas: Replicas
    lab_home: Path
    say: Console
    figures: list[Figure] = field(default_factory=list)

    def kill_hollow(self, node: str) -> None:
        """Kill a hollow node's process."""
        os.kill(int((self.lab_home / "pid" / node).read_text().split()[0]), signal.SIGKILL)

    def found(self, name: str, unit: str, values: Sequence[float], aim: float | None = None, at: float = 1.0) -> None:
        """Keep a figure, and print it."""
        self.figures.append(Figure(name, unit, tuple(values), aim, at))
        self.tell(name, values, unit)

    def tell(self, what: str, values: Sequence[float], unit: str) -> None:
        """Print the highest of the values, as progress."""
        shown = ", ".join(f"{value:.2f}" for value in sorted(values)[-5:])
        self.say.print(f"{what}: {shown} {unit}", markup=False, soft_wrap=True)


def comparison(session: Session, workers: int, repeats: int) -> None:
    """Measure how fast pods of one large job, and of many small ones, are created and replaced: ours and others'."""
    shapes = [(1, workers), (SMALL_JOBS, SMALL_WORKERS)]
    found = compare(
        session.load,
        session.api,
        shapes,
        repeats,
        lambda timing: session.tell(f"{timing.work}, {timing.who}", [timing.took_s], "s"),
    )
    for work, by_whom in found.items():
        theirs = sorted(by_whom.get(JOB_CONTROLLER, ()))
        aim = percentile(theirs, 0.5) if theirs else None
        for who, values in by_whom.items():
            session.found(f"{work}: {who}", "s", values, aim if who == OURS else None, 0.5)


def losses(session: Session, workers: int, samples: int) -> None:
    """Measure how fast a deleted pod is created again, one after the other."""
    pods, found = session.load.pods, []
    for name in random.Random(0).sample(sorted(pods.uids()), min(samples, workers)):
        uid = pods.uids()[name]
        session.load.delete_pod(name)
        at = time.monotonic()
        until(lambda name=name, uid=uid: pods.replaced_at(name, uid), 60, f"the replacement of {name}")
        found.append(max(0.0, (pods.replaced_at(name, uid) or at) - at))
        time.sleep(LOSS_PAUSE_S)
    session.found(f"a pod of {workers} lost, until it is created again (p99)", "s", found, 1.0, 0.99)


def lost_nodes(session: Session) -> None:
    """Measure how fast all pods of a node are created again: of a deleted one, and of one that falls silent."""
    nodes = [node["metadata"]["name"] for node in session.api.request("GET", "/api/v1/nodes")["items"]]
    gone, silent = [name for name in nodes if name.startswith("hollow-") and session.load.pods.on(name)][-2:]
    for node, how in ((gone, "deleted"), (silent, "silent")):
        on_it = session.load.pods.on(node)
        session.kill_hollow(node)
        if how == "deleted":
            session.api.request("DELETE", f"/api/v1/nodes/{node}")
        else:
            until(lambda: _is_silent(session.api, silent), 120, f"{silent} to be given up")
        at = time.monotonic()
        until(lambda: _are_replaced(session, on_it), 120, f"the replacement of all pods of {node}")  # noqa: B023
        last = max(session.load.pods.replaced_at(name, uid) or at for name, uid in on_it.items())
        session.found(f"{len(on_it)} pods of a {how} node, until all are created again", "s", [last - at], 3.0)


def come_to_rest(session: Session) -> None:
    """Wait until the leader has written nothing for a while."""
    leader = session.replicas.leader()
    seen, since = _writes(leader), time.monotonic()

    def is_quiet() -> bool:
        nonlocal seen, since
        if (now := _writes(leader)) != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() > since + QUIET_S

    until(is_quiet, 300, "the controller to come to rest")


def at_rest(session: Session, held: int) -> None:
    """Measure what the controllers use while nothing happens."""
    leader = session.replicas.leader()
    memory = [_resident_mib(replica) for replica in session.replicas.running]
    session.found(f"resident memory with {held} pods, of either controller", "MiB", memory, 256.0)
    process, writes = psutil.Process(leader.process.pid), _writes(leader)
    began, used_s = time.monotonic(), sum(process.cpu_times()[:2])
    time.sleep(REST_S)
    share = 100 * (sum(process.cpu_times()[:2]) - used_s) / (time.monotonic() - began)
    session.found(f"processor at rest with {held} pods", "% of a core", [share], 1.0)
    session.found(f"writes in {REST_S:.0f} s at rest, but for the lease", "requests", [_writes(leader) - writes], 0.0)


def fail_overs(session: Session, held: int, repeats: int) -> None:
    """Measure how fast a worker that is lost with the leader is created again, and how long listing all pods takes."""
    took_s, listed_s = [], []
    pods = session.load.pods
    for _ in range(repeats):
        leader = session.replicas.leader()
        name, uid = next(iter(sorted(pods.uids().items())))
        leader.process.kill()
        at = time.monotonic()
        session.load.delete_pod(name)
        until(lambda: pods.replaced_at(name, uid), 120, f"the replacement of {name}")  # noqa: B023
        took_s.append((pods.replaced_at(name, uid) or at) - at)
        session.replicas.running.remove(leader)
        newcomer = session.replicas.start()
        until(lambda: list_duration_s(newcomer, held), 120, "a list of all pods")  # noqa: B023
        listed_s.append(list_duration_s(newcomer, held) or 0.0)
    session.found("fail-over: a worker lost with the leader, until it is created again", "s", took_s, 20.0)
    session.found(f"{held} pods listed by a controller that starts", "s", listed_s, 3.0)


def _is_silent(api: Connection, node: str) -> bool:
    conditions = api.request("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
    return any((item["type"], item["status"]) == ("Ready", "Unknown") for item in conditions)


def _are_replaced(session: Session, pods: dict[str, str]) -> bool:
    return all(session.load.pods.replaced_at(name, uid) for name, uid in pods.items())


def _resident_mib(replica: Replica) -> float:
    return psutil.Process(replica.process.pid).memory_info().rss / 2**20


def _writes(replica: Replica) -> float:
    return sum(int(float(number)) for _, number in _WRITES.findall(replica.metrics()))


def list_duration_s(replica: Replica, held: int) -> float | None:
    """Return how long listing that many pods took, once its log says so."""
    found = _LISTED.search(replica.log.read_text())
    return float(found.group(2)) if found and int(found.group(1)) >= held else None


@contextmanager
def session_of(lab_home: Path, say: Console) -> Iterator[Session]:
    """Start controllers and create an empty namespace; end them afterwards."""
    api = connect(connections=32)
    if len(api.request("GET", "/api/v1/nodes", None, {"labelSelector": "kubelab/hollow"})["items"]) < 3:
        raise Missing("hollow nodes: start them with `kubelab hollow 10`")
    prepare(api)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(api, Load(api), Replicas(Path(folder)), lab_home, say)
        session.load.open()
        try:
            for _ in range(2):
                session.replicas.start()
            session.replicas.leader()
            yield session
            session.load.clear()
        finally:
            session.replicas.stop()
            session.load.pods.stop()
            session.load.close()


def measure(session: Session, args: argparse.Namespace) -> None:
    """Measure everything, in an order in which each part leaves the state that the next one needs."""
    comparison(session, args.workers, args.repeats)
    load = session.load
    load.create_ours("large", 1, most=args.workers)
    load.grow("large", args.workers, GROWTH)
    losses(session, args.workers, args.losses)
    lost_nodes(session)
    for number, name in enumerate(names("held", -(-(args.held - args.workers) // args.workers))):
        rest = args.held - args.workers * (number + 1)
        load.create_ours(name, min(args.workers, rest), schedulerName=NOBODY)
    until(lambda: len(load.pods) == args.held, 600, f"{args.held} pods")
    come_to_rest(session)
    at_rest(session, args.held)
    fail_overs(session, args.held, args.repeats)


def table(figures: Sequence[Figure]) -> Table:
    """Return the figures as a table."""
    shown = Table(title="the controller on Kubernetes")
    shown.add_column("")
    for heading in ("median", "worst", "counts", "aim"):
        shown.add_column(heading, justify="right")
    shown.add_column("met")
    for figure in figures:
        ordered = sorted(figure.values)
        aim = "" if figure.aim is None else f"{figure.aim:.2f}"
        numbers = (f"{number:.2f}" for number in (percentile(ordered, 0.5), ordered[-1], figure.decisive))
        met = {None: "", True: "yes", False: "no"}[figure.met]
        shown.add_row(f"{figure.name} ({figure.unit})", *numbers, aim, met)
    return shown


def as_json(figures: Sequence[Figure], parameters: dict[str, Any], began_at: float) -> dict[str, Any]:
    """Return all that is known about a run."""
    return {
        **results.circumstances(parameters, began_at),
        "figures": [asdict(figure) | {"decisive": figure.decisive, "met": figure.met} for figure in figures],
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if an aim was missed or something did not happen, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=count, default=1000, metavar="N", help="workers of the large job")
    parser.add_argument("--held", type=count, default=5000, metavar="N", help="pods that exist while nothing changes")
    parser.add_argument("--losses", type=count, default=200, metavar="N", help="pods that are lost one by one")
    parser.add_argument("--repeats", type=count, default=3, metavar="N")
    parser.add_argument(
        "--lab-home", type=Path, default=Path("/tmp/kubelab"), metavar="FOLDER", help="the folder of the lab"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to this file")
    args = parser.parse_args(argv)
    end_as_by_ctrl_c()
    began_at, say, code = time.time(), Console(stderr=True, highlight=False), 0
    figures: list[Figure] = []
    try:
        with session_of(args.lab_home, say) as session:
            figures = session.figures
            measure(session, args)
    except KeyboardInterrupt:
        code = 130
    except (ElasticctlError, Missing) as e:
        say.print(f"stopped: {e}", markup=False)
        code = 1
    Console().print(table(figures))
    if args.json:
        parameters = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps(as_json(figures, parameters, began_at), indent=1) + "\n")
    return code or int(any(figure.met is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
