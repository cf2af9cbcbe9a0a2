"""Spot machines of a recorded trace on the lab, played faster than it was recorded, and the simulator's forecast.

An hour of the trace passes in `HOUR_S` seconds, and machines come and go at most every `TICK_S`. Starts, losses and
joins take their real time, so relative to the trace, machines seem to need hours to start: the forecast is made with
the same costs, in the same time. Karpenter launches the machines; the trace decides how many it may launch, and kills
those that are reclaimed. A machine is billed from its start until its last worker has left, as by a cloud.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection
from elasticctl.planning.availability import AvailabilityRecord
from elasticctl.planning.deadline_policy import decide
from elasticctl.planning.situation import Costs, Speeds
from elasticctl.simulation.replay import Replay, ReplayedJob, ReplayResult
from elasticctl.simulation.traces import Recording, Trace
from tests.on_cluster.waiting import wait_until

HOUR_S, TICK_S = 10.0, 5.0
ON_DEMAND_USD, SPOT_USD = 1.0, 0.3
"""For a worker and an hour of the trace."""
POOLS = "/apis/karpenter.sh/v1/nodepools"
CAPACITY = "karpenter.sh/capacity-type"
KIND = "node.kubernetes.io/instance-type"
MACHINE = "g4dn.xlarge"
"""With one GPU."""
PRICES = {"spot": SPOT_USD, "on-demand": ON_DEMAND_USD}
_LOOK_S, _CLEARED_S = 0.5, 60.0


@dataclass(frozen=True, slots=True)
class Tape:
    """A compressed trace from a tick on; ticks are `trace.gap_s` seconds of the cluster's time apart."""

    trace: Trace
    first: int

    @classmethod
    def of(cls, trace: Trace, workers: int, from_h: float) -> Tape:
        """Start that many hours into a trace, as if this many workers had been requested."""
        faster = replace(trace.scaled(workers), gap_s=trace.gap_s * HOUR_S / 3600).at_gap(TICK_S)
        return cls(faster, int(from_h * HOUR_S / TICK_S))

    def there(self, after_s: float) -> int:
        """Return how many machines exist, that many seconds of the cluster's time after the start."""
        tick = self.first + int(after_s / self.trace.gap_s)
        return self.trace.there[min(tick, len(self.trace.there) - 1)]

    def forecast(self, plan: ReplayedJob) -> ReplayResult:
        """Simulate one run of the policy; dollars and hours are the trace's."""
        recording = Recording.of((self.trace,), max(self.trace.there), SPOT_USD * 3600 / HOUR_S)
        return Replay(plan, recording, self.first, decide).run()

    def seen(self, pool: str, at: float) -> Manifest:
        """Return the `status.plan.pools` of a job that has watched up to the start."""
        seen, gap_h = AvailabilityRecord(self.trace.there[0] > 0), self.trace.gap_s / 3600
        for count in self.trace.there[1 : self.first]:
            seen = seen.after(gap_h, count > 0)
        rows = {"awayHours": seen.hours[0], "upHours": seen.hours[1], "awayEnds": seen.ends[0], "upEnds": seen.ends[1]}
        return {"name": pool, "at": to_rfc3339(at), "up": seen.up, **{name: list(row) for name, row in rows.items()}}


def plan_of(work: float, rates: Mapping[int, float], costs: Costs, deadline_s: float) -> ReplayedJob:
    """Return the plan in the cluster's time; prices are per hour of it."""
    return ReplayedJob(work, Speeds.of(rates), costs, ON_DEMAND_USD * 3600 / HOUR_S, deadline_s, blind=True)


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
        wait_until(lambda: not self._api.request("GET", POOLS)["items"], _CLEARED_S)
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
