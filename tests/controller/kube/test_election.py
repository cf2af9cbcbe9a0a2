"""Who leads: one at most, soon another, and never who cannot be sure. In virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from elasticctl.api.errors import ConflictError, NotFoundError, UnreachableError
from elasticctl_controller.kube.election import DURATION_S, RENEW_S, RETRY_S, WATCH_S, Election, LeaseCandidate


class Clock:
    """Time that passes in `run` alone. The threads of elections sleep in it, and one of them runs at a time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.replicas: list[Replica] = []
        self._due: dict[Replica, float] = {}
        self._ended: set[Replica] = set()
        self._changed = threading.Condition()

    def run(self, seconds: float) -> None:
        """Let time pass; at no moment does more than one replica hold the lease."""
        until = self.now + seconds
        while self._due and min(self._due.values()) <= until:
            replica = min(self._due, key=lambda one: self._due[one])
            self.now = max(self.now, self._due[replica])
            self.wake(replica)
        self.now = until
        self._check()

    def run_until(self, condition: Callable[[], object], within_s: float) -> None:
        ends = self.now + within_s
        while not condition():
            assert self.now < ends, f"not within {within_s} s"
            self.run(0.05)

    def sleep(self, replica: Replica, seconds: float) -> None:
        """Let the others run until so much time has passed; called on the replica's thread."""
        with self._changed:
            self._due[replica] = self.now + seconds
            self._changed.notify_all()
            self._changed.wait_for(lambda: replica not in self._due)

    def wake(self, replica: Replica) -> None:
        """Let a replica run until it sleeps again or has ended."""
        with self._changed:
            self._due.pop(replica, None)
            self._changed.notify_all()
            self._changed.wait_for(lambda: replica in self._due or replica in self._ended)
        self._check()

    def end(self, replica: Replica) -> None:
        with self._changed:
            self._ended.add(replica)
            self._changed.notify_all()

    def _check(self) -> None:
        assert sum(one.election.holds() for one in self.replicas) <= 1


class LeaseServer:
    """One Lease in memory, with the API server's rules; `away` makes it unreachable for those identities."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.away: set[str] = set()
        self.lose_answers = 0
        self.takes_s = 0.0
        self.cut_off_shorter = False

    def request(self, replica: Replica, method: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        if self.takes_s:
            self.clock.sleep(replica, self.takes_s)
        if replica.name in self.away:
            raise UnreachableError("no answer")
        if method == "GET":
            if self.lease is None:
                raise NotFoundError("no lease")
            return self.lease
        assert body is not None
        expected = body["metadata"].get("resourceVersion")
        if method == "PUT" and self.lease is None:
            raise NotFoundError("no lease")
        if (method == "POST") != (self.lease is None) or (method == "PUT" and expected != str(self.version)):
            raise ConflictError("the lease has changed")
        self.version += 1
        before_s = self.duration_s
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        if self.cut_off_shorter and self.duration_s < before_s:
            self.cut_off_shorter = False
            self.away.add(replica.name)
            raise UnreachableError("the answer was lost, and the next ones are")
        if self.lose_answers:
            self.lose_answers -= 1
            raise UnreachableError("the answer was lost")
        return self.lease

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = (self.lease or {}).get("spec", {})
        return found

    @property
    def duration_s(self) -> int:
        return int(self.spec.get("leaseDurationSeconds", 0))


class Replica:
    """A candidate, and what was reported to it. It stands in for the event that its election waits for, too."""

    def __init__(self, server: LeaseServer, name: str) -> None:
        self.name, self._server, self._clock = name, server, server.clock
        self.elected, self.lost, self.answers = False, False, 0
        self.regained: list[float] = []
        self._stops = False
        self.election = Election(
            self,
            LeaseCandidate("system", "controller", name),
            lambda: setattr(self, "elected", True),
            lambda: setattr(self, "lost", True),
            lambda: self._clock.now,
            on_answer=self._answered,
            on_regained=self.regained.append,
        )
        self.election._stopping = self  # type: ignore[assignment]
        self.election._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.election._run_election()
        finally:
            self._clock.end(self)

    def _answered(self) -> None:
        self.answers += 1

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 3.0
    ) -> dict[str, Any]:
        assert path.startswith("/apis/coordination.k8s.io/v1/namespaces/system/leases")
        return self._server.request(self, method, body)

    def is_set(self) -> bool:
        return self._stops

    def set(self) -> None:
        self._stops = True
        self._clock.wake(self)

    def wait(self, seconds: float) -> None:
        if not self._stops:
            self._clock.sleep(self, seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> LeaseServer:
    return LeaseServer(clock)


Start = Callable[[str], Replica]


@pytest.fixture
def start(server: LeaseServer, clock: Clock) -> Iterator[Start]:
    def make(name: str) -> Replica:
        replica = Replica(server, name)
        clock.replicas.append(replica)
        replica.election.start()
        clock.wake(replica)
        return replica

    yield make
    server.takes_s = 0.0
    for replica in clock.replicas:
        replica.election.stop()


def test_the_first_leads_and_the_second_waits(start: Start, server: LeaseServer, clock: Clock) -> None:
    first, second = start("first"), start("second")
    assert first.elected
    clock.run(60)
    assert (server.spec["holderIdentity"], first.election.holds(), second.elected) == ("first", True, False)


def test_a_released_lease_is_taken_immediately(start: Start, server: LeaseServer, clock: Clock) -> None:
    first, second = start("first"), start("second")
    clock.run(10)
    first.election.stop()
    assert not first.election.holds()
    clock.run(WATCH_S)
    assert second.elected
    assert server.spec["leaseTransitions"] == 1
    acquired, version = server.spec["acquireTime"], server.version
    clock.run(4 * RENEW_S)
    assert server.version > version + 2
    assert (server.spec["leaseTransitions"], server.spec["acquireTime"]) == (1, acquired), "renewals keep them"
    third = start("third")
    second.election.stop()
    clock.run(WATCH_S)
    assert (third.elected, server.spec["leaseTransitions"]) == (True, 2)


def test_a_leader_that_cannot_renew_stops_before_another_starts(
    start: Start, server: LeaseServer, clock: Clock
) -> None:
    first, second = start("first"), start("second")
    clock.run(10)
    server.away.add("first")
    clock.run_until(lambda: not first.election.holds(), DURATION_S)
    assert not second.elected
    clock.run_until(lambda: second.elected, DURATION_S)
    assert not first.lost  # it cannot know
    server.away.clear()
    clock.run(RETRY_S)
    assert first.lost
    assert (server.spec["holderIdentity"], first.regained) == ("second", [])


def test_no_replica_loses_the_lease_while_the_server_does_not_answer(
    start: Start, server: LeaseServer, clock: Clock
) -> None:
    first, second = start("first"), start("second")
    clock.run(10)
    server.away |= {"first", "second"}
    clock.run(60)
    assert (first.election.holds(), second.elected) == (False, False)
    server.away.discard("second")
    clock.run(DURATION_S - 1)
    assert not second.elected, "who hears from the server first is not the next to lead"
    server.away.clear()
    clock.run(RETRY_S)
    assert first.election.holds()
    assert len(first.regained) == 1
    assert 50 < first.regained[0] < 70
    clock.run(60)
    assert (second.elected, first.lost) == (False, False)


def test_the_lease_lasts_longer_while_renewals_take_long(start: Start, server: LeaseServer, clock: Clock) -> None:
    first, second = start("first"), start("second")
    clock.run(10)
    assert server.duration_s == 4
    server.takes_s = 2.0
    clock.run_until(lambda: server.duration_s == 10, 10)
    clock.run(60)
    server.takes_s = 0.0
    clock.run_until(lambda: server.duration_s == 4, 120)
    assert (first.election.holds(), first.lost, second.elected) == (True, False, False)


def test_a_shorter_lease_counts_even_if_its_answer_is_lost(start: Start, server: LeaseServer, clock: Clock) -> None:
    first, second = start("first"), start("second")
    server.takes_s = 2.0
    clock.run_until(lambda: server.duration_s == 10, 20)
    server.cut_off_shorter = True
    server.takes_s = 0.0
    clock.run_until(lambda: "first" in server.away, 20)
    clock.run_until(lambda: not first.election.holds(), 20)
    assert not second.elected
    clock.run_until(lambda: second.elected, 20)


def test_a_deleted_lease_is_lost(start: Start, server: LeaseServer, clock: Clock) -> None:
    first = start("first")
    server.lease = None
    clock.run(RENEW_S)
    assert (first.lost, first.election.holds()) == (True, False)


def test_a_lost_answer_is_not_a_lost_lease(start: Start, server: LeaseServer, clock: Clock) -> None:
    first = start("first")
    server.lose_answers, version = 1, server.version
    clock.run(5 * RENEW_S)
    assert server.version > version + 3
    assert (first.election.holds(), first.lost) == (True, False)


def test_a_lease_that_was_taken_away_is_noticed(start: Start, server: LeaseServer, clock: Clock) -> None:
    first = start("first")
    server.version += 1
    spec = {"holderIdentity": "other", "leaseDurationSeconds": 10}
    server.lease = {"metadata": {"resourceVersion": str(server.version)}, "spec": spec}
    clock.run(RENEW_S)
    assert (first.lost, first.election.holds(), server.spec["holderIdentity"]) == (True, False, "other")


def test_a_process_that_slept_does_not_hold_what_ran_out(start: Start, clock: Clock) -> None:
    first = start("first")
    assert first.election.holds()
    clock.now += 60
    assert not first.election.holds()  # asked before every write: no thread has to have noticed yet


def test_the_leader_and_the_others_report_each_answer(start: Start, server: LeaseServer, clock: Clock) -> None:
    first, second = start("first"), start("second")
    clock.run(5)
    assert first.answers > 3
    assert second.answers > 3
    server.away.add("second")
    heard = first.answers, second.answers
    clock.run(10)
    assert first.answers > heard[0]
    assert second.answers == heard[1]
