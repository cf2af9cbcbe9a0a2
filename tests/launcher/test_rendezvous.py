"""Joining a group: unlimited waits, refusals, and a rank 0 that is lost before its store is reached."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from elasticctl_launcher import rendezvous
from elasticctl_launcher.rendezvous import GroupFinished, ServiceRendezvous, WorkerIdentity, WorkerRemoved
from elasticctl_launcher.service import client as service_client
from elasticctl_launcher.service.client import ServiceAway, ServiceRefused
from tests.support.interrupting import Interrupted, interrupt_soon
from tests.support.waiting import wait_until

ME = WorkerIdentity("uid-a-1", "a-1", "127.0.0.1", 1)
GONE, UNKNOWN, WRONG = (
    ServiceRefused(410, "no running job"),
    ServiceRefused(409, "not one of"),
    ServiceRefused(401, "no"),
)


class Service:
    """Answers `join` with the next of `answers`, repeating the last one, and `watch` with "current" until `stale`."""

    namespace, job = "default", "job"

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.stale = threading.Event()

    def call(self, verb: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        if verb == "watch":
            return {"state": "stale", "reason": "lost a-0"} if self.stale.wait(10) else {"state": "current"}
        self.bodies.append(dict(body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.stale.set()


def formed(generation: int, port: int = 1, *, alone: bool = True) -> dict[str, Any]:
    """A generation of this worker, alone or with a-0, whose store is at `port`."""
    me = {"uid": ME.uid, "name": ME.name, "host": ME.host, "port": 1, "slots": 1}
    first = {"uid": "uid-a-0", "name": "a-0", "host": "127.0.0.1", "port": port, "slots": 1}
    return {"state": "formed", "generation": generation, "members": [me] if alone else [first, me]}


def handler(service: Service, join_timeout_s: float = 0.0) -> ServiceRendezvous:
    return ServiceRendezvous(service, ME, join_timeout_s)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_client, "RETRY_MAX_S", 0.05)


def test_the_launcher_waits_for_a_service_that_is_away() -> None:
    away: list[dict[str, Any] | Exception] = [ServiceAway("away")] * 30
    joined = handler(Service(*away, formed(1)))
    assert joined.next_rendezvous().rank == 0
    assert joined.generation == 1
    joined.shutdown()


def test_sigterm_ends_the_wait_for_capacity() -> None:
    waiting = handler(Service(ServiceAway("away")))
    with interrupt_soon(1.0), pytest.raises(Interrupted):
        waiting.next_rendezvous()


def test_the_join_timeout_is_sent_to_the_service() -> None:
    service = Service({"state": "waiting"})
    with pytest.raises(RendezvousTimeoutError, match="within 1 s"):
        handler(service, 1.0).next_rendezvous()
    asked = [body["within_s"] for body in service.bodies]
    assert 0 < asked[-1] < asked[0] <= 1.0
    joined = handler(Service(formed(1)))
    joined.next_rendezvous()
    joined.shutdown()


def test_a_finished_group_is_not_joined() -> None:
    with pytest.raises(GroupFinished):
        handler(Service({"state": "waiting"}, {"state": "over"})).next_rendezvous()


@pytest.mark.parametrize(
    "answers", [(GONE,), ({"state": "waiting"}, UNKNOWN)], ids=["the job is over", "no longer a worker"]
)
def test_a_worker_that_is_no_longer_part_of_the_job_ends(
    answers: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "UNKNOWN_JOB_S", 0.5)
    with pytest.raises(WorkerRemoved):
        handler(Service(*answers)).next_rendezvous()


def test_a_worker_that_the_service_does_not_know_yet_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "UNKNOWN_JOB_S", 0.1)
    joined = handler(Service(*[UNKNOWN] * 30, formed(1)))
    joined.next_rendezvous()
    assert joined.generation == 1
    joined.shutdown()


def test_a_wrong_token_is_an_error() -> None:
    with pytest.raises(RendezvousClosedError, match="401"):
        handler(Service(WRONG)).next_rendezvous()


def test_the_others_rejoin_if_rank_0_is_lost_before_its_store_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        service = Service(formed(1, silent.getsockname()[1], alone=False), formed(2))
        joined = handler(service)
        threading.Timer(0.5, service.stale.set).start()
        info = joined.next_rendezvous()
    assert (info.rank, info.world_size, joined.generation) == (0, 1, 2)
    assert [body["generation"] for body in service.bodies] == [0, 1]
    joined.shutdown()


def test_many_generations_leak_no_descriptors() -> None:
    """Every other generation has this worker only, with its own store; the others have their store in a peer."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = int(reserved.getsockname()[1])
    peer = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    joined = handler(Service(*(formed(n, port, alone=n % 2 == 0) for n in range(1, 21))))
    for generation in range(1, 21):
        joined.next_rendezvous()
        assert joined.generation == generation
        if generation == 2:
            before = len(os.listdir("/proc/self/fd"))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    joined.shutdown()
    assert peer.num_keys() >= 0
