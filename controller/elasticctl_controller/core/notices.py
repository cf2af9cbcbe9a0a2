"""Workers that have to go, where that is known beforehand: who says so, until when they may stay, and when they leave.

All that is known of it ends here: what a launcher hears from its cloud's metadata service, what the cluster says of a
pod (it is being deleted or evicted, and until when it may run) and of its node (taints of autoscalers and termination
handlers, a kubelet that shuts down). Whoever has to go trains on until those who take the places are ready, so that the
group stops once; it leaves without them when the time that it needs for that is about to begin.

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
"""A worker begins to leave so long before its deadline, or earlier, if a step and a save take longer than that."""
OWN_S = 5.0
"""What its launcher needs of that for itself."""
TOGETHER_S = 15.0
"""Those that would have to leave so soon after the first leave with it: the group stops once."""
PATIENCE_S = 30.0
"""How long those who are ready wait for others that take the places of those who have to go."""

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
"""What a kubelet says in its Ready condition; its pods have less time then than their grace period."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Why a worker has to go, and by when, in seconds since the epoch; None: it is not known by when.

    `closed`: its node takes no other pods meanwhile.
    """

    reason: str
    deadline: float | None = None
    closed: bool = False

    def leave_at(self, lead_s: float) -> float:
        """When it has to begin to leave at the latest, with `lead_s` seconds for that; infinite: at any time."""
        return math.inf if self.deadline is None else self.deadline - lead_s


def read_node(node: Manifest) -> Notice | None:
    """What a Node object of any content says to the workers on it; None: they may stay."""
    ready = next((item for item in _conditions(node) if item.get("type") == "Ready"), {})
    if ready.get("status") == "False" and _SHUTS_DOWN in as_text(ready.get("message")):
        return Notice("its node is shutting down", 0.0)
    spec = as_mapping(node.get("spec"))
    taints = [as_mapping(taint) for taint in as_list(spec.get("taints"))]
    cordoned = spec.get("unschedulable") is True
    for taint in taints:
        if reason := _TAINTS.get(as_text(taint.get("key"))):
            return Notice(reason, closed=cordoned or taint.get("effect") in _CLOSES)
    return None


def _conditions(node: Manifest) -> Iterable[Mapping[str, object]]:
    return map(as_mapping, as_list(as_mapping(node.get("status")).get("conditions")))


@dataclass(frozen=True, slots=True)
class Leaving:
    """Who of a group has been `told` to stop, and what the cluster says of those who will have to go; by uid."""

    told: frozenset[str] = frozenset()
    notices: Mapping[str, Notice] = field(default_factory=dict)


@dataclass(slots=True)
class Notices:
    """What is known of the workers of one group, by uid.

    `told` by their launchers, `given` by the controller. `departing` have been told to go. `replaced` is how many of
    those who have to go already have somebody in their place.
    """

    told: dict[str, Notice] = field(default_factory=dict)
    given: Mapping[str, Notice] = field(default_factory=dict)
    departing: set[str] = field(default_factory=set)
    replaced: int = 0

    @classmethod
    def restored(cls, workers: Iterable[WorkerStatus]) -> Notices:
        """As a restarted service knows them, until their launchers and the cluster tell again."""
        return cls({worker.uid: Notice(worker.notice) for worker in workers if worker.notice and worker.cause is None})

    def of(self, uid: str) -> Notice | None:
        """The notice that counts, the one with the earliest deadline; None for a worker that may stay."""
        found = [notice for notice in (self.told.get(uid), self.given.get(uid)) if notice is not None]
        return min(found, key=lambda notice: notice.leave_at(0.0), default=None)

    def keep(self, alive: Collection[str]) -> None:
        """Forget the workers that are not alive."""
        self.departing.intersection_update(alive)
        for uid in self.told.keys() - alive:
            del self.told[uid]

    def held(self, members: Iterable[str]) -> dict[str, Notice]:
        """The members that have to go and have not been told to yet."""
        found = ((uid, self.of(uid)) for uid in members if uid not in self.departing)
        return {uid: notice for uid, notice in found if notice is not None}

    def note_formed(self, newcomers: int, members: Collection[str]) -> None:
        """A generation has formed: its newcomers are in the places of members that have to go."""
        self.replaced = min(self.replaced + newcomers, len(self.held(members)))

    def depart(self, uids: Collection[str]) -> None:
        """Those workers are told to go."""
        self.departing.update(uids)
        self.replaced = max(0, self.replaced - len(uids))


@dataclass(frozen=True, slots=True)
class Replacements:
    """Who could take the places: how many are `ready`, since when, and whether `more` are starting."""

    ready: int = 0
    more: bool = False
    since: float | None = None


def lead_s(longest_step_s: float, save_s: float) -> float:
    """How many seconds before its deadline a worker begins to leave whose group's steps and saves take so long."""
    return max(LEAVE_S, longest_step_s + save_s + OWN_S)


def who_leaves(
    held: Mapping[str, Notice], others: Replacements, lead_s: float, now: float
) -> tuple[tuple[str, ...], float]:
    """Who of those who have to go leaves now, and when to ask again (infinite: when something changes)."""
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
