"""Kueue's Workload as it is read, and what is decided about one: data and names. Pure.

A Workload is Kueue's word for what waits in a queue: so many pods of one kind. Ours is owned by its job. It is read the
same in both versions of Kueue's API that clusters serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from elasticctl.codec import Manifest
from elasticctl.podtemplate import at
from elasticctl.spec import GROUP, ElasticJob

POD_SET = "workers"
ASKED = f"{GROUP}/asked"
"""Annotation of a Workload: digests of the pod and of all that was asked for; no server's defaults touch them."""
LEFT = f"{GROUP}/left"
"""Annotation of a Workload that is not active because the job's owner has suspended it."""

QUOTA, ADMITTED, EVICTED, FINISHED = "QuotaReserved", "Admitted", "Evicted", "Finished"
REQUEUED, PODS_READY = "Requeued", "PodsReady"
TRUE = "True"
"""Kueue's conditions, and the status of one that holds."""
_SAID_CHARS = 300


class Step(Enum):
    """What is to be told next: to Kueue, or to the job."""

    CREATE = auto()
    UPDATE = auto()
    DELETE = auto()
    ACTIVATE = auto()
    DEACTIVATE = auto()
    RELEASE = auto()
    READY = auto()
    FINISH = auto()
    START = auto()
    STOP = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What Kueue's answer means: `workers` that may run at most (None: none), or the words why the job is held.

    Without either it is suspended because its owner wants that.
    """

    workers: int | None = None
    held: str = ""
    step: Step | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A job as Kueue lets it be now, and what is to be done about it once that was carried out.

    `again_s`: look again after that many seconds, as nothing will tell of a change.
    """

    job: ElasticJob
    step: Step | None = None
    workload: Manifest | None = None
    again_s: float | None = None


def condition(workload: Manifest, type_: str) -> Mapping[str, Any]:
    """The condition of this type; empty when there is none."""
    found = at(workload, "status", "conditions")
    items = found if isinstance(found, list) else []
    return next((item for item in items if isinstance(item, Mapping) and item.get("type") == type_), {})


def is_true(workload: Manifest, type_: str) -> bool:
    """True when that condition holds."""
    return condition(workload, type_).get("status") == TRUE


def said(workload: Manifest, type_: str) -> str:
    """What a condition says, on one line; "" when it says nothing."""
    return " ".join(str(condition(workload, type_).get("message") or "").split())[:_SAID_CHARS]


def is_active(workload: Manifest) -> bool:
    """False for a Workload that Kueue leaves aside."""
    return at(workload, "spec", "active") is not False


def assignment(workload: Manifest) -> Mapping[str, Any]:
    """What was admitted of our pods: `count`, and `flavors` by resource."""
    found = at(workload, "status", "admission", "podSetAssignments")
    items = found if isinstance(found, list) else []
    return next((item for item in items if isinstance(item, Mapping) and item.get("name") == POD_SET), {})


def admitted_workers(workload: Manifest) -> int:
    """How many pods were admitted: where it is not said, as many as were asked for."""
    sets = at(workload, "spec", "podSets")
    asked = at(sets[0], "count") if isinstance(sets, list) and sets else 0
    count = assignment(workload).get("count", asked)
    return count if isinstance(count, int) and count >= 0 else 0


def flavor_names(workload: Manifest) -> tuple[str, ...]:
    """The ResourceFlavors that were given to our pods, each once."""
    flavors = assignment(workload).get("flavors")
    return tuple(sorted({str(name) for name in flavors.values()})) if isinstance(flavors, Mapping) else ()
