"""What happens to a training job on Kubernetes: an ElasticJob next to Kubeflow's PyTorchJob, with the same script.

    export KUBECONFIG=…        # kubelab with three nodes, and its training-operator
    export ELASTICCTL_TEST_LAB=…/kubelab
    python -m benchmarks.pytorchjob [--contender NAME ...] [--event NAME ...] [--repeats 5]

The manifests differ only in who manages the workers, and in how well that is tuned. The steps are recorded by the
script of `benchmarks.recovery`, and reported in the same way. docs/performance.md has results.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import NotInTime
from benchmarks.figures import in_turns, progress, show, spread
from benchmarks.programs import count, end_as_by_ctrl_c, parser
from benchmarks.pytorchjob_events import EVENTS, NAME, NAMESPACE, WORKERS, JobContender, running
from benchmarks.recovery.contenders import SCRIPT, open_store
from benchmarks.recovery.timeline import Outcome
from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import API_VERSION, KIND, PLURAL, WORKER_CONTAINER
from elasticctl.kubeapi.connection import Connection, connect, resource_path
from tests.on_cluster.commands import LAB, kubectl
from tests.on_cluster.replicas import ADDRESS, Replicas, prepare
from tests.on_cluster.trainer import HOST_FOLDER, IMAGE

KEPT = "node-3"
"""A node that no event affects: it has the operator's pod, and no workers."""
STATE = "/state"
FOLDER = HOST_FOLDER / NAME
STEP_S, SAVE_EVERY_STEPS, GRACE_S = 0.05, 20, 10
OPERATOR = "deployment/training-operator"
TOLERATED = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
TUNED_ENVIRONMENT = {
    "PET_MONITOR_INTERVAL": "0.1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # otherwise groups keep the address of a former rank 0, and hang
}
TUNED_CONF = {"is_host": "0", "last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "3"}


def _pod(
    container: str, command: list[str], folder: Path, environment: Mapping[str, str] | None = None, **more: Any
) -> Manifest:
    script = [str(SCRIPT), "--storage", f"file://{STATE}/checkpoints", "--steps", f"{STATE}/steps"]
    script += ["--step-s", str(STEP_S), "--save-every-steps", str(SAVE_EVERY_STEPS)]
    worker = {
        "name": container,
        "image": IMAGE,
        "command": [*command, *script],
        "env": [{"name": name, "value": value} for name, value in {**ENVIRONMENT, **(environment or {})}.items()],
        "volumeMounts": [{"name": "state", "mountPath": STATE}],
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"benchmark": NAME}},
    }
    others = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [KEPT]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [others]}]}
    spec = {
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [worker],
        "volumes": [{"name": "state", "hostPath": {"path": str(folder), "type": "Directory"}}],
        "topologySpreadConstraints": [spread],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
        **more,
    }
    return {"metadata": {"labels": {"benchmark": NAME}}, "spec": spec}


@contextmanager
def elasticjob(api: Connection, folder: Path) -> Iterator[JobContender]:
    """Return our job without any tuning, under two controllers."""
    prepare(api)
    launch = str(Path(sys.executable).with_name("elasticctl-launch"))
    template = _pod(WORKER_CONTAINER, [launch, "--", sys.executable], folder)
    replicas = {"replicas": WORKERS, "restartPolicy": "OnFailure", "template": template}
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"minReplicas": 1, "maxReplicas": WORKERS, "replicaSpecs": {"Worker": replicas}},
    }
    with tempfile.TemporaryDirectory() as logs:
        controllers = Replicas(Path(logs))
        try:
            for _ in range(2):
                controllers.start()
            controllers.leader()
            path = resource_path(API_VERSION, NAMESPACE, PLURAL)
            yield JobContender("ElasticJob", path, ("replicaSpecs", "Worker"), f"job-name={NAME}", body)
        finally:
            controllers.stop()


def _pytorchjob(name: str, folder: Path, policy: Mapping[str, Any], **pod: Any) -> JobContender:
    template = _pod("pytorch", [sys.executable, "-m", "torch.distributed.run"], folder, **pod)
    worker = {"replicas": WORKERS, "restartPolicy": "OnFailure", "template": template}
    version = "kubeflow.org/v1"
    body = {
        "apiVersion": version,
        "kind": "PyTorchJob",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "nprocPerNode": "1",  # the default is the number of processors of a node
            "elasticPolicy": {"minReplicas": 1, "maxReplicas": WORKERS, "rdzvBackend": "c10d", **policy},
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }
    label = f"training.kubeflow.org/job-name={NAME}"
    path = resource_path(version, NAMESPACE, "pytorchjobs")
    return JobContender(name, path, ("pytorchReplicaSpecs", "Worker"), label, body)


@contextmanager
def pytorchjob(api: Connection, folder: Path) -> Iterator[JobContender]:
    """Return Kubeflow's job with its defaults: the first worker hosts the store, and a failing rank ends its agent."""
    yield _pytorchjob("PyTorchJob", folder, {})


@contextmanager
def pytorchjob_tuned(api: Connection, folder: Path) -> Iterator[JobContender]:
    """Return the best that was found: a store outside the workers, short timeouts, many restarts, quick eviction from
    nodes."""
    store = open_store()
    policy = {
        "rdzvHost": ADDRESS,
        "rdzvPort": store.port,
        "maxRestarts": 100,
        "rdzvConf": [{"key": key, "value": value} for key, value in TUNED_CONF.items()],
    }
    tolerations = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1} for key in TOLERATED
    ]
    yield _pytorchjob("PyTorchJob, tuned", folder, policy, environment=TUNED_ENVIRONMENT, tolerations=tolerations)


CONTENDERS = {"elasticjob": elasticjob, "pytorchjob": pytorchjob, "pytorchjob-tuned": pytorchjob_tuned}


def install_operator() -> None:
    """Ensure that the training-operator runs, on a node that no event affects."""
    if "training-operator" not in kubectl("-n", "kubeflow", "get", "deployments", "-o", "name"):
        subprocess.run([LAB, "install", "training-operator"], check=True, timeout=300)
    where = json.dumps({"spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": KEPT}}}}})
    kubectl("-n", "kubeflow", "patch", OPERATOR, "-p", where)
    kubectl("-n", "kubeflow", "rollout", "status", OPERATOR)


def row(event: str, by_contender: Mapping[str, list[Outcome | None]]) -> list[str]:
    """Return the cells of an event: standstill, steps repeated, and in how many trials the job trained again."""
    cells = [event]
    for found in by_contender.values():
        costs = [cost for cost in found if cost is not None and cost.standstill_s is not None]
        redone = f"{median(cost.steps_redone for cost in costs):.0f}" if costs else "-"
        still = spread(cost.standstill_s for cost in costs if cost.standstill_s is not None)
        cells.append(f"{still}; {redone}; {len(costs)} of {len(found)}")
    return cells


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if something did not happen in time, 130 after Ctrl-C."""
    options = parser(__doc__)
    options.add_argument("--contender", action="append", choices=CONTENDERS, help="repeatable; all by default")
    options.add_argument("--event", action="append", choices=EVENTS, help="repeatable; all by default")
    options.add_argument("--repeats", type=count, default=5, metavar="N", help="trials of each event (5)")
    options.add_argument("--settle-s", type=float, default=8.0, metavar="S", help="training before each event (8)")
    args = options.parse_args(argv)
    if not LAB:
        options.error("set $ELASTICCTL_TEST_LAB to the lab's command")
    end_as_by_ctrl_c()
    code, contenders = 0, args.contender or list(CONTENDERS)
    found: dict[str, dict[str, list[Outcome | None]]] = {
        event: {name: [] for name in contenders} for event in args.event or EVENTS
    }
    try:
        api = connect()
        FOLDER.mkdir(parents=True, exist_ok=True)
        FOLDER.chmod(0o777)  # workers run as arbitrary users
        install_operator()
        for _, name in in_turns(contenders, args.repeats):
            with CONTENDERS[name](api, FOLDER) as contender, running(api, contender, FOLDER) as job:
                for event, by_contender in found.items():
                    by_contender[name].append(job.cause(event, args.settle_s))
                    progress(f"{name}, {event}: {by_contender[name][-1]}")
                    if by_contender[name][-1] is None:
                        job.recreate()
    except KeyboardInterrupt:
        code = 130
    except (ElasticctlError, NotInTime, AssertionError) as e:
        progress(f"stopped: {e}")
        code = 1
    title = "standstill, s: median (p95); steps repeated; trials in which the job trained again"
    show(title, ["", *contenders], [row(event, by_contender) for event, by_contender in found.items()])
    return code


if __name__ == "__main__":
    sys.exit(main())
