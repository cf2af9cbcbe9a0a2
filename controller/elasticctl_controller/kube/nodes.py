"""Which nodes are lost, long before Kubernetes gives up on their pods.

A node whose object has been deleted is lost immediately: that is how a cloud reports that the machine is gone. A node
that is silent (its Ready condition is Unknown) is lost after a short grace period. A node that reports itself as not
ready is lost after a longer one: its kubelet is alive, and often its containers are too. A node that a pod names but
that has never been seen may not have arrived through the watch yet. The taint `node.kubernetes.io/out-of-service` means
that an administrator has made sure that the node is off.

While the API server is down, no kubelet can reach it, so once it is back, Kubernetes considers nodes silent that have
been training all along. Therefore silence is no evidence while every node is silent, nor for some time after this
process has reached the API server again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticctl.api.codec import Manifest
from elasticctl_controller.core.goal.placement import KARPENTER
from elasticctl_controller.core.interruption_notices import LeaveNotice, read_node

UNKNOWN_GRACE_S = 1.0
"""By then Kubernetes has already waited for 40 s by default."""
UNREADY_FACTOR = 10.0
UNSEEN_GRACE_S = 45.0
"""A broken watch is noticed after 35 s; until then, nodes that an autoscaler adds are not seen."""
BLIND_S = 8.0
"""After this time without an answer from the API server, this process knows nothing about nodes; it asks every 2 s."""
SETTLE_S = 30.0
"""How long kubelets then have to report again: by default, they do so every 10 s."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class NodeNotices:
    """The nodes that workers will have to leave, and whether pods may name nodes, according to the nodes' objects.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notices: dict[str, LeaveNotice] = {}
        self._added: set[str] = set()

    def node_changed(self, old: Manifest | None, new: Manifest | None) -> bool:
        """Process a change of a node, as an ObjectStore reports it; True if its notice has changed."""
        name, notice = _name(new or old or {}), read_node(new or {})
        with self._lock:
            (self._added.add if _is_added(new or {}) else self._added.discard)(name)
            before = self._notices.pop(name, None)
            if notice is not None:
                self._notices[name] = notice
            return notice != before and new is not None

    def all(self) -> dict[str, LeaveNotice]:
        """The notices by the name of the node."""
        with self._lock:
            return dict(self._notices)

    def may_be_named(self) -> bool:
        """False where Karpenter has added machines: it adds none for pods that name nodes to avoid."""
        with self._lock:
            return not self._added


class NodeHealth:
    """Decides from changes of nodes, nodes that pods name, and answers of the API server; thread-safe.

    `grace_s` is the grace period of a silent node; `clock` is monotonic seconds.
    """

    def __init__(self, grace_s: float = UNKNOWN_GRACE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s, self._clock = grace_s, clock
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._lost_at: dict[str, float] = {}
        self._silent: set[str] = set()  # known nodes whose Ready condition is Unknown ...
        self._believed: set[str] = set()  # ... and those of them that count as lost because of it
        self._answered_at: float | None = None
        self._settled_at = 0.0

    def node_changed(self, old: Manifest | None, new: Manifest | None) -> None:
        """Process a change of a node, as an ObjectStore reports it."""
        name = _name(new or old or {})
        with self._lock:
            if new is None or not is_silent(new):
                self._silent.discard(name)
                self._believed.discard(name)
            else:
                self._silent.add(name)
            if new is None:
                self._known.discard(name)
                self._lost_at[name] = self._clock()
                return
            self._known.add(name)
            grace_s = self._grace_of(new)
            if grace_s is None:
                self._lost_at.pop(name, None)
            else:
                at = self._clock() + grace_s
                self._lost_at[name] = min(self._lost_at.get(name, at), at) if old is not None else at

    def note_api_answer(self) -> bool:
        """Record that the API server has just answered this process; True when it had not for a while, or never."""
        with self._lock:
            was_blind = self._answered_at is None or self._is_blind()
            self._answered_at = self._clock()
            if was_blind:
                self._settled_at = self._answered_at + SETTLE_S
            return was_blind

    def expect_node(self, node: str) -> bool:
        """Record that a pod is on this node; True if the node is unknown, and has some time to appear from now on."""
        with self._lock:
            if not node or node in self._known or node in self._lost_at:
                return False
            self._lost_at[node] = self._clock() + UNSEEN_GRACE_S
            return True

    def lost(self) -> frozenset[str]:
        """Return the names of the nodes that are lost by now."""
        with self._lock:
            now = self._clock()
            due = {name for name, at in self._lost_at.items() if at <= now}
            if self._known - self._silent and not self._is_blind() and now >= self._settled_at:
                self._believed |= due & self._silent
            return frozenset(due - self._silent | due & self._believed)

    def next_loss_s(self) -> float | None:
        """Return the seconds until another node may count as lost; None when that takes a change or an answer."""
        with self._lock:
            now = self._clock()
            times = (
                max(at, self._settled_at) if name in self._silent - self._believed else at
                for name, at in self._lost_at.items()
            )
            return min((at - now for at in times if at > now), default=None)

    def drop_unnamed(self, named: set[str]) -> None:
        """Drop the nodes that are gone and that none of the pods names."""
        with self._lock:
            for name in self._lost_at.keys() - self._known - named:
                del self._lost_at[name]

    def _is_blind(self) -> bool:
        return self._answered_at is not None and self._clock() > self._answered_at + BLIND_S

    def _grace_of(self, node: Manifest) -> float | None:
        """How long this node may stay in its state before it is lost; None: for ever."""
        if _is_off(node):
            return 0.0
        ready = _ready(node)
        if ready == "True":
            return None
        return self._grace_s if ready == "Unknown" else self._grace_s * UNREADY_FACTOR


def is_silent(node: Manifest) -> bool:
    """True for a node whose Ready condition is Unknown, and that is not known to be off."""
    return _ready(node) == "Unknown" and not _is_off(node)


def _is_added(node: Manifest) -> bool:
    return any(label.startswith(KARPENTER) for label in node.get("metadata", {}).get("labels", {}))


def _is_off(node: Manifest) -> bool:
    return any(taint.get("key") == OUT_OF_SERVICE for taint in node.get("spec", {}).get("taints", ()))


def _ready(node: Manifest) -> str:
    conditions = node.get("status", {}).get("conditions", ())
    return next((str(item.get("status")) for item in conditions if item.get("type") == "Ready"), "True")


def _name(node: Manifest) -> str:
    return str(node.get("metadata", {}).get("name", ""))
