"""A server that every worker of a large job calls at the same time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from elasticctl_controller.rendezvous.sockets import KEEPALIVE

WORKERS = 700
SCRIPT = """
import asyncio, json, resource, socket, sys, threading
from elasticctl.api.status import JobStatus
from elasticctl_controller.rendezvous.listener import Listener
from elasticctl_controller.rendezvous.service import RendezvousService
from elasticctl_controller.rendezvous.sockets import explain_exhaustion, raise_file_limit

workers, path = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if sys.argv[3] == "raise":
    raise_file_limit()

async def main():
    explain_exhaustion(asyncio.get_running_loop())
    service = RendezvousService(token_for=lambda uid, number: "t", on_change=lambda key: None)
    await Listener(service.app(), service).open_unix(path)
    alive = {f"u{i}": f"w{i}" for i in range(workers)}
    service.set_group("ns/job", status=JobStatus(), job_uid="j", alive=alive, minimum=1)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""
CLIENT = """
import asyncio, json, resource, sys
workers, path = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

async def join(i):
    me = {"uid": f"u{i}", "name": f"w{i}", "host": "h", "port": 1, "slots": 1, "generation": 0}
    body = json.dumps(me).encode()
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=1 << 24)
            writer.write(b"POST /v1/jobs/ns/job/join HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer t\\r\\n"
                b"Content-Length: %d\\r\\n\\r\\n%s" % (len(body), body))
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            break
        except (OSError, asyncio.IncompleteReadError):  # there was no room for it, or it was too slow with its request
            await asyncio.sleep(0.1)
    size = int(head.lower().split(b"content-length:")[1].split(b"\\r\\n")[0])
    world = json.loads(await reader.readexactly(size))
    return world["state"], len(world.get("members", ()))

async def main():
    print(set(await asyncio.gather(*(join(i) for i in range(workers)))))

asyncio.run(main())
"""


def test_hundreds_of_simultaneous_joins_are_all_accepted(tmp_path_factory) -> None:
    path = str(tmp_path_factory.mktemp("r") / "s")
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(WORKERS), path, "raise"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        argv = [sys.executable, "-c", CLIENT, str(WORKERS), path]
        found = subprocess.run(argv, capture_output=True, text=True, check=True)
        server.stdin.close()
    assert found.stdout == f"{{('formed', {WORKERS})}}\n"


def test_exhausted_connections_are_logged_in_one_line(tmp_path_factory) -> None:
    path = str(tmp_path_factory.mktemp("r") / "s")
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "400", path, "leave"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stderr is not None
        assert server.stdout.readline() == "ready\n"
        with subprocess.Popen([sys.executable, "-c", CLIENT, "400", path], stderr=subprocess.DEVNULL) as client:
            line = server.stderr.readline()
            client.kill()
        server.stdin.close()
    assert "cannot accept more workers: Too many open files (the limit is 256). FIX: raise it" in line


CUT_OFF = """
import asyncio, json, socket, sys
from elasticctl.api.status import JobStatus
from elasticctl_controller.rendezvous.listener import Listener
from elasticctl_controller.rendezvous.service import RendezvousService
from tests.support.vanish import drop_all

async def call(port, verb, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/jobs/ns/job/%s HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer t\\r\\n"
        b"Content-Length: %d\\r\\n\\r\\n%s" % (verb, len(data), data))
    return reader, writer

async def main():
    service = RendezvousService(token_for=lambda uid, number: "t", on_change=lambda key: None)
    listener, listening = Listener(service.app(), service), socket.create_server(("127.0.0.1", 0))
    await listener.open(listening)
    port = listening.getsockname()[1]
    service.set_group("ns/job", status=JobStatus(), job_uid="j", alive={"u0": "w0", "u1": "w1"}, minimum=1)
    me = {"host": "h", "port": 1, "slots": 1, "generation": 0}
    group = service.groups.by_key["ns/job"]
    joins = [await call(port, b"join", {**me, "uid": f"u{i}", "name": f"w{i}"}) for i in range(2)]
    for reader, _ in joins:
        await reader.readuntil(b"\\r\\n\\r\\n")
    _, left = await call(port, b"watch", {"uid": "u0", "generation": 1})
    _, closed = await call(port, b"watch", {"uid": "u1", "generation": 1})
    while len(service.groups.polls.get("ns/job", ())) < 2:
        await asyncio.sleep(0.01)
    closed.close()
    await asyncio.sleep(3.0)
    while not group.signs.unreachable:
        await asyncio.sleep(0.01)
    print(json.dumps(sorted(group.signs.unreachable)), flush=True)  # one is idle, the process of one has hung up
    drop_all(left.get_extra_info('socket'))
    if sys.argv[1] == "answered":  # the answer never arrives
        service.set_group("ns/job", status=JobStatus(), job_uid="j", alive={"u0": "w0"}, minimum=1)
    while "u0" not in group.signs.unreachable:
        await asyncio.sleep(0.05)
    await listener.cleanup()

asyncio.run(main())
"""


@pytest.mark.needs("root")  # to drop what arrives on a socket
@pytest.mark.parametrize("call", ["open", "answered"])
def test_a_host_that_vanishes_without_a_word_is_missed_within_three_seconds(call: str) -> None:
    """As soon as its kernel has been silent for as long as the options of the sockets say."""
    found = subprocess.run([sys.executable, "-c", CUT_OFF, call], capture_output=True, text=True, check=False)
    assert (found.stderr, found.returncode) == ("", 0)
    assert json.loads(found.stdout) == ["u1"], "the kernel of the other answers"
    assert KEEPALIVE["TCP_KEEPIDLE"] + KEEPALIVE["TCP_KEEPINTVL"] * KEEPALIVE["TCP_KEEPCNT"] < 3
    assert KEEPALIVE["TCP_USER_TIMEOUT"] < 3000
