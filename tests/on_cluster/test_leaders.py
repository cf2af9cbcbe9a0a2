"""Only one of several controllers acts, whatever happens to it: shown by the requests to the API server."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from elasticctl.api.errors import NotFoundError
from elasticctl.kubeapi.connection import Connection, resource_path
from elasticctl_controller.kube.election import DURATION_S
from elasticctl_controller.kube.manager import EXIT_LEASE_LOST
from tests.on_cluster.conftest import stopping
from tests.on_cluster.images import ClusterOfImages
from tests.on_cluster.replicas import Replica, Replicas
from tests.on_cluster.trainer import NAMESPACE, Trainer
from tests.on_cluster.waiting import wait_until
from tests.on_cluster.witness import Witness, witnessing
from tests.support.jobs import FOREVER, shell_job

PORT = 17777


class Watched(Replicas):
    """Replicas that reach the API server through a door each; each has a rendezvous port of its own, for they share
    an address, and one that is stopped keeps its port."""

    def __init__(self, folder: Path, witness: Witness) -> None:
        super().__init__(folder)
        self._witness, self._ports = witness, iter(range(PORT, PORT + 100))
        self.doors: dict[int, str] = {}

    def add(self) -> Replica:
        """Start one more."""
        door = f"replica-{len(self.doors)}"
        replica = self.start(self._witness.door(door), next(self._ports))
        self.doors[replica.process.pid] = door
        return replica

    def next_leader(self, former: Replica) -> Replica:
        """Wait until another than `former` has acted; returns it."""
        others = [replica for replica in self.running if replica is not former]
        return wait_until(lambda: next((one for one in others if self._witness.acts_of(self.door_of(one))), None))

    def door_of(self, replica: Replica) -> str:
        """The door that it goes through."""
        return self.doors[replica.process.pid]


@pytest.fixture
def witness(api: Connection, tmp_path: Path) -> Iterator[Witness]:
    with witnessing(tmp_path) as found:
        yield found


@pytest.fixture
def replicas(crd: None, witness: Witness, tmp_path: Path) -> Iterator[Watched]:
    with stopping(Watched(tmp_path, witness)) as found:
        yield found


@pytest.fixture
def unrest(api: Connection) -> Iterator[None]:
    """A job of which a worker is lost again and again, so that there is always something to do."""
    job, over = Trainer(api, "unrest"), threading.Event()
    job.delete()
    script = shell_job(job.name, FOREVER, 3, minReplicas=1, grace_s=1)
    ClusterOfImages(api).create_job(script)

    def disturb() -> None:
        index = 0
        while not over.wait(0.5):
            name = f"{job.name}-worker-{(index := (index + 1) % 3)}"
            try:
                api.request("DELETE", resource_path("v1", NAMESPACE, "pods", name), {"gracePeriodSeconds": 0})
            except NotFoundError:
                continue  # it has not been created again yet

    thread = threading.Thread(target=disturb)
    thread.start()
    yield
    over.set()
    thread.join()
    job.api.request("DELETE", resource_path("elastic.pytorch.org/v1alpha1", NAMESPACE, "elasticjobs", job.name))


@pytest.mark.usefixtures("unrest")
def test_two_controllers_never_both_act(replicas: Watched, witness: Witness) -> None:
    first = replicas.add()
    wait_until(lambda: witness.acts_of(replicas.door_of(first)))
    replicas.add()

    # It sleeps for longer than its lease lasts, and wakes up when another leads.
    first.process.send_signal(signal.SIGSTOP)
    second = replicas.next_leader(first)
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(120) == EXIT_LEASE_LOST
    replicas.running.remove(first)

    # It is gone without a word.
    replicas.add()
    second.process.kill()
    second.process.wait()
    third = replicas.next_leader(second)
    replicas.running.remove(second)

    # It ends in order.
    replicas.add()
    third.process.terminate()
    assert third.process.wait(120) == 0
    replicas.running.remove(third)
    fourth = replicas.next_leader(third)
    acted = len(witness.acts_of(replicas.door_of(fourth)))
    wait_until(lambda: len(witness.acts_of(replicas.door_of(fourth))) > acted + 10)

    acts = [write for write in list(witness.writes) if write.acted]
    terms = [(door, list(writes)) for door, writes in groupby(acts, key=lambda write: write.replica)]
    order = [replicas.door_of(replica) for replica in (first, second, third, fourth)]
    assert [door for door, _ in terms] == order, [(door, writes[0], writes[-1]) for door, writes in terms]
    for (_, before), (_, after) in list(pairwise(terms))[:2]:
        # If a leader vanishes, the next one waits for as long as the former may have believed that it leads.
        assert after[0].at - before[-1].at > DURATION_S / 2
