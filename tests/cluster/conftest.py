"""The cluster that $KUBECONFIG points at, with the CRD on it and two replicas of the controller beside it.

The controllers run as processes of this machine, which pods reach at $ELASTICCTL_TEST_ADDRESS.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from elasticctl.cluster.kube.connection import Connection, connect
from elasticctl.errors import ConflictError, ElasticctlError, NotFoundError
from elasticctl.quota import PLURAL as QUOTAS
from elasticctl.spec import API_VERSION, PLURAL
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
ADDRESS = os.environ.get("ELASTICCTL_TEST_ADDRESS", "10.88.0.1")
SYSTEM = "elasticctl-system"
RENDEZVOUS_PORT = 7777


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a cluster, and some minutes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(400))


@dataclass(slots=True)
class Replica:
    """A controller's process."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def leads(self) -> bool:
        """True for the one that acts."""
        with suppress(OSError), urllib.request.urlopen(f"http://{ADDRESS}:{self.port}/metrics", timeout=2) as page:
            return b"\nelasticctl_leader 1\n" in page.read()
        return False


class Replicas:
    """The controllers; `start` adds one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, 0
        self.running: list[Replica] = []
        (folder / "key").write_text(secrets.token_hex(32))

    def start(self) -> Replica:
        """Start one more."""
        self._made += 1
        port, log = 18080 + 2 * self._made, self._folder / f"controller-{self._made}.log"
        argv = [sys.executable, "-m", "elasticctl_controller.manager", "--bind", ADDRESS]
        argv += ["--rendezvous-url", f"http://{ADDRESS}:{RENDEZVOUS_PORT}", "--rendezvous-port", str(RENDEZVOUS_PORT)]
        argv += ["--metrics-port", str(port), "--health-port", str(port + 1)]
        argv += ["--token-key-file", str(self._folder / "key"), "--leader-election-namespace", SYSTEM]
        with log.open("wb") as output:
            replica = Replica(subprocess.Popen(argv, stderr=output), port, log)
        self.running.append(replica)
        return replica

    def leader(self) -> Replica:
        """The one that acts, once there is one."""
        return wait_until(lambda: next((replica for replica in self.running if replica.leads()), None), 40)

    def stop(self) -> None:
        """End them all, in order; each has to go quietly."""
        for replica in self.running:
            replica.process.send_signal(signal.SIGTERM)
        codes = [replica.process.wait(30) for replica in self.running]
        for replica in self.running:
            print(f"--- {replica.log.name}", replica.log.read_text(), sep="\n")
        assert codes == [0] * len(codes)
        assert not any("Traceback" in replica.log.read_text() for replica in self.running)


@pytest.fixture(scope="session")
def api() -> Connection:
    """The cluster; the tests are skipped where there is none."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("$KUBECONFIG is not set")
    return connect()


@pytest.fixture(scope="session")
def crd(api: Connection) -> None:
    """Have the CRDs and the controller's namespace on the cluster."""
    folder = ROOT / "controller/elasticctl_controller/deploy"
    crds = [yaml.safe_load((folder / name).read_text()) for name in ("crd.yaml", "quota.yaml")]
    namespace = {"metadata": {"name": SYSTEM}}
    for path, item in (
        *(("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd) for crd in crds),
        ("/api/v1/namespaces", namespace),
    ):
        with suppress(ConflictError):
            api.request("POST", path, item)

    def served() -> bool:
        with suppress(ElasticctlError):
            for plural in (PLURAL, QUOTAS):
                api.request("GET", f"/apis/{API_VERSION}/{plural}")
            return True
        return False

    wait_until(served, 30)


@pytest.fixture(scope="module")
def replicas(crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two replicas of the controller."""
    found = Replicas(tmp_path_factory.mktemp("controllers"))
    try:
        found.start()
        found.start()
        found.leader()
        yield found
    finally:
        found.stop()
