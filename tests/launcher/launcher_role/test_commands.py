"""Commands on another worker, between real processes: the behaviour of ssh, and which callers are accepted."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from elasticctl_launcher.launcher_role.commands import MAX_FRAME_BYTES, CommandServer, FrameKind, WorkerConnection
from elasticctl_launcher.launcher_role.hosts import HostFiles
from elasticctl_launcher.peers.copy_protocol import PeerError
from elasticctl_protocol import variables
from elasticctl_protocol.requests import Member
from tests.support.processes import has_ended
from tests.support.waiting import wait_until

TOKEN = b"right-token"


@pytest.fixture
def files(tmp_path: Path) -> HostFiles:
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    return HostFiles(tmp_path)


@pytest.fixture
def server(files: HostFiles) -> Iterator[CommandServer]:
    made = CommandServer("127.0.0.1", lambda: TOKEN, {**os.environ, "WHO": "a-1"}, files.folder, 0.5)
    files.write([Member("uid-a-1", "a-1", "127.0.0.1", made.port, 1)])
    yield made
    made.close()


def ssh(files: HostFiles, *words: str, token: str = "token") -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        variables.HOSTFILE: str(files.hostfile),
        "ELASTICCTL_RDZV_TOKEN_FILE": str(files.folder / token),
    }
    pipe = subprocess.PIPE
    return subprocess.Popen([str(files.folder / "bin/ssh"), *words], env=environ, stdin=pipe, stdout=pipe, stderr=pipe)


def sleeper(files: HostFiles) -> tuple[subprocess.Popen[bytes], int]:
    """A command that starts another process in its session, and the pid of that process."""
    caller = ssh(files, "a-1", "sleep 1000 & echo $!; trap '' TERM; wait; sleep 1000")
    assert caller.stdout is not None
    return caller, int(caller.stdout.readline())


def test_input_outputs_and_exit_code_are_passed_through(server: CommandServer, files: HostFiles) -> None:
    with ssh(files, "-n", "a-1", "cat; kill -KILL $$") as caller:
        assert caller.communicate() == (b"", b"")
        assert caller.returncode == 128 + signal.SIGKILL

    words = ("-x", "-o", "StrictHostKeyChecking=no", "-p22", "a-1", "-oBatchMode=yes", "echo $WHO >&2;", "cat; exit 7")
    data = random.Random(1).randbytes(3 << 20)

    with ssh(files, *words) as caller:
        out, err = caller.communicate(data)

    assert (caller.returncode, out, err) == (7, data, b"a-1\n")


def test_signals_are_forwarded(server: CommandServer, files: HostFiles) -> None:
    with ssh(files, "a-1", "trap 'echo got it; exit 9' TERM; echo ready; while true; do sleep 0.05; done") as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"ready\n"
        caller.send_signal(signal.SIGTERM)
        assert caller.stdout.read() == b"got it\n"
        assert caller.wait() == 9


@pytest.mark.parametrize("how", ["caller", "worker"])
def test_child_processes_end_with_the_connection(server: CommandServer, files: HostFiles, how: str) -> None:
    caller, pid = sleeper(files)
    with caller:
        caller.kill() if how == "caller" else server.end_commands()
        wait_until(lambda: has_ended(pid) and not server.own_pids())
        assert caller.wait() == (-signal.SIGKILL if how == "caller" else 255)


@pytest.mark.parametrize("how", ["caller", "worker"])
def test_a_command_that_does_not_read_its_input_ends_with_the_connection(
    server: CommandServer, files: HostFiles, how: str
) -> None:
    caller = ssh(files, "a-1", "echo $$; exec sleep 1000")
    assert caller.stdin is not None
    assert caller.stdout is not None
    pid = int(caller.stdout.readline())
    try:
        with caller:
            caller.stdin.write(bytes((1 << 16) + 4096))  # more than the pipe to the command holds
            caller.stdin.flush()
            wait_until(lambda: _unread_bytes(pid) == 1 << 16)
            caller.kill() if how == "caller" else server.end_commands()
            wait_until(lambda: has_ended(pid) and not server.own_pids())
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _unread_bytes(pid: int) -> int:
    """The number of bytes of input that the process has not read."""
    pipe, found = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK), bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, found)
    os.close(pipe)
    return int.from_bytes(found, sys.byteorder)


def test_a_caller_without_the_key_is_refused(
    server: CommandServer, files: HostFiles, caplog: pytest.LogCaptureFixture
) -> None:
    (files.folder / "wrong").write_text("wrong-token")
    with ssh(files, "a-1", "touch", "ran", token="wrong") as caller:
        assert caller.wait() == 255
    wait_until(lambda: "does not know the key of this job's workers" in caplog.text)
    assert not (files.folder / "ran").exists()


def test_with_a_peer_key_the_jobs_token_is_refused(
    server: CommandServer, files: HostFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the cluster provides a key for the workers, only that key counts."""
    (tmp_path / "peers").write_bytes(TOKEN)
    (files.folder / "wrong").write_text("the-token-of-the-rendezvous")
    with ssh(files, "a-1", "touch", "ran", token="wrong") as caller:
        assert caller.wait() == 255
    monkeypatch.setenv("ELASTICCTL_PEER_KEY_FILE", str(tmp_path / "peers"))
    with ssh(files, "a-1", "touch", "ran", token="wrong") as caller:
        assert caller.wait() == 0


def test_a_server_without_the_key_is_not_trusted(files: HostFiles) -> None:
    """It cannot sign an answer, and the caller accepts no other."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        files.write([Member("uid-a-1", "a-1", "127.0.0.1", impostor.getsockname()[1], 1)])
        with ssh(files, "a-1", "cat") as caller:
            connected, _ = impostor.accept()
            with connected:
                line = WorkerConnection(connected, b"wrong-token", calls=False)
                line.send(FrameKind.EXIT, b"0")
                assert caller.stderr is not None
                assert b"does not know the key of this job's workers" in caller.stderr.read()
            assert caller.wait() == 255


SENT = b"longer than the MAC of a frame: " * 4


@pytest.mark.parametrize(
    "change",
    [
        lambda one, two: two + one,
        lambda one, two: one + one,
        lambda one, two: one[:20] + b"?" + one[21:] + two,
        lambda one, two: b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
    ],
    ids=["in another order", "twice", "changed", "too long"],
)
def test_changed_or_reordered_frames_are_refused(change: Callable[[bytes, bytes], bytes]) -> None:
    ours, tapped = socket.socketpair()
    theirs, forged = socket.socketpair()
    with ours, tapped, theirs, forged, ThreadPoolExecutor() as threads:
        caller = threads.submit(WorkerConnection, ours, TOKEN, calls=True)
        worker = threads.submit(WorkerConnection, theirs, TOKEN, calls=False)
        forged.sendall(tapped.recv(32))
        tapped.sendall(forged.recv(32))
        frames = []
        for _ in range(2):
            caller.result().send(FrameKind.INPUT, SENT)
            frames.append(tapped.recv(1000))
        forged.sendall(change(*frames))

        def listen() -> None:
            for _ in frames:
                assert worker.result().receive() == (FrameKind.INPUT, SENT)

        with pytest.raises(PeerError):
            listen()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a-1",), "a worker and a command are needed"),
        (("-l", "root", "a-9", "true"), "a-9 is not a worker of this job at present"),
    ],
)
def test_wrong_arguments_are_explained(files: HostFiles, words: tuple[str, ...], said: str) -> None:
    with ssh(files, *words) as caller:
        assert caller.stderr is not None
        assert said in caller.stderr.read().decode()
        assert caller.wait() == 255


def test_outside_of_a_job_the_missing_variable_is_named() -> None:
    environ = {name: value for name, value in os.environ.items() if name != variables.HOSTFILE}
    argv = [sys.executable, "-m", "elasticctl_launcher.launcher_role.rsh", "a-1", "true"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "ELASTICCTL_HOSTFILE is not set. FIX: " in done.stderr) == (255, True)
