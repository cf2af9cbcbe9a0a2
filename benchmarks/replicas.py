"""Controllers as processes of this machine, which work on the cluster that $KUBECONFIG points at; for tests too.

Pods reach them at $ELASTICCTL_TEST_ADDRESS.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ADDRESS = os.environ.get("ELASTICCTL_TEST_ADDRESS", "10.88.0.1")
SYSTEM = "elasticctl-system"
RENDEZVOUS_PORT = 7777
ELECTED_S = 40.0
"""Longer than a lease lasts, and than a start takes on a busy machine."""


@dataclass(slots=True)
class Replica:
    """A controller's process."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def metrics(self) -> str:
        """What Prometheus would read; empty while nobody answers."""
        with suppress(OSError), urllib.request.urlopen(f"http://{ADDRESS}:{self.port}/metrics", timeout=2) as page:
            return str(page.read().decode())
        return ""

    def leads(self) -> bool:
        """True for the one that acts."""
        return "\nelasticctl_leader 1\n" in self.metrics()


class Replicas:
    """The controllers; `start` adds one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, 0
        self.running: list[Replica] = []
        (folder / "key").write_text(secrets.token_hex(32))

    def start(self, kubeconfig: str = "", rendezvous_port: int = RENDEZVOUS_PORT, flags: Sequence[str] = ()) -> Replica:
        """Start one more; `kubeconfig` is its way to the API server, if not everybody's, `flags` more of its own."""
        self._made += 1
        port, log = 18080 + 2 * self._made, self._folder / f"controller-{self._made}.log"
        argv = [sys.executable, "-m", "elasticctl_controller.manager", "--bind", ADDRESS]
        argv += ["--rendezvous-url", f"http://{ADDRESS}:{RENDEZVOUS_PORT}", "--rendezvous-port", str(rendezvous_port)]
        argv += ["--metrics-port", str(port), "--health-port", str(port + 1)]
        argv += ["--token-key-file", str(self._folder / "key"), "--leader-election-namespace", SYSTEM, *flags]
        environ = {**os.environ, **({"KUBECONFIG": kubeconfig} if kubeconfig else {})}
        with log.open("wb") as output:
            replica = Replica(subprocess.Popen(argv, stderr=output, env=environ), port, log)
        self.running.append(replica)
        return replica

    def leader(self) -> Replica:
        """The one that acts, once there is one."""
        deadline = time.monotonic() + ELECTED_S
        while (found := next((replica for replica in self.running if replica.leads()), None)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"none of {len(self.running)} controllers leads after {ELECTED_S:.0f} s")
            time.sleep(0.02)
        return found

    def stop(self) -> None:
        """End them all, in order; RuntimeError when one has not gone quietly."""
        for replica in self.running:
            replica.process.send_signal(signal.SIGTERM)
        codes = [replica.process.wait(30) for replica in self.running]
        if any(codes) or any("Traceback" in replica.log.read_text() for replica in self.running):
            raise RuntimeError(f"the controllers ended with {codes}, or with tracebacks in their logs")
