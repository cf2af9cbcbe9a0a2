"""`exec`, `shell`, `debug` and `port-forward`: which worker is meant, and what they do in a real one."""

from __future__ import annotations

import copy
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import typer

from elasticctl.api.errors import ConflictError, ElasticctlError, NotFoundError, UsageError
from elasticctl.api.spec import ElasticJob
from elasticctl.cli.verbs.find_out_what_is_wrong.port_forward import PortPair, port_pair
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.workers import WhichWorker, choose_running
from tests.support.cli import Run, Spawn, Start
from tests.support.cluster_contract import running
from tests.support.jobs import FOREVER, shell_job
from tests.support.waiting import wait_until

LAUNCH = ["elasticctl-launch", "--nproc-per-node", "2", "--"]
JOB: dict[str, Any] = {
    "metadata": {"name": "digits"},
    "spec": {"replicaSpecs": {"Worker": {"replicas": 3, "template": {"spec": {"containers": [{"command": LAUNCH}]}}}}},
    "status": {"phase": "Running", "generations": [{"workers": ["digits-worker-2", "digits-worker-0"]}]},
}


def pods(*indices: int) -> list[Manifest]:
    return [{"metadata": {"name": f"digits-worker-{index}"}, "status": {"phase": "Running"}} for index in indices]


@pytest.mark.parametrize(
    ("worker", "rank", "chosen"),
    [("", None, 2), ("0", None, 0), ("digits-worker-1", None, 1), ("", 1, 2), ("", 2, 0)],
)
def test_the_worker_that_is_meant(worker: str, rank: int | None, chosen: int) -> None:
    found = choose_running(ElasticJob.from_manifest(JOB), pods(0, 1, 2), WhichWorker(worker, rank))
    assert found["metadata"]["name"] == f"digits-worker-{chosen}"


def test_without_a_group_it_is_the_first_that_runs() -> None:
    job = copy.deepcopy(JOB)
    job["status"]["generations"] = []
    assert choose_running(ElasticJob.from_manifest(job), pods(1, 2), WhichWorker()) == pods(1)[0]


@pytest.mark.parametrize(
    ("worker", "rank", "kind", "message"),
    [
        ("9", None, NotFoundError, "digits has no worker digits-worker-9: it has digits-worker-0, "),
        ("1", None, ConflictError, "digits-worker-1 is not running. Running: digits-worker-0 and digits-worker-2"),
        ("", 4, NotFoundError, "no rank 4: its ranks are 0 to 3"),
        ("cat", None, UsageError, "is not the name of a worker"),
    ],
)
def test_an_error_is_one_line(worker: str, rank: int | None, kind: type[ElasticctlError], message: str) -> None:
    with pytest.raises(kind, match=message):
        choose_running(ElasticJob.from_manifest(JOB), pods(0, 2), WhichWorker(worker, rank))


@pytest.mark.parametrize(
    ("text", "pair"), [("6006", (6006, 6006)), ("8080:80", (8080, 80)), (":6006", (0, 6006)), ("0:1", (0, 1))]
)
def test_ports(text: str, pair: tuple[int, int]) -> None:
    assert port_pair(text) == PortPair(*pair)


@pytest.mark.parametrize("text", ["", "0", "x", "65536", "1:2:3", "-1", "1:", "70000:80", "²"])
def test_an_invalid_port_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a port"):
        port_pair(text)


@pytest.fixture
def job(local_cluster: LocalCluster, tmp_path: Path) -> str:
    """A job of two workers that run, in `tmp_path`."""
    container = {"env": [{"name": "MARK", "value": "here"}], "workingDir": str(tmp_path)}
    local_cluster.create_job(shell_job("inner", FOREVER, 2, container=container, grace_s=1, minReplicas=1))
    wait_until(lambda: len(running(local_cluster, "inner")) == 2)
    return "inner"


@pytest.mark.timeout(900)
def test_commands_in_a_worker(job: str, run: Run, start: Start, local_cluster: LocalCluster, tmp_path: Path) -> None:
    def printed(*words: str) -> tuple[int, str, str]:
        process = start(*words)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    script = 'echo "$MARK $ELASTICCTL_WORKER $PWD"; exit 7'
    assert printed("exec", job, "--worker", "1", "--", "sh", "-c", script) == (
        7,
        f"here inner-worker-1 {tmp_path}\n",
        "",
    )
    code, out, err = printed("exec", job, "-it", "--", "cat")  # `start` gives it /dev/null
    assert (code, out, err) == (0, "", "stdin and stdout are not both a terminal: the command runs without one\n")
    assert run("exec", job, "--worker", "9", "--", "true").err == (
        "error: inner has no worker inner-worker-9: it has inner-worker-0 and inner-worker-1\n"
    )
    wrong = run("exec", job, "ls", "-l")
    assert wrong.code == 2
    assert "the command's own options come after `--`" in wrong.err
    assert run("exec", job, "--worker", "0", "--rank", "0", "--", "true").code == 2
    assert run("exec", "no-such-job", "--", "true").code == 3

    waiting = start(
        "exec", job, "--", "sh", "-c", "trap 'echo asked; exit 5' INT; echo ready; while :; do sleep 0.1; done"
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "ready\n"
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait() == 5

    local_cluster.patch_job("default", job, {"spec": {"suspend": True}})
    wait_until(lambda: not running(local_cluster, job))
    stopped = run("exec", job, "--", "true")
    assert stopped.code == 3
    assert stopped.err.startswith("error: no worker of inner is running (")
    local_cluster.patch_job("default", job, {"spec": {"cancel": True}})
    wait_until(lambda: run("exec", job, "--", "true").err.startswith("error: inner has ended (Cancelled). Next: "))


def test_a_shell_on_a_terminal(job: str, terminal: Spawn, tmp_path: Path) -> None:
    child = terminal("shell", job)
    child.expect_exact("a shell in inner-worker-0; `exit` leaves it")
    child.sendline("test -t 0 && echo $MARK-$ELASTICCTL_WORKER-$TERM")
    child.expect_exact("here-inner-worker-0-xterm-256color")
    child.sendline("sh -c 'echo asleep $((40 + 1)); exec sleep 1000'")
    child.expect_exact("asleep 41")  # it is in the foreground now: before, Ctrl-C would reach the shell alone
    child.sendintr()
    child.sendline("echo still $((40 + 2)); exit 3")
    child.expect_exact("still 42")
    child.expect("\r\n")
    child.wait()
    assert child.exitstatus == 3


@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_a_worker_to_look_around_in(
    local_cluster: LocalCluster, run: Run, start: Start, terminal: Spawn, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('no')")
    assert run("submit", str(tmp_path / "train.py"), "--workers", "2", "--name", "bad", "--env", "MARK=here").code == 1
    look = ("sh", "-c", "cat train.py; echo; echo $MARK $ELASTICCTL_WORKER$ELASTICCTL_STORAGE; exit 5")
    process = start("debug", "bad", "--for", "10m", "--", *look)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (5, "raise SystemExit('no')\nhere bad-debug-worker-0\n")
    assert "bad-debug: a worker like those of bad, for 10m00s at most; it ends with its shell\n" in err
    assert [job["metadata"]["name"] for job in local_cluster.list_jobs("default")] == ["bad"]

    child = terminal("debug", "bad")
    child.expect_exact("the job's command: ")
    child.sendline("echo in $ELASTICCTL_WORKER$((40 + 2))")
    child.expect_exact("in bad-debug-worker-042")
    local_cluster.patch_job("default", "bad-debug", {"spec": {"cancel": True}})  # as when its time is over
    child.expect_exact("bad-debug has ended: ")
    child.wait()
    assert [job["metadata"]["name"] for job in local_cluster.list_jobs("default")] == ["bad"]


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"curves")

    def log_message(self, format: str, *args: Any) -> None:
        return


def test_a_port_of_a_worker(job: str, start: Start, run: Run) -> None:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        port = server.server_address[1]
        forward = start("port-forward", job, f":{port}", str(port))
        assert forward.stdout is not None
        first, second = forward.stdout.readline(), forward.stdout.readline()
        here = first.partition(" -> ")[0]
        assert first == f"{here} -> inner-worker-0:{port}\n"
        assert second == f"127.0.0.1:{port} is the port of inner-worker-0 itself: it runs on this machine\n"
        with urlopen(f"http://{here}/", timeout=240) as page:
            assert page.read() == b"curves"
        taken = run("port-forward", job, f"{here.rpartition(':')[2]}:6006")
        assert taken.code == 2
        assert "FIX: `:6006` takes a free one" in taken.err
        forward.send_signal(signal.SIGINT)
        assert forward.wait() == 130
        server.shutdown()
