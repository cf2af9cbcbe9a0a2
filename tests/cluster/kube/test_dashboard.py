"""The dashboard of a Kubernetes context: its jobs are shown as they change, and can be changed."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from tests.support.cli import Run
from tests.support.dashboard.process import Dashboard, Guest
from tests.support.fakeapi import FakeApi
from tests.support.jobs import shell_job
from tests.support.kube import WriteKubeconfig


def test_jobs_of_a_cluster_are_shown_and_changed(
    run: Run, private_home: Path, kubeconfig: WriteKubeconfig, api: FakeApi, tmp_path: Path
) -> None:
    kubeconfig(api.url)
    run("config", "import")
    manifest = tmp_path / "job.json"
    manifest.write_text(json.dumps(shell_job("digits", "true", maxReplicas=4)))
    assert run("submit", "-f", str(manifest), "--context", "lab", "--detach").code == 0
    dashboard = Dashboard("--context", "lab")
    try:
        guest = Guest(dashboard.link())
        events = guest.events()
        hello = next(data for name, data in events if name == "hello")
        assert hello["context"] == "lab"
        (row,) = next(data for name, data in events if name == "jobs")["rows"]
        assert (row["name"], row["desired"]) == ("digits", 1)
        guest.change("jobs/default/digits/scale", {"uid": row["uid"], "workers": 3}, hello["token"])
        (row,) = next(data for name, data in events if name == "jobs")["rows"]
        assert row["desired"] == 3
        assert any(request.method == "PATCH" and request.path.endswith("/digits") for request in api.requests)
    finally:
        code, said = dashboard.end()
    assert (code, "Traceback" in said) == (0, False)


def test_a_cluster_that_does_not_answer_holds_up_no_end(
    run: Run, private_home: Path, kubeconfig: WriteKubeconfig
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # accepts as a stopped process does: nobody answers
        kubeconfig(f"https://127.0.0.1:{stopped.getsockname()[1]}")
        run("config", "import")
        dashboard = Dashboard("--context", "lab")
        try:
            guest = Guest(dashboard.link())
            assert next(guest.events())[0] == "hello"
            asked, _ = stopped.accept()  # a question is under way
        finally:
            began = time.monotonic()
            code, said = dashboard.end()
        asked.close()
    assert time.monotonic() - began < 20
    assert (code, "Traceback" in said) == (0, False)
