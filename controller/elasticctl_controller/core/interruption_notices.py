"""Notices: workers that are known in advance to have to leave, why, how long they may stay, and when they leave.

All sources of notice meet here: what a launcher gets from its cloud's metadata service, what the cluster says about a
pod (it is being deleted or evicted, and how long it may run), and what it says about a node (taints of autoscalers and
termination handlers, a kubelet that shuts down). A worker with notice keeps training until its replacement is ready, so
that the group stops only once. It leaves without a replacement when only the time that it needs to leave is left.

https://karpenter.sh/docs/concepts/disruption/
https://github.com/aws/aws-node-termination-handler (the taints of `--taint-node`)
https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms (`impending-node-termination`)
https://kubernetes.io/docs/concepts/cluster-administration/node-shutdown/
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from elasticctl.api.codec import Manifest
from elasticctl.api.objects import as_list, as_mapping, as_text
from elasticctl.api.status import WorkerStatus

LEAVE_S = 15.0
"""A worker begins to leave this long before its deadline, or earlier if a step and a save take longer than that."""
OWN_S = 5.0
"""How much of that its launcher needs for itself."""
TOGETHER_S = 15.0
"""Workers that would have to leave this soon after the first leave together with it, so that the group stops once."""
PATIENCE_S = 30.0
"""How long replacements that are ready wait for the others."""

_TAINTS = {
    "karpenter.sh/disrupted": "Karpenter is removing its node",
    "karpenter.sh/disruption": "Karpenter is removing its node",
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler is removing its node",
    "aws-node-termination-handler/spot-itn": "AWS is reclaiming its node",
    "aws-node-termination-handler/scheduled-maintenance": "AWS has scheduled maintenance of its node",
    "aws-node-termination-handler/asg-lifecycle-termination": "AWS is terminating its node",
    "aws-node-termination-handler/rebalance-recommendation": "AWS recommends leaving its node",
    "cloud.google.com/impending-node-termination": "Google Cloud is reclaiming its node",
}
_CLOSES = ("NoSchedule", "NoExecute")
_SHUTS_DOWN = "node is shutting down"
"""What a kubelet says in its Ready condition; its pods then have less time than their grace period."""


@dataclass(frozen=True, slots=True)
class LeaveNotice:
    """Why a worker has to leave, and its `deadline` in seconds since the epoch (None: unknown).

    `closed`: no more pods are scheduled to its node.
    """

    reason: str
    deadline: float | None = None
    closed: bool = False

    def leave_at(self, lead_s: float) -> float:
        """When it has to begin to leave at the latest, if leaving takes `lead_s` seconds; infinite if that is
        unknown."""
        return math.inf if self.deadline is None else self.deadline - lead_s


def read_node(node: Manifest) -> LeaveNotice | None:
    """The notice that a Node object, of any content, gives the workers on it; None: they may stay."""
    ready = next((item for item in _conditions(node) if item.get("type") == "Ready"), {})
    if ready.get("status") == "False" and _SHUTS_DOWN in as_text(ready.get("message")):
        return LeaveNotice("its node is shutting down", 0.0)
    spec = as_mapping(node.get("spec"))
    taints = [as_mapping(taint) for taint in as_list(spec.get("taints"))]
    cordoned = spec.get("unschedulable") is True
    for taint in taints:
        if reason := _TAINTS.get(as_text(taint.get("key"))):
            return LeaveNotice(reason, closed=cordoned or taint.get("effect") in _CLOSES)
    return None


def _conditions(node: Manifest) -> Iterable[Mapping[str, object]]:
    return map(as_mapping, as_list(as_mapping(node.get("status")).get("conditions")))


@dataclass(frozen=True, slots=True)
class Leaving:
    """The uids of the workers that are `stopping`, and the cluster's notices for others, by uid."""

    stopping: frozenset[str] = frozenset()
    notices: Mapping[str, LeaveNotice] = field(default_factory=dict)


@dataclass(slots=True)
class Notices:
    """The notices for the workers of one group, by uid.

    Their launchers have `reported` some, and the controller has `given` others. `departing` are the workers that have
    been asked to leave. `replaced` is how many of the workers with notice have been replaced already.
    """

    reported: dict[str, LeaveNotice] = field(default_factory=dict)
    given: Mapping[str, LeaveNotice] = field(default_factory=dict)
    departing: set[str] = field(default_factory=set)
    replaced: int = 0

    @classmethod
    def restored(cls, workers: Iterable[WorkerStatus]) -> Notices:
        """The notices that a restarted service knows from the status, until launchers and cluster repeat theirs."""
        return cls(
            {worker.uid: LeaveNotice(worker.notice) for worker in workers if worker.notice and worker.cause is None}
        )

    def of(self, uid: str) -> LeaveNotice | None:
        """The notice that counts, the one with the earliest deadline; None for a worker that may stay."""
        found = [notice for notice in (self.reported.get(uid), self.given.get(uid)) if notice is not None]
        return min(found, key=lambda notice: notice.leave_at(0.0), default=None)

    def report(self, uid: str, notice: LeaveNotice) -> None:
        """A launcher reports a notice."""
        self.reported[uid] = notice

    def give(self, notices: Mapping[str, LeaveNotice]) -> None:
        """Set the notices that the controller gives."""
        self.given = notices

    def drop_absent(self, alive: Collection[str]) -> None:
        """Drop the workers that are not alive."""
        self.departing.intersection_update(alive)
        for uid in self.reported.keys() - alive:
            del self.reported[uid]

    def held(self, members: Iterable[str]) -> dict[str, LeaveNotice]:
        """The members that have to leave and have not been asked to yet."""
        found = ((uid, self.of(uid)) for uid in members if uid not in self.departing)
        return {uid: notice for uid, notice in found if notice is not None}

    def count_newcomers(self, newcomers: int, members: Collection[str]) -> None:
        """A generation has formed: its newcomers replace members that have to leave."""
        self.replaced = min(self.replaced + newcomers, len(self.held(members)))

    def depart(self, uids: Collection[str]) -> None:
        """These workers are being asked to leave."""
        self.departing.update(uids)
        self.replaced = max(0, self.replaced - len(uids))


@dataclass(frozen=True, slots=True)
class Replacements:
    """The workers that could replace others: how many are `ready`, since when, and whether `more` are starting."""

    ready: int = 0
    more: bool = False
    since: float | None = None


def lead_s(longest_step_s: float, save_s: float) -> float:
    """How many seconds before its deadline a worker begins to leave, given how long steps and saves take."""
    return max(LEAVE_S, longest_step_s + save_s + OWN_S)


def who_leaves(
    held: Mapping[str, LeaveNotice], others: Replacements, lead_s: float, now: float
) -> tuple[tuple[str, ...], float]:
    """The uids of the workers in `held` that leave now, and when to ask again (infinite: when something changes)."""
    order = sorted(held, key=lambda uid: (held[uid].leave_at(lead_s), uid))
    first = held[order[0]].leave_at(lead_s) if order else math.inf
    places = min(others.ready, len(order))
    if first <= now:
        due = sum(held[uid].leave_at(lead_s) <= now + TOGETHER_S for uid in order)
        return tuple(order[: max(due, places)]), math.inf
    if not places:
        return (), first
    patient_until = (now if others.since is None else others.since) + PATIENCE_S
    if places == len(order) or not others.more or patient_until <= now:
        return tuple(order[:places]), math.inf
    return (), min(first, patient_until)
