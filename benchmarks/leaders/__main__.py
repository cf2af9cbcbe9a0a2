"""The command line: see the package."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import benchmarks.leaders
from benchmarks import results
from benchmarks.clusterload import NAMESPACE, Load, Missing, names, until
from benchmarks.commandline import count, end_as_by_ctrl_c
from benchmarks.leaders.account import as_account, controller, install_rights, without_priority
from benchmarks.replicas import SYSTEM, Replica, Replicas, prepare
from benchmarks.results import percentile
from elasticctl.api.codec import from_rfc3339
from elasticctl.api.errors import ElasticctlError
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import Connection, connect, resource_path

LAB_HOME = Path(os.environ.get("KUBELAB_HOME", "/tmp/kubelab"))
JOBS = 20
REAL = {"kubelab/real": "true"}
AIM_S, LIMIT_S, FLOOD_S = 5.0, 60.0, 20.0
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Seconds after the end of the leader and a worker: until another one leads, and until the worker is created
    again."""

    leads_s: float
    made_s: float


@dataclass(frozen=True, slots=True)
class Ordeal:
    """`kept`: the leader is the same process, and nobody else has had the lease. `longest_s` between two renewals."""

    what: str
    kept: bool
    longest_s: float


@dataclass(slots=True)
class Session:
    """What the parts of the benchmark share, and the results so far."""

    api: Connection
    load: Load
    replicas: Replicas
    folder: Path
    kubeconfig: str
    take_overs: list[TakeOver] = field(default_factory=list)
    ordeals: list[Ordeal] = field(default_factory=list)

    def add(self) -> None:
        """Start one more controller, and wait until it could lead at once."""
        replica = self.replicas.start(self.kubeconfig)
        until(lambda: "elasticjobs: " in replica.log.read_text() and replica.metrics(), LIMIT_S, "another replica")

    def lease(self) -> dict[str, Any]:
        """Return the lease as it is; empty if nobody answers."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{installation.LEASE}"
        with suppress(ElasticctlError):
            return dict(self.api.request("GET", path, timeout_s=2)["spec"])
        return {}


def kill(session: Session, number: int) -> TakeOver:
    """Kill the leader, and delete a worker at once: of another job each time, because a job that loses many backs
    off."""
    leader, pods = session.replicas.leader(), session.load.pods
    name, uid = sorted(pods.uids().items())[number % JOBS]
    leader.process.kill()
    at, wall = time.monotonic(), time.time()
    session.load.delete_pod(name)
    session.replicas.running.remove(leader)
    until(lambda: pods.replaced_at(name, uid), LIMIT_S, f"the replacement of {name}")
    made_s = (pods.replaced_at(name, uid) or at) - at
    found = TakeOver(_led_at(session.replicas.leader()) - wall, made_s)
    session.add()
    until(lambda: pods.running() == JOBS, LIMIT_S, "all workers")
    return found


def _led_at(replica: Replica) -> float:
    """Return when it logged that it leads, in seconds since the epoch."""
    said = [json.loads(line) for line in replica.log.read_text().splitlines()]
    times = [from_rfc3339(one["time"]) for one in said if one["message"].endswith(" leads")]
    return float(times[0] or 0.0)


def endure(session: Session, what: str, seconds: float, ordeal: Sequence[threading.Thread] = ()) -> Ordeal:
    """Watch the lease for that long after the start of the event."""
    leader, before = session.replicas.leader(), session.lease()
    renewed, at, longest_s = before["renewTime"], time.monotonic(), 0.0
    end = at + seconds
    for thread in ordeal:
        thread.start()
    while time.monotonic() < end:
        now = session.lease()
        if now and now["renewTime"] != renewed:
            longest_s, renewed, at = max(longest_s, time.monotonic() - at), now["renewTime"], time.monotonic()
        time.sleep(LOOK_S)
    for thread in ordeal:
        thread.join()
    after = until(session.lease, LIMIT_S, "the lease")
    same = after["holderIdentity"] == before["holderIdentity"]
    kept = same and after.get("leaseTransitions") == before.get("leaseTransitions") and leader.process.poll() is None
    return Ordeal(what, kept, max(longest_s, time.monotonic() - at))


def freeze(seconds: float) -> threading.Thread:
    """Have the API server accept connections for that long without answering."""
    pid = int((LAB_HOME / "pid" / "kube-apiserver").read_text().split()[0])

    def frozen() -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return threading.Thread(target=frozen)


def flood(session: Session, clients: int) -> list[threading.Thread]:
    """Run that many clients that list everything repeatedly, as a service account of another project."""
    path = resource_path("rbac.authorization.k8s.io/v1", None, "clusterrolebindings")
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
    body = {"metadata": {"name": "elasticctl-benchmark-flood"}, "roleRef": role, "subjects": [subject]}
    with suppress(ElasticctlError):
        session.api.request("POST", path, body)
    crowd = connect_as(as_account("default", NAMESPACE, session.folder), clients)
    end = time.monotonic() + FLOOD_S

    def ask() -> None:
        while time.monotonic() < end:
            with suppress(ElasticctlError):
                crowd.request("GET", "/api/v1/pods", timeout_s=10)

    return [threading.Thread(target=ask) for _ in range(clients)]


def connect_as(kubeconfig: str, connections: int) -> Connection:
    """Return a connection by another kubeconfig than this process's."""
    own = os.environ["KUBECONFIG"]
    os.environ["KUBECONFIG"] = kubeconfig
    try:
        return connect(connections=connections)
    finally:
        os.environ["KUBECONFIG"] = own


@contextmanager
def session_of(folder: Path) -> Iterator[Session]:
    """Start two controllers, and jobs of one worker each."""
    api = connect(connections=16)
    prepare(api)
    install_rights(api)
    session = Session(api, Load(api), Replicas(folder), folder, controller(folder))
    session.load.open()
    try:
        session.add()
        session.replicas.leader()
        session.add()
        for name in names("job", JOBS):
            session.load.create_ours(name, 1, nodeSelector=REAL)
        until(lambda: session.load.pods.running() == JOBS, 300, f"{JOBS} jobs")
        yield session
        session.load.clear()
    finally:
        session.replicas.stop()
        session.load.pods.stop()
        session.load.close()


def measure(session: Session, args: argparse.Namespace, say: Console) -> None:
    """Measure everything."""
    for number in range(args.kills):
        session.take_overs.append(kill(session, number))
        say.print(str(session.take_overs[-1]), markup=False)
    for seconds in args.freeze_s:
        _note(
            session, say, endure(session, f"the API server frozen for {seconds:g} s", seconds + 10, [freeze(seconds)])
        )
    if args.flood:
        crowd = f"{args.flood} clients that list all pods for {FLOOD_S:.0f} s"
        _note(session, say, endure(session, crowd, FLOOD_S, flood(session, args.flood)))
        without_priority(session.api)
        _note(session, say, endure(session, f"{crowd}, without priority", FLOOD_S, flood(session, args.flood)))


def _note(session: Session, say: Console, ordeal: Ordeal) -> None:
    session.ordeals.append(ordeal)
    say.print(str(ordeal), markup=False)


def line(found: Sequence[TakeOver]) -> str:
    """Return the take-overs in one line."""
    leads, made = sorted(one.leads_s for one in found), sorted(one.made_s for one in found)
    return (
        f"{len(found)} leaders killed with a worker: another leads after {percentile(leads, 0.5):.1f} s (worst "
        f"{leads[-1]:.1f}), the worker is made again after {percentile(made, 0.5):.1f} s (worst {made[-1]:.1f}, aim "
        f"{AIM_S:.0f})"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if an aim was missed or something did not happen, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=benchmarks.leaders.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=count, default=20, metavar="N", help="leaders (20)")
    parser.add_argument("--freeze-s", type=float, nargs="*", default=[3.0, 8.0, 20.0], metavar="S", help="(3 8 20)")
    parser.add_argument("--flood", type=int, default=64, metavar="N", help="clients (64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    args = parser.parse_args(argv)
    end_as_by_ctrl_c()
    say, code, began_at, session = Console(stderr=True, highlight=False), 0, time.time(), None
    try:
        with tempfile.TemporaryDirectory() as folder, session_of(Path(folder)) as session:
            measure(session, args, say)
    except KeyboardInterrupt:
        code = 130
    except (ElasticctlError, Missing) as e:
        say.print(f"stopped: {e}", markup=False, soft_wrap=True)
        code = 1
    if session is None or not session.take_overs:
        return code or 1
    print(line(session.take_overs))
    if args.json:
        parameters = {name: str(value) for name, value in vars(args).items()}
        found = {"takeOvers": session.take_overs, "ordeals": session.ordeals}
        figures = {name: [asdict(one) for one in values] for name, values in found.items()}
        args.json.write_text(json.dumps({**results.circumstances(parameters, began_at), **figures}, indent=1) + "\n")
    late = any(one.made_s > AIM_S for one in session.take_overs)
    return code or int(late or any(not one.kept for one in session.ordeals))


if __name__ == "__main__":
    sys.exit(main())
