"""Kueue, worker by worker: above what it was admitted with, a job asks for each worker with a Workload of its own.

The job's own Workload asks for its minimum. Once it is admitted, each further worker is one more Workload, of lower
priority: Kueue admits it when quota comes free, and evicts it when another job's minimum needs its quota. The job grows
and shrinks accordingly, and quota is released once the worker that held it is gone. The more slots its job has with a
worker, the lower is the priority of that worker's Workload: so jobs of one priority grow evenly.

`judge_growth` is level-triggered, as `judge_admission` is. All that must survive a restart is on the Workloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.objects import as_list, at
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl_controller.core.sharing.claims import slots_per_worker, wanted_workers
from elasticctl_controller.core.sharing.kueue import (
    ADMITTED,
    ASKED,
    EVICTED,
    FINISHED,
    PODS_READY,
    QUOTA,
    Growth,
    admitted_workers,
    build_pod_set,
    digest,
    is_true,
    workload_metadata,
    workload_name,
)
from elasticctl_controller.core.workers import is_active

BELOW_ALL_MINIMA = 1_000_000_000
"""How much lower the priority of a worker above the minimum is. Kubernetes limits users' priority classes to this
value, so such a worker gives way to every job's minimum."""
_LEAST_PRIORITY = -(2**31)


def judge_growth(job: ElasticJob, base: Manifest, extras: Iterable[Manifest], pods: int) -> Growth:
    """What a job that runs with its admitted Workload `base` asks for, and what it has, above that.

    `job` is placed on the flavors of `base`; `extras` are its Workloads for single workers, `pods` is how many of its
    pods have not ended. A Workload that holds quota is given up only when that leaves quota for every pod.
    """
    admitted, uid = admitted_workers(base), at(base, "metadata", "uid")
    wanted = wanted_workers(job)
    listed = sorted(((number_of(job, one), one) for one in extras), key=lambda item: item[0])
    asked = _asked(job, uid)
    useless = [
        one
        for number, one in listed
        if not admitted < number <= wanted or at(one, "metadata", "annotations", ASKED) != asked or _is_over(one)
    ]
    used = [one for _, one in listed if one not in useless and _is_admitted(one)]
    evicted = [one for _, one in listed if one not in useless and is_true(one, EVICTED) and is_true(one, QUOTA)]
    holding = sum(is_true(one, QUOTA) for _, one in listed)
    spare = max(0, admitted + holding - pods)
    release = evicted[:spare]
    delete = _deletable(useless, spare - len(release))
    workers = admitted + len(used)
    # No more at a time than it has: a job that may have thousands must not fill the queue with requests that no quota
    # covers.
    numbers = set(range(admitted + 1, min(wanted, max(1, 2 * workers)) + 1)) - {number for number, _ in listed}
    running = sum(is_active(worker) and worker.phase == PodPhase.RUNNING for worker in job.status.workers)
    ready = [one for one in used[: max(0, running - admitted)] if not is_true(one, PODS_READY)]
    return Growth(workers, tuple(sorted(numbers)), tuple(ready), tuple(release), tuple(delete))


def judge_end(job: ElasticJob, extras: Iterable[Manifest], pods: int) -> Growth:
    """Give up the Workloads for single workers of a job that does not run, or has ended."""
    none_left = not pods or job.status.phase.terminal
    delete = (one for one in extras if not _is_going(one) and (none_left or not is_true(one, QUOTA)))
    return Growth(delete=tuple(delete))


def build_extra(job: ElasticJob, base: Manifest, number: int, api_version: str) -> Manifest:
    """The Workload for worker `number` of a job that runs with `base`, in the same queue, for the same pod.

    `job` is placed on the flavors of `base`, so that no other flavor fits: the workers of a group are alike.
    """
    priority = at(base, "spec", "priority")
    lower = (priority if isinstance(priority, int) else 0) - BELOW_ALL_MINIMA - number * slots_per_worker(job)
    return {
        "apiVersion": api_version,
        "kind": "Workload",
        "metadata": workload_metadata(job, f"{workload_name(job)}-{number}", _asked(job, at(base, "metadata", "uid"))),
        "spec": {
            "queueName": at(base, "spec", "queueName"),
            "podSets": [build_pod_set(job, 1)],
            "priority": max(_LEAST_PRIORITY, lower),
        },
    }


def list_extras(job: ElasticJob, workloads: Iterable[Manifest]) -> list[Manifest]:
    """The Workloads for single workers of this very job, out of all that bear its name."""
    return [one for one in workloads if _is_owned(job, one) and number_of(job, one)]


def number_of(job: ElasticJob, workload: Manifest) -> int:
    """The number of the worker that a Workload asks for; 0 if it is not for a single one."""
    number = str(at(workload, "metadata", "name")).removeprefix(f"{workload_name(job)}-")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0


def _asked(job: ElasticJob, base_uid: Any) -> str:
    """Identifies the admission of the job that a Workload was created for, and the pods that it asks for."""
    return f"{base_uid}.{digest(build_pod_set(job, 1))}"


def _is_admitted(workload: Manifest) -> bool:
    return is_true(workload, ADMITTED) and is_true(workload, QUOTA) and not is_true(workload, EVICTED)


def _is_over(workload: Manifest) -> bool:
    return is_true(workload, FINISHED) or _is_going(workload)


def _is_going(workload: Manifest) -> bool:
    return at(workload, "metadata", "deletionTimestamp") is not None


def _is_owned(job: ElasticJob, workload: Manifest) -> bool:
    return any(at(owner, "uid") == job.uid for owner in as_list(at(workload, "metadata", "ownerReferences")))


def _deletable(useless: Sequence[Manifest], spare: int) -> list[Manifest]:
    """Those without quota, and of the others as many as there is quota to `spare`, the last ones first."""
    there = [one for one in useless if not _is_going(one)]
    holding = [one for one in there if is_true(one, QUOTA)]
    return [one for one in there if not is_true(one, QUOTA)] + holding[::-1][: max(0, spare)]
