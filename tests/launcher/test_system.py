"""Descriptors, orphans, and out-of-memory kills."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elasticctl_launcher.system import ACCEPT_AGAIN_S, MemoryKills, serve_connections
from tests.support.waiting import wait_until

EVENTS = "low 0\nhigh 0\nmax 3\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("0::/pods/a", "pods/a/memory.events", EVENTS),
        ("0::/", "memory.events", EVENTS),
        ("0::/kubepods/burstable/pod1/c1", "memory.events", EVENTS),
        ("12:cpu,cpuacct:/x\n4:memory:/docker/c1\n0::/", "memory/docker/c1/memory.oom_control", CONTROL),
        ("4:memory:/docker/c1", "memory/memory.oom_control", CONTROL),
    ],
    ids=["v2", "v2 in a namespace", "v2 in a container", "v1", "v1 in a container"],
)
def test_out_of_memory_kills_are_counted(tmp_path: Path, membership: str, file: str, text: str) -> None:
    counter = tmp_path / "fs" / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text.format(2))
    (tmp_path / "cgroup").write_text(membership)
    kills = MemoryKills(tmp_path / "fs", tmp_path / "cgroup")
    assert kills.count() == 2
    counter.write_text(text.format(3))
    assert kills.count() == 3
    counter.unlink()
    assert kills.count() == 0


def test_a_lack_of_descriptors_does_not_end_the_server() -> None:
    served: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))
    arguments = server, lambda connected: served.append(connected.recv(1)), "served"
    thread = threading.Thread(target=serve_connections, args=arguments, daemon=True)
    thread.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as first, socket.socket() as second:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            first.connect(server.getsockname())  # it may get the descriptor that the thread already waits with
            first.sendall(b"1")
            time.sleep(ACCEPT_AGAIN_S)
            second.connect(server.getsockname())
            second.sendall(b"2")
            time.sleep(3 * ACCEPT_AGAIN_S)
            assert b"2" not in served
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wait_until(lambda: served == [b"1", b"2"])
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def test_a_lack_of_threads_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))
    arguments = server, lambda connected: served.append(connected.recv(1)), "served", 1
    thread = threading.Thread(target=serve_connections, args=arguments, daemon=True)
    thread.start()
    start = threading.Thread.start

    def refuse(starting: threading.Thread) -> None:
        if starting.name == "served":
            raise RuntimeError("can't start new thread")
        start(starting)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with socket.create_connection(server.getsockname(), 60) as refused:
            assert refused.recv(1) == b""
    with socket.create_connection(server.getsockname(), 60) as connected:
        connected.sendall(b"1")
        wait_until(lambda: served == [b"1"])
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def test_without_control_groups_the_count_is_0(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path, tmp_path / "none").count() == 0


ORPHANS = """
import ctypes, os, subprocess, sys, time
from elasticctl_launcher.system import OrphanReaper
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # as the first process of a container, it adopts orphans
own = subprocess.Popen(["true"])
parent = subprocess.Popen(["sh", "-c", "(sleep 0.2) & (sleep 0.2) & exit 0"])
parent.wait()
def dead():
    me = str(os.getpid())
    stats = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stats.append(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[:2])
        except OSError:
            pass
    return stats.count(["Z", me])
while dead() < 3:
    time.sleep(0.02)
reaper = OrphanReaper(lambda: {own.pid})
first = reaper.reap()
print(len(first), len(reaper.reap()), dead(), own.wait())
"""


@pytest.mark.slow
def test_orphans_are_reaped_and_own_children_are_not() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "0 2 1 0\n"


LIMIT = """
import resource
from elasticctl_launcher.system import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1000))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.slow
def test_the_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    done = subprocess.run([sys.executable, "-c", LIMIT], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "(1000, 1000)\n"
