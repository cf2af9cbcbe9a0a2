"""The cluster that $KUBECONFIG points at, with the CRD on it and two replicas of the controller next to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from elasticctl.kubeapi.connection import Connection
from tests.on_cluster.commands import LAB_HOME, elasticctl, kubectl, lab, need_lab
from tests.on_cluster.patient import PatientConnection
from tests.on_cluster.replicas import Replicas, prepare
from tests.on_cluster.waiting import wait_until

R = TypeVar("R", bound=Replicas)
CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"


WITH_IMAGES = ("test_dashboard.py", "test_install.py", "test_rights.py")
"""They come last: .ci/cluster builds the images of what is installed while the others run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a cluster, and some minutes."""
    here = f"{Path(__file__).parent}{os.sep}"
    own = [item for item in items if str(item.path).startswith(here)]
    for item in own:
        item.add_marker(pytest.mark.cluster)
        item.add_marker(pytest.mark.timeout(1800))
    if len(own) == len(items):
        items.sort(key=lambda item: item.path.name in WITH_IMAGES)


@pytest.fixture(scope="session")
def api() -> Connection:
    """The cluster; the tests are skipped where there is none."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("$KUBECONFIG is not set")
    return PatientConnection()


@pytest.fixture(scope="session")
def crd(api: Connection) -> None:
    """Have the CRDs and the controller's namespace on the cluster."""
    prepare(api)


@pytest.fixture
def cli_home(api: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own for the command line, in which the cluster is the context in use."""
    monkeypatch.setenv("ELASTICCTL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ELASTICCTL_CONTEXT", raising=False)
    context = kubectl("config", "current-context").strip()
    assert elasticctl("config", "import", context).code == 0
    assert elasticctl("config", "use-context", context).code == 0


@pytest.fixture(scope="module")
def replicas(crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two replicas of the controller."""
    with stopping(Replicas(tmp_path_factory.mktemp("controllers"))) as found:
        found.start()
        found.start()
        found.leader()
        yield found


@pytest.fixture(scope="module")
def karpenter(api: Connection) -> Iterator[None]:
    """Karpenter, which is gone afterwards with its definitions and all nodes that it has brought."""
    need_lab()
    lab("karpenter")
    try:
        yield
    finally:
        kubectl("delete", "nodepools,nodeclaims", "--all", "--wait=false")
        wait_until(lambda: not api.request("GET", CLAIMS)["items"], every_s=0.5)
        os.kill(int((LAB_HOME / "pid" / "karpenter").read_text().split()[0]), signal.SIGTERM)
        definitions = [name for name in kubectl("get", "crd", "-o", "name").split() if "karpenter" in name]
        kubectl("delete", "--wait=false", *definitions)
        wait_until(lambda: "karpenter" not in kubectl("get", "crd", "-o", "name"), every_s=0.5)


@contextmanager
def stopping(replicas: R) -> Iterator[R]:
    """Stop them in the end, and print what they have logged: pytest shows it with a test that fails."""
    try:
        yield replicas
    finally:
        try:
            replicas.stop()
        finally:
            for replica in replicas.running:
                replica.process.kill()  # one that has not stopped would lead in the tests that follow
                replica.process.wait()
                print(f"--- {replica.log.name}", replica.log.read_text(), sep="\n")
