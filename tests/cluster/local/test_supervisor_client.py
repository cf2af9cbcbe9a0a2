"""Starting and stopping the supervisor: one of it, of the right version, and a clear line when it cannot be."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import elasticctl
from elasticctl.api.errors import ClusterError, UnreachableError
from elasticctl.cluster.local import supervisor_client
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl.cluster.local.supervisor_client import ensure_supervisor, shut_down, supervisor_info
from tests.support.cluster_contract import running
from tests.support.jobs import FOREVER, shell_job
from tests.support.processes import processes_of
from tests.support.waiting import wait_until


def supervisors(home: Path) -> list[int]:
    return [p.pid for p in processes_of(home) if "elasticctl_controller.local.supervisor" in p.cmdline()]


def test_many_concurrent_clients_start_one(home: Path) -> None:
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ensure_supervisor(local_paths(), print).pid)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 6
    assert supervisors(home) == [answers[0]] == list(set(answers))


def test_the_supervisor_outlives_the_process_that_started_it(home: Path) -> None:
    code = "from elasticctl.cluster.local.client import LocalCluster; print(len(LocalCluster().list_jobs(None)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert (ended.stdout, ended.stderr) == ("0\n", "")
    info = supervisor_info(local_paths())
    assert info is not None
    assert info.version == elasticctl.__version__
    assert os.getsid(info.pid) != os.getsid(0)
    assert os.readlink(f"/proc/{info.pid}/cwd") == "/"


def test_a_second_one_refuses_to_run(local_cluster: LocalCluster) -> None:
    local_cluster.list_jobs(None)
    second = subprocess.run(
        [sys.executable, "-m", "elasticctl_controller.local.supervisor"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert second.returncode == 1
    assert "another supervisor already serves" in second.stderr
    assert local_cluster.list_jobs(None) == []


def test_an_older_one_is_replaced_and_its_workers_continue(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_cluster.create_job(shell_job("steady", FOREVER))
    before = wait_until(lambda: running(local_cluster, "steady"))
    old = supervisor_info(local_cluster.paths)
    real = elasticctl.__version__
    monkeypatch.setattr(elasticctl, "__version__", "99.0.0")
    said: list[str] = []
    monkeypatch.setattr(supervisor_client, "start_supervisor", lambda paths: _start_as(paths, real, monkeypatch))
    new = ensure_supervisor(local_cluster.paths, said.append)
    assert old is not None
    assert new.pid != old.pid
    assert said == [f"replacing the local supervisor of elasticctl {real} with 99.0.0; workers continue"]
    assert [p["metadata"]["uid"] for p in running(local_cluster, "steady")] == [before[0]["metadata"]["uid"]]


_real_start = supervisor_client.start_supervisor


def _start_as(paths: supervisor_client.LocalPaths, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new package would start a supervisor of its own version; here that is the one there is."""
    monkeypatch.setattr(elasticctl, "__version__", version)
    _real_start(paths)


def test_a_newer_one_is_left_alone(local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    local_cluster.list_jobs(None)
    monkeypatch.setattr(elasticctl, "__version__", "0.0.1")
    with pytest.raises(ClusterError, match=r"runs elasticctl 0\.1\.0, but this is 0\.0\.1"):
        ensure_supervisor(local_cluster.paths, print)
    monkeypatch.undo()
    os.environ["ELASTICCTL_HOME"] = str(local_cluster.paths.state.parent)


def test_when_it_cannot_start_its_last_lines_are_reported(home: Path) -> None:
    paths = local_paths()
    paths.create()
    paths.database.write_bytes(b"no database " * 1000)
    with pytest.raises(UnreachableError, match=r"did not start: .*state\.db is damaged .*supervisor\.log") as raised:
        LocalCluster(paths).list_jobs(None)
    assert "\n" not in str(raised.value)
    assert paths.database.read_bytes() == b"no database " * 1000


def test_a_file_where_the_folder_should_be(home: Path) -> None:
    (home / "local").write_text("in the way")
    with pytest.raises(ClusterError, match="cannot make the folder"):
        LocalCluster(local_paths()).list_jobs(None)
    (home / "local").unlink()


def test_sockets_of_a_deep_home_are_kept_short(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = home / ("deep-" * 20)
    monkeypatch.setenv("ELASTICCTL_HOME", str(deep))
    paths = local_paths()
    assert len(str(paths.rendezvous_socket)) <= 100
    cluster = LocalCluster(paths)
    cluster.create_job(shell_job("deep", "true"))
    assert paths.sockets.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TMPDIR", str(home))
    assert local_paths().sockets == paths.sockets  # another TMPDIR does not lead to another place
    assert shut_down(paths, keep_jobs=False, say=print)
    monkeypatch.setenv("ELASTICCTL_HOME", str(home))


def test_a_folder_of_another_user_is_not_used(home: Path) -> None:
    paths = local_paths()
    paths.state.mkdir(parents=True)
    other = home / "elsewhere"
    other.mkdir()
    paths.sockets.symlink_to(other)
    with pytest.raises(ClusterError, match="not a folder of yours"):
        LocalCluster(paths).list_jobs(None)


def test_state_is_private_and_no_token_is_in_the_store_or_in_a_process_list(
    local_cluster: LocalCluster, home: Path
) -> None:
    local_cluster.create_job(shell_job("tokens", "cat $ELASTICCTL_RDZV_TOKEN_FILE; " + FOREVER))
    pod = wait_until(lambda: running(local_cluster, "tokens"))[0]
    open_to_others = [
        path for path in (home / "local").rglob("*") if path.lstat().st_mode & 0o077 and not path.is_symlink()
    ]
    assert open_to_others == []
    token = (local_cluster.paths.pod_dir(pod["metadata"]["uid"]) / "token").read_text()
    assert len(token) == 64
    assert token not in json.dumps([local_cluster.list_jobs(None), pod])
    for process in processes_of(home):
        with suppress(psutil.NoSuchProcess):  # the worker's `sleep` comes and goes
            assert not any(token in word for word in [*process.cmdline(), *process.environ().values()])


def test_a_start_that_hangs_elsewhere_is_given_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = local_paths()
    paths.create()
    monkeypatch.setattr(supervisor_client, "START_TIMEOUT_S", 0.2)
    with paths.start_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UnreachableError, match="has been held by another process"):
            ensure_supervisor(paths, print)


def test_one_whose_client_has_given_up_serves_the_next_client(home: Path) -> None:
    """On a busy machine, a client gives up before the supervisor that it has started answers."""
    command = [sys.executable, "-m", "elasticctl_controller.local.supervisor", "--detach"]
    client = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(supervisors(home)) == 2)
    (started,) = set(supervisors(home)) - {client.pid}
    os.kill(started, signal.SIGSTOP)
    client.kill()
    client.wait()
    os.kill(started, signal.SIGCONT)
    wait_until(lambda: supervisor_info(local_paths()))
    assert LocalCluster().list_jobs(None) == []
    assert supervisors(home) == [started]
