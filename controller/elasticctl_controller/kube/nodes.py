"""Which nodes are lost, long before Kubernetes gives up on their pods.

A node whose object has been deleted is lost at once: that is how a cloud says that the machine is gone. One that is no
longer heard of (Ready is Unknown) is lost after a short grace, one that itself says that it is not ready after a longer
one: its kubelet is alive, and often its containers too. A node that a pod names and that nobody has ever seen may just
not have come through the watch yet. `node.kubernetes.io/out-of-service` says that somebody made sure that it is off.

Where the API server itself was away, no kubelet could reach it, and as it comes back Kubernetes calls nodes silent that
have trained all the while. So silence is no evidence while no node at all is heard of, nor until a while after this
process itself has reached the API server again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticctl.api.codec import Manifest

UNKNOWN_GRACE_S = 1.0
"""Kubernetes has already waited for 40 s by then, unless set otherwise."""
UNREADY_FACTOR = 10.0
UNSEEN_GRACE_S = 45.0
"""A watch whose other side vanished is noticed after 35 s: until then, nodes that an autoscaler adds are not seen."""
BLIND_S = 8.0
"""Without an answer from the API server for so long, this process knows nothing of nodes; it asks every 2 s or so."""
SETTLE_S = 30.0
"""What kubelets get after that to be heard of again: they try every 10 s unless set otherwise."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class NodeHealth:
    """Thread-safe; fed with the changes of nodes, the names that pods bear and the API server's answers.

    `grace_s` is for a node that is no longer heard of; `clock` is monotonic seconds.
    """

    def __init__(self, grace_s: float = UNKNOWN_GRACE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s, self._clock = grace_s, clock
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._lost_at: dict[str, float] = {}
        self._silent: set[str] = set()  # those of the known ones that Kubernetes no longer hears of ...
        self._believed: set[str] = set()  # ... and those of them that count as lost for it
        self._answered_at: float | None = None
        self._settled_at = 0.0

    def node_changed(self, old: Manifest | None, new: Manifest | None) -> None:
        """Take in a change, as an ObjectStore tells of it."""
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

    def api_answered(self) -> bool:
        """The API server has answered this process just now; True when it had not for a while, or never before."""
        with self._lock:
            was_blind = self._answered_at is None or self._is_blind()
            self._answered_at = self._clock()
            if was_blind:
                self._settled_at = self._answered_at + SETTLE_S
            return was_blind

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
            due = {name for name, at in self._lost_at.items() if at <= now}
            if self._known - self._silent and not self._is_blind() and now >= self._settled_at:
                self._believed |= due & self._silent
            return frozenset(due - self._silent | due & self._believed)

    def next_loss_s(self) -> float | None:
        """Seconds until the next node may count as lost; None when none is in doubt, or only an answer can tell."""
        with self._lock:
            now = self._clock()
            times = (
                max(at, self._settled_at) if name in self._silent - self._believed else at
                for name, at in self._lost_at.items()
            )
            return min((at - now for at in times if at > now), default=None)

    def forget_unnamed(self, named: set[str]) -> None:
        """Forget the nodes that are gone and that no pod names any more."""
        with self._lock:
            for name in self._lost_at.keys() - self._known - named:
                del self._lost_at[name]

    def _is_blind(self) -> bool:
        return self._answered_at is not None and self._clock() > self._answered_at + BLIND_S

    def _grace_of(self, node: Manifest) -> float | None:
        """How long this node may go on as it is; None: for ever."""
        if _is_off(node):
            return 0.0
        ready = _ready(node)
        if ready == "True":
            return None
        return self._grace_s if ready == "Unknown" else self._grace_s * UNREADY_FACTOR


def is_silent(node: Manifest) -> bool:
    """True for a node that Kubernetes no longer hears of, and of which nobody has said more than that."""
    return _ready(node) == "Unknown" and not _is_off(node)


def _is_off(node: Manifest) -> bool:
    return any(taint.get("key") == OUT_OF_SERVICE for taint in node.get("spec", {}).get("taints", ()))


def _ready(node: Manifest) -> str:
    conditions = node.get("status", {}).get("conditions", ())
    return next((str(item.get("status")) for item in conditions if item.get("type") == "Ready"), "True")


def _name(node: Manifest) -> str:
    return str(node.get("metadata", {}).get("name", ""))
