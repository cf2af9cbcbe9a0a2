"""The dashboard of a Kubernetes context whose cluster does not answer; what it shows of one is in tests/dashboard."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.support.cli import Run
from tests.support.dashboard.process import Dashboard, Guest
from tests.support.kube import WriteKubeconfig


def test_a_silent_cluster_does_not_delay_the_end(run: Run, private_home: Path, kubeconfig: WriteKubeconfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # accepts as a stopped process does, and never answers
        kubeconfig(f"https://127.0.0.1:{stopped.getsockname()[1]}")
        run("config", "import")
        dashboard = Dashboard("--context", "lab")
        try:
            guest = Guest(dashboard.link())
            assert next(guest.events())[0] == "hello"
            asked, _ = stopped.accept()  # a question is under way, and stays so
        finally:
            code, said = dashboard.end()
        asked.close()
    assert (code, "Traceback" in said) == (0, False)
