"""The content of a job's pod template: GPUs, storage, command, image, nodes. Never raises, whatever it contains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticctl.api.goal import ON_DEMAND, SPOT
from elasticctl.api.gpu_types import AWS_CAPACITY_LABELS, GKE_SPOT_LABEL
from elasticctl.api.objects import as_list, as_mapping, at, selects
from elasticctl.api.spec import KIND, LABEL_MANAGED, MANAGER, WORKER_CONTAINER, ElasticJob, Manifest, worker_labels
from elasticctl_protocol import variables

LAUNCHER = "elasticctl-launch"


GPU_RESOURCE = "nvidia.com/gpu"
_RANKS = "--nproc-per-node"
_LAUNCHER_ROLE = "--launcher"
_MOST = 1_000_000  # GPUs or ranks of a worker: larger numbers mean nothing, and must not break arithmetic


@dataclass(frozen=True, slots=True)
class Hardware:
    """What each worker of a job has and runs; zero or blank where its pod template does not say.

    `ranks_per_worker` is the number of ranks that a worker's launcher starts (1 by default), `command` the whole argv,
    and `env` the variables with a plain value.
    """

    gpus_per_worker: int = 0
    storage: str = ""
    ranks_per_worker: int = 1
    image: str = ""
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def launched(self) -> bool:
        """True if our launcher runs the ranks, so that groups and perhaps progress are known."""
        return bool(self.command) and self.command[0].rpartition("/")[2] == LAUNCHER

    @property
    def in_launcher_role(self) -> bool:
        """True if a program on one worker, itself run by our launcher, starts the ranks."""
        return self.launched and _LAUNCHER_ROLE in self.command[: _end_of_ours(self.command)]


def hardware(job: ElasticJob) -> Hardware:
    """Read the worker container of a job's pod template; never raises."""
    container = worker_container(job.template)
    env = at(container, "env")
    values = {
        str(at(item, "name")): str(at(item, "value"))
        for item in (env if isinstance(env, list) else [])
        if isinstance(at(item, "name"), str) and isinstance(at(item, "value"), str)
    }
    command = [str(word) for key in ("command", "args") for word in as_list(at(container, key))]
    image = at(container, "image")
    return Hardware(
        gpus_per_worker=_number(at(container, "resources", "limits", GPU_RESOURCE)) or 0,
        storage=values.get(variables.STORAGE, ""),
        ranks_per_worker=max(1, _number(_after(_RANKS, command[: _end_of_ours(command)])) or 1),
        image=image if isinstance(image, str) else "",
        command=tuple(command),
        env=values,
    )


def worker_container(template: Mapping[str, Any]) -> Any:
    """The container that trains: the one named `elasticjob-worker`, or else the first; {} if there is none."""
    containers = as_list(at(template, "spec", "containers"))
    named = (item for item in containers if at(item, "name") == WORKER_CONTAINER)
    return next(named, containers[0] if containers else {})


def node_labels(template: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Label -> the values that a suitable node may have; no values: the label must be absent."""
    found: dict[str, tuple[str, ...]] = {}
    affinity = at(template, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    for term in as_list(at(affinity, "nodeSelectorTerms")):
        for one in as_list(at(term, "matchExpressions")):
            key = str(at(one, "key"))
            if at(one, "operator") == "In":
                found[key] = (*found.get(key, ()), *map(str, as_list(at(one, "values"))))
            elif at(one, "operator") == "DoesNotExist":
                found.setdefault(key, ())
    selector = at(template, "spec", "nodeSelector")
    for key, value in selector.items() if isinstance(selector, Mapping) else ():
        found[str(key)] = (str(value),)
    return {key: tuple(dict.fromkeys(values)) for key, values in found.items()}


def capacity(template: Mapping[str, Any]) -> str:
    """The capacity that workers request: `spot`, `onDemand`, or "" for either."""
    labels = node_labels(template)
    wanted = {
        SPOT if value == spot else ON_DEMAND
        for label, spot, on_demand in AWS_CAPACITY_LABELS
        for value in labels.get(label, ())
        if value in (spot, *on_demand)
    }
    if GKE_SPOT_LABEL in labels:
        wanted.add(SPOT if "true" in labels[GKE_SPOT_LABEL] else ON_DEMAND)
    return wanted.pop() if len(wanted) == 1 else ""


def _after(flag: str, words: list[str]) -> str | None:
    following = words[words.index(flag) + 1 :] if flag in words else []
    return following[0] if following else None


def _end_of_ours(words: Sequence[str]) -> int:
    """Where the launcher's own arguments end and the script's begin."""
    return words.index("--") if "--" in words else len(words)


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, 0), _MOST)
    if not (isinstance(value, str) and value.isascii() and value.isdigit()):
        return None
    return min(int(value), _MOST) if len(value) < 20 else _MOST  # Python refuses to read thousands of digits


def covering_budgets(job: ElasticJob, budgets: Iterable[Manifest]) -> list[Manifest]:
    """Other PodDisruptionBudgets that select the job's workers: Kubernetes evicts no pod that two budgets select."""
    labels = {**as_mapping(at(job.template, "metadata", "labels")), **worker_labels(job.name, 0)}
    return [
        budget for budget in budgets if selects(at(budget, "spec", "selector"), labels) and not _is_of_a_job(budget)
    ]


def _is_of_a_job(budget: Manifest) -> bool:
    """True if it belongs to a job, or belonged to one that was deleted without the objects it owned."""
    owners = as_list(at(budget, "metadata", "ownerReferences"))
    if not owners:
        return bool(at(budget, "metadata", "labels", LABEL_MANAGED) == MANAGER)
    return any(at(owner, "kind") == KIND for owner in owners)


def set_variable(container: Any, name: str, value: str) -> None:
    """Set a variable of a container in place, at its old position or at the end; remove it for ""."""
    if not isinstance(container, dict):
        return
    env = container.get("env") if isinstance(container.get("env"), list) else []
    kept = [item for item in env or [] if at(item, "name") != name]
    if value:
        kept.append({"name": name, "value": value})
    if kept or "env" in container:
        container["env"] = kept
