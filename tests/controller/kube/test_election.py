"""Who leads: one at most, soon another, and never who cannot be sure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from elasticctl.api.errors import ConflictError, NotFoundError, UnreachableError
from elasticctl_controller.kube import election as module
from elasticctl_controller.kube.election import Election, LeaseCandidate
from tests.support.waiting import wait_until


class LeaseServer:
    """One Lease in memory, with the API server's rules; `away` makes it unreachable for those identities."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.away: set[str] = set()
        self.lose_answers = 0
        self.takes_s = 0.0
        self.cut_off_shorter = False
        self._lock = threading.Lock()

    def request(self, who: str, method: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        time.sleep(self.takes_s)
        with self._lock:
            if who in self.away:
                raise UnreachableError("nobody answers")
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
                self.away.add(who)
                raise UnreachableError("the answer was lost, and the next ones are")
            if self.lose_answers:
                self.lose_answers -= 1
                raise UnreachableError("the answer was lost")
            return self.lease

    @property
    def duration_s(self) -> int:
        return int((self.lease or {}).get("spec", {}).get("leaseDurationSeconds", 0))

    @property
    def holder(self) -> str:
        return str((self.lease or {}).get("spec", {}).get("holderIdentity", ""))


class Replica:
    """A candidate, and what it was told."""

    def __init__(self, server: LeaseServer, name: str) -> None:
        self.name, self._server = name, server
        self.elected, self.lost, self.answers = threading.Event(), threading.Event(), 0
        self.regained: list[float] = []
        self.election = Election(
            self,
            LeaseCandidate("system", "controller", name),
            self.elected.set,
            self.lost.set,
            on_answer=self._answered,
            on_regained=self.regained.append,
        )

    def _answered(self) -> None:
        self.answers += 1

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 3.0
    ) -> dict[str, Any]:
        assert path.startswith("/apis/coordination.k8s.io/v1/namespaces/system/leases")
        return self._server.request(self.name, method, body)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("RENEW_S", "LOOK_S", "RETRY_S"):
        monkeypatch.setattr(module, pause, 0.05)
    monkeypatch.setattr(module, "MARGIN_S", 0.5)
    monkeypatch.setattr(module, "DURATION_S", 1)
    monkeypatch.setattr(module, "LONGEST_S", 3)
    monkeypatch.setattr(module, "FADING", 0.5)


@pytest.fixture
def server() -> LeaseServer:
    return LeaseServer()


@pytest.fixture
def start(server: LeaseServer) -> Iterator[Callable[[str], Replica]]:
    replicas: list[Replica] = []

    def make(name: str) -> Replica:
        replica = Replica(server, name)
        replicas.append(replica)
        replica.election.start()
        return replica

    yield make
    for replica in replicas:
        replica.election.stop()


def test_the_first_leads_and_the_second_waits(start: Callable[[str], Replica], server: LeaseServer) -> None:
    first = start("first")
    assert first.elected.wait(5)
    second = start("second")
    assert not second.elected.wait(1.5)  # longer than a lease lasts: it is renewed
    assert (server.holder, first.election.holds(), second.election.holds()) == ("first", True, False)


def test_a_lease_that_is_given_up_is_taken_at_once(start: Callable[[str], Replica], server: LeaseServer) -> None:
    first = start("first")
    assert first.elected.wait(5)
    second = start("second")
    first.election.stop()
    assert second.elected.wait(0.8)
    assert not first.election.holds()
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1
    acquired, version = server.lease["spec"]["acquireTime"], server.version
    wait_until(lambda: server.version >= version + 3)
    spec = server.lease["spec"]
    assert (spec["leaseTransitions"], spec["acquireTime"]) == (1, acquired), "renewals keep them"
    assert start("third").name == "third"
    second.election.stop()
    wait_until(lambda: server.lease is not None and server.lease["spec"]["leaseTransitions"] == 2)


def test_who_cannot_renew_stops_before_another_starts(start: Callable[[str], Replica], server: LeaseServer) -> None:
    first = start("first")
    assert first.elected.wait(5)
    second = start("second")
    server.away.add("first")
    wait_until(lambda: second.election.holds() or not first.election.holds())
    assert not second.election.holds()
    assert second.elected.wait(5)
    assert not first.election.holds()
    assert not first.lost.is_set()  # it cannot know
    server.away.clear()
    assert first.lost.wait(5)
    assert (server.holder, first.regained) == ("second", [])


def test_a_server_that_answers_nobody_takes_the_lease_from_nobody(
    start: Callable[[str], Replica], server: LeaseServer
) -> None:
    first = start("first")
    assert first.elected.wait(5)
    second = start("second")
    wait_until(lambda: second.answers > 3)
    server.away |= {"first", "second"}
    wait_until(lambda: not first.election.holds())
    assert not second.elected.wait(1.2)  # longer than a lease lasts
    server.away.discard("second")  # who hears from the server first is not the next to lead
    assert not second.elected.wait(0.5)
    server.away.clear()
    wait_until(first.election.holds)
    assert len(first.regained) == 1
    assert 1.0 < first.regained[0] < 5.0
    assert not second.elected.wait(1.2)
    assert not first.lost.is_set()


def test_the_lease_lasts_longer_while_renewals_take_long(start: Callable[[str], Replica], server: LeaseServer) -> None:
    first = start("first")
    assert first.elected.wait(5)
    assert server.duration_s == 1
    server.takes_s = 0.5
    wait_until(lambda: server.duration_s == 2)
    second = start("second")
    assert not second.elected.wait(1.5)
    server.takes_s = 0.0
    wait_until(lambda: server.duration_s == 1)
    assert first.election.holds()
    assert not first.lost.is_set()


def test_a_shorter_lease_counts_even_if_its_answer_is_lost(
    start: Callable[[str], Replica], server: LeaseServer
) -> None:
    first = start("first")
    assert first.elected.wait(5)
    server.takes_s = 0.8
    wait_until(lambda: server.duration_s >= 3)
    second = start("second")
    server.cut_off_shorter = True
    server.takes_s = 0.0
    wait_until(lambda: "first" in server.away)
    wait_until(lambda: second.election.holds() or not first.election.holds())
    assert not second.election.holds()
    assert second.elected.wait(5)


def test_a_lease_that_was_deleted_is_nobodys(start: Callable[[str], Replica], server: LeaseServer) -> None:
    first = start("first")
    assert first.elected.wait(5)
    with server._lock:
        server.lease = None
    assert first.lost.wait(5)
    assert not first.election.holds()


def test_a_lost_answer_is_not_a_lost_lease(start: Callable[[str], Replica], server: LeaseServer) -> None:
    first = start("first")
    assert first.elected.wait(5)
    server.lose_answers = 1
    version = server.version
    wait_until(lambda: server.version > version + 3)
    assert first.election.holds()
    assert not first.lost.is_set()


def test_a_lease_that_was_taken_away_is_noticed(start: Callable[[str], Replica], server: LeaseServer) -> None:
    first = start("first")
    assert first.elected.wait(5)
    with server._lock:
        server.version += 1
        spec = {"holderIdentity": "somebody", "leaseDurationSeconds": 10}
        server.lease = {"metadata": {"resourceVersion": str(server.version)}, "spec": spec}
    assert first.lost.wait(5)
    assert not first.election.holds()
    assert server.holder == "somebody"


def test_a_process_that_slept_does_not_hold_what_ran_out(server: LeaseServer) -> None:
    now = [100.0]
    replica = Replica(server, "sleeper")
    replica.election = Election(
        replica,
        LeaseCandidate("system", "controller", "sleeper"),
        replica.elected.set,
        replica.lost.set,
        lambda: now[0],
    )
    replica.election.start()
    assert replica.elected.wait(5)
    server.away.add("sleeper")
    assert replica.election.holds()
    now[0] += 60
    assert not replica.election.holds()  # asked before every write: no thread has to have noticed yet
    replica.election.stop()


def test_the_leader_and_the_others_tell_of_each_answer(start: Callable[[str], Replica], server: LeaseServer) -> None:
    first = start("first")
    assert first.elected.wait(5)
    second = start("second")
    wait_until(lambda: first.answers > 3 and second.answers > 3)
    server.away.add("second")
    counted = server.version
    wait_until(lambda: server.version > counted + 1)  # whatever was under way has come to its end
    heard = second.answers
    wait_until(lambda: server.version > counted + 5)
    assert second.answers == heard
    assert first.answers > heard
