"""Which replica of the controller acts: the holder of a Lease (coordination.k8s.io/v1).

The holder renews it every two seconds. Whoever else wants it takes it once its own clock has seen no renewal for the
whole duration, so clocks of different machines are never compared. The holder itself stops believing two seconds
before that, by a clock that also counts while the process or the machine sleeps; `holds` is asked before every write.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.api.errors import ConflictError, ElasticctlError, NotFoundError
from elasticctl.kubeapi.connection import MERGE_PATCH, resource_path
from elasticctl_controller.kube.limiter import LimitedApi

RENEW_S = 2.0
DURATION_S = 10.0
HOLD_S = 8.0
"""How long after a renewal was sent the holder may act; less than the duration."""
REQUEST_TIMEOUT_S = 3.0
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"

log = logging.getLogger(__name__)


class LeaseApi(Protocol):
    """What of `connection.Connection` is used; the election's requests are neither limited nor fenced."""

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> dict[str, Any]:
        """Make one request and return the answer's JSON."""


@dataclass(frozen=True, slots=True)
class LeaseCandidate:
    """Where the Lease is and who wants it; `identity` differs between any two processes."""

    namespace: str
    name: str
    identity: str


def awake_clock() -> float:
    """Seconds that also pass while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Election:
    """Takes part until stopped. `on_elected` and `on_lost` are called from its threads, each once at most.

    `on_answer` is called whenever the API server has answered: every two seconds or so while it can be reached.
    """

    def __init__(
        self,
        api: LeaseApi,
        candidate: LeaseCandidate,
        on_elected: Callable[[], None],
        on_lost: Callable[[], None],
        clock: Callable[[], float] = awake_clock,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self._api, self._me, self._clock = api, candidate, clock
        self._on_elected, self._on_lost, self._on_answer = on_elected, on_lost, on_answer
        self._path = _LEASES.format(candidate.namespace)
        self._held_until: float | None = None
        self._seen: tuple[str, float] = ("", 0.0)  # the last version of another's lease, and when it was first seen
        self._version = ""
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._take_part, name="election", daemon=True),
            threading.Thread(target=self._look_out, name="lease-watchdog", daemon=True),
        ]

    def start(self) -> None:
        """Begin, in threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Give the lease up, if it is held, so that another replica need not wait for its end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if not self.holds():
            return
        self._held_until = None
        try:
            self._put({"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": to_rfc3339(time.time())})
            log.info("the lease is given up")
        except ElasticctlError as e:
            log.warning("the lease could not be given up: %s", e)

    def holds(self) -> bool:
        """True while this process may act."""
        until = self._held_until
        return until is not None and self._clock() < until

    @property
    def alive(self) -> bool:
        """False once a thread has died, which is an error."""
        return all(thread.is_alive() for thread in self._threads)

    def _take_part(self) -> None:
        while not self._stopping.is_set():
            sent = self._clock()
            try:
                mine = self._renew() if self._held_until is not None else self._acquire()
            except ElasticctlError as e:
                log.warning("lease %s/%s: %s", self._me.namespace, self._me.name, e)
                mine = False
            else:
                self._on_answer()
            if mine:
                elected = self._held_until is None
                self._held_until = sent + HOLD_S
                if elected:
                    log.info("%s leads", self._me.identity)
                    self._on_elected()
            self._stopping.wait(RENEW_S)

    def _look_out(self) -> None:
        """Notice at once when the lease has run out, even while a renewal hangs."""
        while not self._stopping.wait(0.2):
            if self._held_until is not None and not self.holds():
                log.error("%s no longer holds the lease", self._me.identity)
                self._on_lost()
                return

    def _acquire(self) -> bool:
        """Take the lease if it is free, given up or no longer renewed."""
        try:
            lease = self._api.request("GET", f"{self._path}/{self._me.name}", timeout_s=REQUEST_TIMEOUT_S)
        except NotFoundError:
            return self._create()
        spec = lease.get("spec", {})
        self._version = lease["metadata"]["resourceVersion"]
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._me.identity):
            if self._seen[0] != self._version:
                self._seen = (self._version, self._clock())
            if self._clock() < self._seen[1] + float(spec.get("leaseDurationSeconds") or DURATION_S):
                return False
            log.info("the lease of %s has run out", holder)
        transitions = int(spec.get("leaseTransitions") or 0) + 1
        try:
            self._put(self._spec() | {"acquireTime": to_rfc3339(time.time()), "leaseTransitions": transitions})
        except ConflictError:
            return False  # another replica was quicker
        return True

    def _create(self) -> bool:
        metadata = {"name": self._me.name, "namespace": self._me.namespace}
        spec = self._spec() | {"acquireTime": to_rfc3339(time.time()), "leaseTransitions": 0}
        try:
            made = self._api.request("POST", self._path, _lease(metadata, spec), timeout_s=REQUEST_TIMEOUT_S)
        except ConflictError:
            return False
        self._version = made["metadata"]["resourceVersion"]
        return True

    def _renew(self) -> bool:
        try:
            self._put(self._spec())
        except ConflictError:
            # An answer of ours may have been lost; else somebody took the lease, and the watchdog ends this process.
            lease = self._api.request("GET", f"{self._path}/{self._me.name}", timeout_s=REQUEST_TIMEOUT_S)
            if lease.get("spec", {}).get("holderIdentity") != self._me.identity:
                self._held_until = self._clock()
                return False
            self._version = lease["metadata"]["resourceVersion"]
            self._put(self._spec())
        return True

    def _spec(self) -> Manifest:
        return {
            "holderIdentity": self._me.identity,
            "leaseDurationSeconds": int(DURATION_S),
            "renewTime": to_rfc3339(time.time()),
        }

    def _put(self, spec: Manifest) -> None:
        metadata = {"name": self._me.name, "namespace": self._me.namespace, "resourceVersion": self._version}
        path = f"{self._path}/{self._me.name}"
        answer = self._api.request("PUT", path, _lease(metadata, spec), timeout_s=REQUEST_TIMEOUT_S)
        self._version = answer["metadata"]["resourceVersion"]


def _lease(metadata: Manifest, spec: Manifest) -> Manifest:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


LEADER_LABEL = "elasticctl.dev/leader"
LABEL_RETRY_S = 1.0


class LeaderLabel:
    """Moves the label to the pod `pod` of `namespace`."""

    def __init__(self, api: LimitedApi, namespace: str, pod: str) -> None:
        self._api, self._namespace, self._pod = api, namespace, pod

    async def keep(self, holds: Callable[[], bool]) -> None:
        """Put it on, and take it off every other pod: the last leader may have had no time to; until that is done."""
        while holds():
            try:
                await asyncio.to_thread(self._move)
            except ElasticctlError as e:
                log.warning("the rendezvous Service does not find this pod yet: %s", e)
                await asyncio.sleep(LABEL_RETRY_S)
            else:
                return

    def remove(self) -> None:
        """Take it off this pod; that it cannot be done is logged, for the next leader does it too."""
        try:
            self._set(self._pod, None)
        except ElasticctlError as e:
            log.warning("the leader's label stays: %s", e)

    def _move(self) -> None:
        self._set(self._pod, "true")
        pods = self._api.request(
            "GET", resource_path("v1", self._namespace, "pods"), None, {"labelSelector": f"{LEADER_LABEL}=true"}
        )
        for pod in pods.get("items") or []:
            name = pod["metadata"]["name"]
            if name != self._pod:
                try:
                    self._set(name, None)
                except NotFoundError:
                    continue

    def _set(self, pod: str, value: str | None) -> None:
        path = resource_path("v1", self._namespace, "pods", pod)
        self._api.request("PATCH", path, {"metadata": {"labels": {LEADER_LABEL: value}}}, content_type=MERGE_PATCH)
