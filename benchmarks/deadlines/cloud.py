"""Karpenter's machines on the lab, as on a tape: offers are withdrawn and returned, and machines killed.

The cost of machines is counted as a cloud does, from their start until their last worker has left.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.clusterload import until
from benchmarks.deadlines.trace_playback import HOUR_S, ON_DEMAND_USD, SPOT_USD, Tape
from elasticctl.api.codec import Manifest
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection

POOLS = "/apis/karpenter.sh/v1/nodepools"
CAPACITY = "karpenter.sh/capacity-type"
KIND = "node.kubernetes.io/instance-type"
MACHINE = "g4dn.xlarge"
"""With one GPU."""
PRICES = {"spot": SPOT_USD, "on-demand": ON_DEMAND_USD}
_LOOK_S, _CLEARED_S = 0.5, 60.0


def node_pool(capacity: str, most: int) -> Manifest:
    """Return a pool of machines with one GPU and this capacity type, with at most that many."""
    only = {CAPACITY: capacity, KIND: MACHINE}
    template = {
        "expireAfter": "Never",
        "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
        "requirements": [{"key": key, "operator": "In", "values": [value]} for key, value in only.items()],
    }
    disruption = {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "5s", "budgets": [{"nodes": "100%"}]}
    spec = {"template": {"spec": template}, "disruption": disruption, "limits": {"nvidia.com/gpu": str(most)}}
    return {"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": capacity}, "spec": spec}


class Cloud:
    """Spot machines as on the tape from `start` on, and any number of machines on demand.

    `usd` is what they have cost, and `killed` which were reclaimed, and how many seconds after the start.
    """

    def __init__(self, api: Connection, lab: Sequence[str], tape: Tape, most: int) -> None:
        self._api, self._lab, self._tape, self._most = api, lab, tape, most
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cloud", daemon=True)
        self._used: set[str] = set()
        self._dead: set[str] = set()
        self.killed: list[tuple[float, str]] = []
        self.usd = 0.0

    def prepare(self) -> None:
        """Replace Karpenter's own pools with two; that of spot machines has none yet."""
        for pool in self._api.request("GET", POOLS)["items"]:
            self._api.request("DELETE", f"{POOLS}/{pool['metadata']['name']}", {"propagationPolicy": "Foreground"})
        until(lambda: not self._api.request("GET", POOLS)["items"], _CLEARED_S, "a cluster without node pools")
        for capacity, most in (("spot", 0), ("on-demand", 2 * self._most)):
            self._api.request("POST", POOLS, node_pool(capacity, most))

    def start(self) -> None:
        """Start playing."""
        self._thread.start()

    def stop(self) -> None:
        """Leave everything as it is now."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began, offered = time.monotonic(), 0
        looked_at = began
        while not self._over.is_set():
            now = time.monotonic()
            there = self._tape.there(now - began)
            if there != offered:
                limits = {"spec": {"limits": {"nvidia.com/gpu": str(there)}}}
                self._api.request("PATCH", f"{POOLS}/spot", limits, content_type=MERGE_PATCH)
                offered = there
            machines = self._machines()
            self._bill(machines, now - looked_at)
            looked_at = now
            spot = [one["metadata"] for one in machines if _capacity(one) == "spot"]
            for one in spot[there:]:
                subprocess.run([*self._lab, "kill-node", one["name"]], check=False, capture_output=True, timeout=60)
                self._dead.add(one["uid"])
                self.killed.append((round(now - began, 1), one["name"]))
            self._over.wait(_LOOK_S)

    def _machines(self) -> list[dict[str, Any]]:
        """Return those that exist, the oldest first; the object of a killed one exists for a while longer."""
        found: list[dict[str, Any]] = self._api.request("GET", "/api/v1/nodes")["items"]
        alive = [one for one in found if _capacity(one) and one["metadata"]["uid"] not in self._dead]
        return sorted(alive, key=lambda one: (one["metadata"]["creationTimestamp"], one["metadata"]["name"]))

    def _bill(self, machines: Sequence[dict[str, Any]], seconds: float) -> None:
        pods = self._api.request("GET", "/api/v1/pods")["items"]
        hosts = {pod["spec"].get("nodeName") for pod in pods if pod["status"]["phase"] in ("Pending", "Running")}
        for one in machines:
            if one["metadata"]["name"] in hosts:
                self._used.add(one["metadata"]["uid"])
            elif one["metadata"]["uid"] in self._used:
                continue  # its last worker has left
            self.usd += PRICES[_capacity(one)] * seconds / HOUR_S


def _capacity(node: dict[str, Any]) -> str:
    return str(node["metadata"].get("labels", {}).get(CAPACITY, ""))
