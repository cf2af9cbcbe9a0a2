"""How long training stops when a pod is deleted by force: from the deletion to the survivors' next step.

    export KUBECONFIG=…        # kubelab with two nodes
    python benchmarks/pod_recovery.py [--repeats 20] [--settle-s 15] [--json FILE]

Three workers train on real nodes, under two controllers that run beside the cluster. Each in turn is deleted without
grace once the whole group has trained for a while. Steps and phases are those that the script of benchmarks/recovery.py
records, reported in the same way.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import results
from benchmarks.clusterload import Missing, until
from benchmarks.commandline import count, end_as_by_ctrl_c
from benchmarks.recoveries import phases
from benchmarks.recoveries.timeline import Expected, Outcome, Step, outcome
from benchmarks.recoveries.trials import StepsFile, is_steady
from benchmarks.replicas import Replicas, prepare
from benchmarks.results import Spread
from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.spec import API_VERSION, KIND, PLURAL, WORKER_CONTAINER, worker_name
from elasticctl.kubeapi.connection import Connection, connect, resource_path

NAME, NAMESPACE, IMAGE = "pod-recovery", "default", "lab/trainer:dev"
SCRIPT = Path(__file__).parent / "recoveries" / "train.py"
STATE = "/state"
WORKERS, STEP_S, SAVE_EVERY_STEPS = 3, 0.05, 20
AIM_S = 5.0
STEADY_LIMIT_S, WHOLE_LIMIT_S = 300.0, 180.0
RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class Loss:
    """One deletion: the worker, what it cost, and when the survivors had completed each of the `phases`."""

    worker: int
    cost: Outcome
    reached: Mapping[str, float]


class Job:
    """The job under test."""

    def __init__(self, api: Connection, folder: Path) -> None:
        self._api, self._folder = api, folder
        self._path = resource_path(API_VERSION, NAMESPACE, PLURAL, NAME)
        self._steps = StepsFile(folder / "steps")

    def start(self) -> None:
        """Create it, replacing an older one."""
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._folder.chmod(0o777)  # workers run as arbitrary users
        self._api.request("POST", resource_path(API_VERSION, NAMESPACE, PLURAL), self._manifest())

    def end(self) -> None:
        """Delete it, and wait until its pods are gone."""
        with suppress(NotFoundError):
            self._api.request("DELETE", self._path, {"propagationPolicy": "Foreground"})
        until(lambda: not self._exists(), 120, "the end of the job")

    def lose(self, worker: int, settle_s: float) -> Loss:
        """Delete a worker after all have trained for `settle_s`; return what that cost, once all train again."""
        until(lambda: is_steady(self._recent(), WORKERS, time.time(), settle_s), STEADY_LIMIT_S, "a steady group")
        at, expected = time.time(), Expected(WORKERS)
        pod = resource_path("v1", NAMESPACE, "pods", worker_name(NAME, worker))
        self._api.request("DELETE", pod, {"gracePeriodSeconds": 0})
        whole = f"{WORKERS} workers after the loss of worker {worker}"
        until(lambda: outcome(self._recent(), at, expected).whole_s is not None, WHOLE_LIMIT_S, whole)
        generations = self._api.request("GET", self._path)["status"]["generations"]
        marks = (self._folder / "marks").read_text()
        reached = phases.reached(marks, self._recent(), at, expected, generations)
        return Loss(worker, outcome(self._recent(), at, expected), reached)

    def _recent(self) -> list[Step]:
        since = time.time() - RECENT_S - WHOLE_LIMIT_S
        return [step for step in self._steps.read() if step.at > since]

    def _exists(self) -> bool:
        try:
            self._api.request("GET", self._path)
        except NotFoundError:
            return False
        return True

    def _manifest(self) -> Manifest:
        script = [sys.executable, str(SCRIPT), "--storage", f"file://{STATE}/checkpoints", "--steps", f"{STATE}/steps"]
        script += ["--marks", f"{STATE}/marks", "--step-s", str(STEP_S), "--save-every-steps", str(SAVE_EVERY_STEPS)]
        worker = {
            "name": WORKER_CONTAINER,
            "image": IMAGE,
            "command": [str(Path(sys.executable).with_name("elasticctl-launch")), "--", *script],
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "volumeMounts": [{"name": "state", "mountPath": STATE}],
        }
        volume = {"name": "state", "hostPath": {"path": str(self._folder), "type": "Directory"}}
        pod = {"containers": [worker], "volumes": [volume], "nodeSelector": {"kubelab/real": "true"}}
        replicas = {"replicas": WORKERS, "restartPolicy": "OnFailure", "template": {"spec": pod}}
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": NAME, "namespace": NAMESPACE},
            "spec": {"minReplicas": 1, "maxReplicas": WORKERS, "replicaSpecs": {"Worker": replicas}},
        }


def line(losses: Sequence[Loss]) -> str:
    """Return the figures in one line."""
    first = Spread.of(loss.cost.first_step_s for loss in losses if loss.cost.first_step_s is not None)
    whole = Spread.of(loss.cost.whole_s for loss in losses if loss.cost.whole_s is not None)
    worst = max(loss.cost.first_step_s or 0.0 for loss in losses)
    redone = max(loss.cost.steps_redone for loss in losses)
    return (
        f"{len(losses)} pods deleted: next step after {first.p50:.2f} s (p95 {first.p95:.2f}, worst {worst:.2f}, "
        f"aim {AIM_S:.0f}), all train after {whole.p50:.1f} s (p95 {whole.p95:.1f}), at most {redone} steps done again"
    )


def met(losses: Sequence[Loss]) -> bool:
    """Return whether the 95th percentile reaches the aim."""
    p95 = Spread.of(loss.cost.first_step_s for loss in losses if loss.cost.first_step_s is not None).p95
    return p95 is not None and p95 <= AIM_S


def as_json(losses: Sequence[Loss], parameters: dict[str, Any], began_at: float) -> dict[str, Any]:
    """Return all that is known about a run."""
    return {**results.circumstances(parameters, began_at), "losses": [asdict(loss) for loss in losses]}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if the aim was missed or something did not happen, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=count, default=20, metavar="N")
    parser.add_argument(
        "--settle-s", type=float, default=15.0, metavar="S", help="seconds of training before each loss"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kubelab-host"), help="a folder that all nodes share")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to this file")
    args = parser.parse_args(argv)
    end_as_by_ctrl_c()
    began_at, say, code = time.time(), Console(stderr=True, highlight=False), 0
    losses: list[Loss] = []
    try:
        _measure(args, losses, say)
    except KeyboardInterrupt:
        code = 130
    except (ElasticctlError, Missing) as e:
        say.print(f"stopped: {e}", markup=False)
        code = 1
    if not losses:
        return code or 1
    print(line(losses))
    Console().print(phases.table("elasticctl on Kubernetes", {"a pod is deleted": [loss.reached for loss in losses]}))
    if args.json:
        parameters = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps(as_json(losses, parameters, began_at), indent=1) + "\n")
    return code or int(not met(losses))


def _measure(args: argparse.Namespace, losses: list[Loss], say: Console) -> None:
    api = connect()
    prepare(api)
    with tempfile.TemporaryDirectory() as folder:
        replicas, job = Replicas(Path(folder)), Job(api, args.folder / NAME)
        try:
            for _ in range(2):
                replicas.start()
            replicas.leader()
            job.start()
            for number in range(args.repeats):
                losses.append(job.lose(number % WORKERS, args.settle_s))
                say.print(f"{number + 1}: {losses[-1].cost}", markup=False, soft_wrap=True)
            job.end()
        finally:
            replicas.stop()


if __name__ == "__main__":
    sys.exit(main())
