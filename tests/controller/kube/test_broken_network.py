"""The controller's process whose network to the API server breaks, while real launchers train: it deletes no worker."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elasticctl_controller.core.group.worker_tokens import derive_token
from elasticctl_controller.kube.manager import read_key
from tests.support.broken_network import BrokenNetwork
from tests.support.control import ControlApi
from tests.support.controller.replica import Replica
from tests.support.controller.shared_nodes import add_node, jobs, pods, run_pods
from tests.support.jobs import shell_job
from tests.support.launcher_lab import Lab
from tests.support.waiting import wait_until

WORKERS = ("job-worker-0", "job-worker-1")
PATIENCE_S = 240.0


def start_launchers(lab: Lab, control: ControlApi, key: bytes, port: int) -> None:
    """Do for the job's pods what kubelets do."""
    token = derive_token(key, control.objects[f"{jobs('default')}/job"]["metadata"]["uid"], 1)
    (lab.folder / "derived").write_text(token)
    place = {
        "ELASTICCTL_RDZV_ENDPOINT": f"http://127.0.0.1:{port}",
        "ELASTICCTL_RDZV_TOKEN_FILE": str(lab.folder / "derived"),
    }
    for name in WORKERS:
        uid = control.objects[f"{pods('default')}/{name}"]["metadata"]["uid"]
        lab.start_script(name, COUPLED="1", ELASTICCTL_POD_UID=uid, **place)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "outage_s"), [("reset", 4.0), ("swallow", 12.0)])
def test_an_api_server_that_cannot_be_reached_costs_no_worker(
    control: ControlApi, lab: Lab, network: BrokenNetwork, tmp_path: Path, how: str, outage_s: float
) -> None:
    """The leader is silent until it is answered, and continues to lead; a replica that starts in the meantime does not
    take over."""

    def status() -> dict[str, Any]:
        found: dict[str, Any] = control.objects[f"{jobs('default')}/job"].get("status", {})
        return found

    def step() -> int:
        return int(status().get("progress", {}).get("step") or 0)

    link = network.link("api", control.url.removeprefix("http://"))
    url = f"http://{link.address}"
    add_node(control, "node", 8)
    with ExitStack() as stack:
        first = stack.enter_context(Replica(control, tmp_path, "first", url=url, patient=False))
        wait_until(first.meets, PATIENCE_S)
        control.put(f"{jobs('default')}/job", shell_job("job", "true", 2, minReplicas=1))
        wait_until(lambda: tuple(control.names(pods("default"))) == WORKERS, PATIENCE_S)
        run_pods(control, "default", "node")
        start_launchers(lab, control, read_key(tmp_path / "key"), first.rendezvous_port)
        wait_until(lambda: step() > 3, PATIENCE_S)
        before = {name: control.objects[f"{pods('default')}/{name}"]["metadata"]["uid"] for name in WORKERS}

        getattr(link, how)()
        second = stack.enter_context(
            Replica(control, tmp_path, "second", url=url, patient=False)
        )  # before it can list anything
        time.sleep(outage_s)
        made = step()
        link.repair()

        wait_until(lambda: step() > made + 20, PATIENCE_S)
        assert [each.process.poll() for each in (first, second)] == [None, None], first.log.read_text()
        assert not second.meets()
        assert status()["generation"] == 1
        assert (status().get("failures", 0), status().get("restarts", {})) == (0, {})
        assert control.asked("DELETE", "/pods/") == 0
        after = {name: control.objects[f"{pods('default')}/{name}"]["metadata"]["uid"] for name in WORKERS}
        assert after == before
        assert all(lab.output(name).count("generation 1 pid") == 1 for name in WORKERS)
        (lab.folder / "done").touch()
        assert [lab.wait(name) for name in WORKERS] == [0, 0]
