"""Run controllers as processes of this machine, which work on the cluster of $KUBECONFIG.

Pods reach them at $ELASTICCTL_TEST_ADDRESS.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from elasticctl.api.errors import ConflictError, ElasticctlError
from elasticctl.api.quota import PLURAL as QUOTAS
from elasticctl.api.spec import API_VERSION, PLURAL
from elasticctl.kubeapi.connection import Connection
from tests.on_cluster.waiting import wait_until

ADDRESS = os.environ.get("ELASTICCTL_TEST_ADDRESS", "10.88.0.1")
SYSTEM = "elasticctl-system"
RENDEZVOUS_PORT = 7777
ELECTED_S = 120.0
"""Longer than a lease lasts, and than a start takes on a busy machine."""
SERVED_S = 120.0


def prepare(api: Connection) -> None:
    """Create on the cluster what controllers need: the CRDs, until they are served, and their namespace."""
    folder = resources.files("elasticctl_controller") / "deploy"
    crds = [yaml.safe_load((folder / name).read_text()) for name in ("crd.yaml", "quota.yaml")]
    todo = [("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd) for crd in crds]
    for path, item in [*todo, ("/api/v1/namespaces", {"metadata": {"name": SYSTEM}})]:
        with suppress(ConflictError):
            api.request("POST", path, item)
    wait_until(lambda: _serves(api), SERVED_S)


def _serves(api: Connection) -> bool:
    with suppress(ElasticctlError):
        for plural in (PLURAL, QUOTAS):
            api.request("GET", f"/apis/{API_VERSION}/{plural}")
        return True
    return False


@dataclass(slots=True)
class Replica:
    """A controller's process."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def metrics(self) -> str:
        """Return what Prometheus would read; empty if there is no answer."""
        with suppress(OSError), urllib.request.urlopen(f"http://{ADDRESS}:{self.port}/metrics", timeout=2) as page:
            return str(page.read().decode())
        return ""

    def leads(self) -> bool:
        """Return whether it is the leader."""
        return "\nelasticctl_leader 1.0\n" in self.metrics()


class Replicas:
    """The controllers; `start` adds one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, 0
        self.running: list[Replica] = []
        (folder / "key").write_text(secrets.token_hex(32))

    def start(
        self,
        kubeconfig: str = "",
        rendezvous_port: int = RENDEZVOUS_PORT,
        flags: Sequence[str] = (),
        code: Path | None = None,
    ) -> Replica:
        """Start one more controller.

        `kubeconfig` is its own way to the API server, `flags` are further options, `code` is the checkout whose
        controller it is; by default those of this process.
        """
        self._made += 1
        port, log = 18080 + 2 * self._made, self._folder / f"controller-{self._made}.log"
        argv = [sys.executable, "-m", "elasticctl_controller.kube.manager", "--bind", ADDRESS]
        argv += ["--rendezvous-url", f"http://{ADDRESS}:{RENDEZVOUS_PORT}", "--rendezvous-port", str(rendezvous_port)]
        argv += ["--metrics-port", str(port), "--health-port", str(port + 1)]
        argv += ["--token-key-file", str(self._folder / "key"), "--leader-election-namespace", SYSTEM, *flags]
        environ = {**os.environ, **({"KUBECONFIG": kubeconfig} if kubeconfig else {})}
        if code is not None:
            environ["PYTHONPATH"] = os.pathsep.join(str(code / part) for part in ("", "controller", "training_lib"))
            environ["PYTHONSAFEPATH"] = "1"  # otherwise the current folder comes first on the path
        with log.open("wb") as output:
            replica = Replica(subprocess.Popen(argv, stderr=output, env=environ), port, log)
        self.running.append(replica)
        return replica

    def leader(self) -> Replica:
        """Return the leader, once there is one."""
        return wait_until(self._find_leader, ELECTED_S)

    def _find_leader(self) -> Replica | None:
        return next((replica for replica in self.running if replica.leads()), None)

    def stop(self) -> None:
        """Stop all of them in an orderly way. Raises RuntimeError if one of them does not exit cleanly."""
        for replica in self.running:
            replica.process.send_signal(signal.SIGTERM)
        codes = [replica.process.wait(120) for replica in self.running]
        if any(codes) or any("Traceback" in replica.log.read_text() for replica in self.running):
            raise RuntimeError(f"the controllers ended with {codes}, or with tracebacks in their logs")
