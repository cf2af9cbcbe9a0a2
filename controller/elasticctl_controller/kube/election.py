"""Leader election: the replica of the controller that holds a Lease (coordination.k8s.io/v1) acts.

The holder renews the Lease every second. Another replica takes it once its own clock has seen no renewal for the whole
duration, so the clocks of two machines are never compared. While the API server does not answer, no replica can renew
it, and the wait starts again. The holder itself stops acting earlier, by a clock that also runs while the process or
the machine sleeps: `holds` is checked before every write. It acts again once a renewal succeeds. A renewal names the
version that this replica wrote last, so its success proves that no other replica has had the Lease in between.

The duration is short, so that a dead leader is replaced soon. Where requests take long or find no answer, on a busy
machine or with a busy API server, the holder asks for a longer one, and another replica waits for longer: the holder
would otherwise lose the Lease although it is alive.

The leader also labels its own pod, so that the rendezvous Service finds it.
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
from elasticctl_controller.kube.limited_api import LimitedApi

RENEW_S = 1.0
WATCH_S = 0.5
"""How often another replica checks whether the Lease has been released."""
RETRY_S = 0.2
"""How soon the next request follows one that has failed."""
DURATION_S = 4.0
LONGEST_S = 15.0
"""The duration where requests take long: what other controllers of Kubernetes use."""
MARGIN_S = 1.5
"""How long before the end of the duration, counted from when it sent a renewal, the holder stops acting: its last
requests have this much time to arrive."""
REQUEST_TIMEOUT_S = 2.0
SLOWNESS = 3.0
"""By how many times what a request takes the duration grows."""
FADING = 0.95
"""What is left of the effect of a slow request on the duration, per request since."""
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"

log = logging.getLogger(__name__)


class LeaseApi(Protocol):
    """The part of `Connection` that the election uses; its requests are neither limited nor fenced."""

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> dict[str, Any]:
        """Make one request and return the answer's JSON."""


@dataclass(frozen=True, slots=True)
class LeaseCandidate:
    """The Lease, and the `identity` of the replica that wants it, which is unique to the process."""

    namespace: str
    name: str
    identity: str


def awake_clock() -> float:
    """Seconds that also pass while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Election:
    """Takes part in the election until it is stopped.

    `on_elected` and `on_lost` are called from its thread, each at most once. The Lease is lost when another replica
    holds it, or when it has been deleted. `on_regained(seconds)` is called when this replica holds the Lease again
    after that time, in which no other held it. `on_answer` is called whenever the API server has answered: about every
    second while it is reachable.
    """

    def __init__(
        self,
        api: LeaseApi,
        candidate: LeaseCandidate,
        on_elected: Callable[[], None],
        on_lost: Callable[[], None],
        clock: Callable[[], float] = awake_clock,
        on_answer: Callable[[], None] = lambda: None,
        on_regained: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._api, self._me, self._clock = api, candidate, clock
        self._on_elected, self._on_lost = on_elected, on_lost
        self._on_answer, self._on_regained = on_answer, on_regained
        self._path = _LEASES.format(candidate.namespace)
        self._held_until: float | None = None
        self._slow_s = 0.0  # how long recent requests have taken
        self._seen: tuple[str, float] = (
            "",
            0.0,
        )  # the last version of another replica's lease, and when it was first seen
        self._expires_at = 0.0
        self._version = ""
        self._term: Manifest = {}  # since when this replica has held the lease, and how often it has changed hands
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_election, name="election", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Release the Lease if it is held, so that another replica does not have to wait until it expires."""
        self._stopping.set()
        self._thread.join()
        if not self.holds():
            return
        self._held_until = None
        try:
            self._put(self._spec() | {"holderIdentity": "", "leaseDurationSeconds": 1})
            log.info("released the lease")
        except ElasticctlError as e:
            log.warning("could not release the lease: %s", e)

    def holds(self) -> bool:
        """True while this process may act."""
        until = self._held_until
        return until is not None and self._clock() < until

    @property
    def alive(self) -> bool:
        """False once the thread has died, which is a bug."""
        return self._thread.is_alive()

    def _run_election(self) -> None:
        reported = ""
        while not self._stopping.is_set():
            sent = self._clock()
            try:
                mine = self._acquire() if self._held_until is None else self._renew(self._held_until, sent)
            except _Lost as e:
                self._held_until = sent
                log.error("%s no longer holds the lease: %s", self._me.identity, e)
                self._on_lost()
                return
            except ElasticctlError as e:
                self._note_request(LONGEST_S)
                if str(e) != reported:
                    reported = str(e)
                    log.warning("lease %s/%s: %s; trying again", self._me.namespace, self._me.name, reported)
                self._seen = ("", 0.0)  # while the API server did not answer, no replica could renew it
                self._stopping.wait(RETRY_S)
                continue
            reported = ""
            self._on_answer()
            if mine:
                self._hold(sent)
            self._note_request(self._clock() - sent)
            self._stopping.wait(RENEW_S if mine else min(WATCH_S, max(0.0, self._expires_at - self._clock())))

    def _hold(self, sent: float) -> None:
        """Act from now on, or continue to act: a request sent at `sent` has renewed the Lease."""
        before, now = self._held_until, self._clock()
        self._held_until = sent + self._duration_s() - MARGIN_S
        if before is None:
            log.info("%s leads", self._me.identity)
            self._on_elected()
        elif now > before:
            log.warning("%s leads again, after %.1f s in which it could not renew", self._me.identity, now - before)
            self._on_regained(now - before)

    def _note_request(self, took_s: float) -> None:
        """Remember how long a request has taken, LONGEST_S if there was no answer."""
        self._slow_s = max(min(took_s, LONGEST_S / SLOWNESS), self._slow_s * FADING)

    def _duration_s(self) -> int:
        return int(min(DURATION_S + SLOWNESS * self._slow_s, LONGEST_S))

    def _acquire(self) -> bool:
        """Take the lease if it is free, released or no longer renewed."""
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
            duration_s = float(spec.get("leaseDurationSeconds") or DURATION_S)
            self._expires_at = self._seen[1] + max(duration_s, self._duration_s())
            if self._clock() < self._expires_at:
                return False
            log.info("the lease of %s has expired", holder)
        self._begin_term(int(spec.get("leaseTransitions") or 0) + 1)
        try:
            self._put(self._spec())
        except ConflictError:
            return False  # another replica was faster
        return True

    def _create(self) -> bool:
        metadata = {"name": self._me.name, "namespace": self._me.namespace}
        self._begin_term(transitions=0)
        try:
            made = self._api.request("POST", self._path, _lease(metadata, self._spec()), timeout_s=REQUEST_TIMEOUT_S)
        except ConflictError:
            return False
        self._version = made["metadata"]["resourceVersion"]
        return True

    def _renew(self, held_until: float, sent: float) -> bool:
        # A shorter duration counts from now on, even if the answer is lost.
        self._held_until = min(held_until, sent + self._duration_s() - MARGIN_S)
        try:
            self._put(self._spec())
        except NotFoundError as e:
            raise _Lost("it has been deleted") from e
        except ConflictError:
            # The answer to our last renewal may have been lost. If not, another replica has the lease.
            lease = self._api.request("GET", f"{self._path}/{self._me.name}", timeout_s=REQUEST_TIMEOUT_S)
            holder = lease.get("spec", {}).get("holderIdentity")
            if holder != self._me.identity:
                raise _Lost(f"it is held by {holder or 'nobody'}") from None
            self._version = lease["metadata"]["resourceVersion"]
            self._put(self._spec())
        return True

    def _begin_term(self, transitions: int) -> None:
        self._term = {"acquireTime": to_rfc3339(time.time()), "leaseTransitions": transitions}

    def _spec(self) -> Manifest:
        return {
            **self._term,
            "holderIdentity": self._me.identity,
            "leaseDurationSeconds": self._duration_s(),
            "renewTime": to_rfc3339(time.time()),
        }

    def _put(self, spec: Manifest) -> None:
        metadata = {"name": self._me.name, "namespace": self._me.namespace, "resourceVersion": self._version}
        path = f"{self._path}/{self._me.name}"
        timeout_s = max(REQUEST_TIMEOUT_S, self._duration_s() / 2)
        answer = self._api.request("PUT", path, _lease(metadata, spec), timeout_s=timeout_s)
        self._version = answer["metadata"]["resourceVersion"]


class _Lost(Exception):
    """The lease is not this replica's any more."""


def _lease(metadata: Manifest, spec: Manifest) -> Manifest:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


LEADER_LABEL = "elasticctl.dev/leader"
LABEL_RETRY_S = 1.0


class LeaderLabel:
    """Moves the leader's label to the pod `pod` in `namespace`."""

    def __init__(self, api: LimitedApi, namespace: str, pod: str) -> None:
        self._api, self._namespace, self._pod = api, namespace, pod

    async def claim(self) -> None:
        """Label the pod and unlabel all others, which the last leader may not have done; retry until it succeeds."""
        while True:
            try:
                await asyncio.to_thread(self._move)
            except ElasticctlError as e:
                log.warning("the rendezvous Service cannot find this pod yet: %s", e)
                await asyncio.sleep(LABEL_RETRY_S)
            else:
                return

    def remove(self) -> None:
        """Unlabel this pod; a failure is only logged, because the next leader does it too."""
        try:
            self._set(self._pod, None)
        except ElasticctlError as e:
            log.warning("could not remove the leader's label: %s", e)

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
