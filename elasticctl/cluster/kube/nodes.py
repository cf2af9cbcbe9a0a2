"""Which nodes are lost, long before Kubernetes gives up on their pods.

A node whose object has been deleted is lost at once: that is how a cloud says that the machine is gone. One that is no
longer heard of (Ready is Unknown) is lost after a short grace, one that itself says that it is not ready after a longer
one: its kubelet is alive, and often its containers too. A node that a pod names and that nobody has ever seen may just
not have come through the watch yet. `node.kubernetes.io/out-of-service` says that somebody made sure that it is off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticctl.codec import Manifest

UNKNOWN_GRACE_S = 1.0
"""Kubernetes has already waited for 40 s by then, unless set otherwise."""
UNREADY_FACTOR = 10.0
UNSEEN_GRACE_S = 10.0
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class NodeHealth:
    """Thread-safe; fed with the changes of nodes and the names that pods bear.

    `grace_s` is for a node that is no longer heard of; `clock` is monotonic seconds.
    """

    def __init__(self, grace_s: float = UNKNOWN_GRACE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s, self._clock = grace_s, clock
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._lost_at: dict[str, float] = {}

    def node_changed(self, old: Manifest | None, new: Manifest | None) -> None:
        """Take in a change, as an ObjectStore tells of it."""
        name = _name(new or old or {})
        with self._lock:
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

    def pod_names(self, node: str) -> bool:
        """A pod is on this node: if nobody has seen it, it has a while to turn up, and the answer is True."""
        with self._lock:
            if not node or node in self._known or node in self._lost_at:
                return False
            self._lost_at[node] = self._clock() + UNSEEN_GRACE_S
            return True

    def lost(self) -> frozenset[str]:
        """The names of the nodes that are lost by now."""
        with self._lock:
            now = self._clock()
            return frozenset(name for name, at in self._lost_at.items() if at <= now)

    def next_loss_s(self) -> float | None:
        """Seconds until the next node counts as lost; None when none is in doubt."""
        with self._lock:
            now = self._clock()
            return min((at - now for at in self._lost_at.values() if at > now), default=None)

    def forget_unnamed(self, named: set[str]) -> None:
        """Forget the nodes that are gone and that no pod names any more."""
        with self._lock:
            for name in self._lost_at.keys() - self._known - named:
                del self._lost_at[name]

    def _grace_of(self, node: Manifest) -> float | None:
        """How long this node may go on as it is; None: for ever."""
        if any(taint.get("key") == OUT_OF_SERVICE for taint in node.get("spec", {}).get("taints", ())):
            return 0.0
        conditions = node.get("status", {}).get("conditions", ())
        ready = next((item.get("status") for item in conditions if item.get("type") == "Ready"), "True")
        if ready == "True":
            return None
        return self._grace_s if ready == "Unknown" else self._grace_s * UNREADY_FACTOR


def _name(node: Manifest) -> str:
    return str(node.get("metadata", {}).get("name", ""))
