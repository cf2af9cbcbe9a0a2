"""A replica of the controller, against the fake API server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.support.control import ControlApi
from tests.support.ports import free_port

MAIN = """
import sys
from elasticctl_controller.kube import election, manager
election.DURATION_S = election.LONGEST_S = 600.0
sys.exit(manager.main())
"""
"""The controller, whose lease a machine that is busy does not cost."""


class Replica:
    """One controller process, which is ended at the latest with the `with` block. Those of one folder share a key.

    It reaches the API server at `url`, by default directly. `patient`: its lease lasts for minutes.
    """

    def __init__(
        self,
        api: ControlApi,
        folder: Path,
        name: str,
        *flags: str,
        rendezvous_port: int | None = None,
        url: str = "",
        patient: bool = True,
    ) -> None:
        self.metrics_port, self.health_port = free_port(), free_port()
        self.rendezvous_port = free_port() if rendezvous_port is None else rendezvous_port
        self.log = folder / f"{name}.log"
        config = {
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": url or api.url}}],
            "users": [{"name": "c", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        (folder / "key").write_text("ab" * 32)
        program = ["-c", MAIN] if patient else ["-m", "elasticctl_controller.kube.manager"]
        argv = [sys.executable, "-W", "error", *program, "--bind", "127.0.0.1"]
        argv += ["--rendezvous-url", "http://rendezvous:7777", "--token-key-file", str(folder / "key")]
        argv += ["--rendezvous-port", str(self.rendezvous_port), "--metrics-port", str(self.metrics_port)]
        argv += ["--health-port", str(self.health_port), "--leader-election-namespace", "system", *flags]
        environ = os.environ | {"KUBECONFIG": str(folder / "kubeconfig")}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(argv, env=environ, stderr=output)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)

    def get(self, port: int, path: str) -> tuple[int, str]:
        """The status and the text of a page; (0, "") when there is no answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()
        except OSError:
            return 0, ""

    def ready(self) -> bool:
        return self.get(self.health_port, "/readyz")[0] == 200

    def leads(self) -> bool:
        return "\nelasticctl_leader 1.0\n" in self.get(self.metrics_port, "/metrics")[1]

    def meets(self) -> bool:
        """True when the rendezvous port is open."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.rendezvous_port), 60):
            return True
        return False

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait()
