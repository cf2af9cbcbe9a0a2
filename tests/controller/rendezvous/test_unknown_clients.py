"""The port that every pod can reach: what it does for who shows no token, and for who asks for too much."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time

import pytest

from elasticctl_controller.rendezvous import admission, listener, requests
from tests.support import hostile_pods
from tests.support.launcher_lab import TOKEN, Lab
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # servers listen
QUICK_S = 0.3
JOIN = "/v1/jobs/default/job/join"


@pytest.fixture
def port(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of a service that knows one job, and is patient."""
    monkeypatch.setattr(listener, "HEAD_S", 600.0)
    monkeypatch.setattr(requests, "BODY_S", 600.0)
    lab.add("a-0", "a-1")
    return int(lab.site.address.partition(":")[2])


def lose_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_S", QUICK_S)
    monkeypatch.setattr(requests, "BODY_S", QUICK_S)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port))


def head(size: int, token: str = TOKEN, path: str = JOIN, more: str = "") -> bytes:
    length = f"Content-Length: {size}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n{length}{more}\r\n".encode()


def answer(connected: socket.socket) -> tuple[int, str]:
    """Status and error of the next answer; 0 where the connection was closed without one."""
    said = b""
    try:
        while b"\r\n\r\n" not in said and (chunk := connected.recv(65536)):
            said += chunk
        before, _, body = said.partition(b"\r\n\r\n")
        size = int(before.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        while len(body) < size and (chunk := connected.recv(65536)):
            body += chunk
    except ConnectionResetError:
        return 0, ""
    return (int(before.split()[1]), body.decode()) if before else (0, "")


def ended(connected: socket.socket) -> bool:
    """Has the other side hung up?"""
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:
        return True


def refused(port: int) -> bool:
    """Is a new connection closed before anything is said on it?"""
    try:
        with connect(port) as connected:
            return ended(connected)
    except ConnectionResetError:
        return True


def works(port: int) -> bool:
    try:
        with connect(port) as connected:
            connected.sendall(head(15, path="/v1/jobs/default/job/heartbeat") + b'{"uid":"uid-a"}')
            return answer(connected)[0] == 200
    except ConnectionError:
        return False


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head(1 << 40, "wrong"), 401),
        (head(1 << 40, "wrong", more="Expect: 100-continue\r\n"), 401),
        (head(1 << 40, "wrong", more="Content-Encoding: gzip\r\n"), 401),
        (head(1 << 40, path="/v1/jobs/default/none/join"), 410),
        (head(1 << 40, path="/"), 404),
        (head(1 << 40, path="/v1/jobs/default/job"), 404),
        (head(2, more=f"authorization: Bearer {TOKEN}\r\n"), 400),
        (b"GET\r\n\r\n", 400),
        (b"\xff\x00 \xfe HTTP/9\r\n\r\n", 404),
        (b"x" * (1 << 16), 0),
        (b"POST / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, 0),
    ],
)
def test_an_unknown_client_is_answered_from_the_head_alone(port: int, sent: bytes, status: int) -> None:
    with connect(port) as connected:
        try:
            connected.sendall(sent)
        except ConnectionError:
            assert status == 0
        found, said = answer(connected)
        assert (found, TOKEN in said) == (status, False)
        assert ended(connected)
    assert works(port)


@pytest.mark.parametrize("beginning", [b"", b"POST ", head(2)[:-2], head(100) + b"{", head(1 << 20) + b"{"])
def test_a_client_that_does_not_finish_its_request_is_disconnected(
    port: int, beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_patience(monkeypatch)
    with connect(port) as connected:
        connected.sendall(beginning)
        assert answer(connected)[0] in (0, 408)
        assert ended(connected)


@pytest.mark.parametrize("beginning", [b"P", head(2)[:-2], head(100) + b"{"])
def test_the_second_request_of_a_connection_is_no_better_off(
    port: int, beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = head(15, path="/v1/jobs/default/job/heartbeat") + b'{"uid":"uid-a"}'
    with connect(port) as connected:
        connected.sendall(beat)
        lose_patience(monkeypatch)
        assert answer(connected)[0] == 200
        time.sleep(2 * QUICK_S)  # one that is silent may stay
        connected.sendall(beat)
        assert answer(connected)[0] == 200
        connected.sendall(beginning)
        assert answer(connected)[0] in (0, 408)
        assert ended(connected)


@pytest.mark.parametrize("encoding", ["Content-Encoding: gzip", "Content-Encoding: deflate", "content-encoding: br"])
def test_nothing_is_inflated(port: int, encoding: str) -> None:
    bomb = gzip.compress(bytes(1 << 20))
    with connect(port) as connected:
        connected.sendall(head(len(bomb), more=f"{encoding}\r\n") + bomb)
        assert answer(connected)[0] == 415


def test_a_body_in_chunks_is_refused(port: int) -> None:
    request = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
    with connect(port) as connected:
        connected.sendall(request)
        assert answer(connected)[0] == 411


def test_a_body_that_is_too_large_is_refused_with_words(port: int) -> None:
    with connect(port) as connected:
        connected.sendall(head(3 << 20) + b" " * (3 << 20))
        status, said = answer(connected)
        assert (status, "more than 2097152 bytes" in said) == (413, True)


def test_a_job_has_a_share_of_the_connections(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PER_JOB", 2)
    monkeypatch.setattr(admission, "PER_WORKER", 1)
    beat = head(15, path="/v1/jobs/default/job/heartbeat") + b'{"uid":"uid-a"}'
    connections = [connect(port) for _ in range(5)]
    try:
        statuses = []
        for connected in connections:
            connected.sendall(beat)
            statuses.append(answer(connected)[0])
        assert statuses == [200, 200, 200, 200, 429]  # 2 workers
        connections.pop(0).close()
        wait_until(lambda: works(port))
    finally:
        for connected in connections:
            connected.close()


def test_unknown_clients_of_one_address_are_capped(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "UNKNOWN_PER_ADDRESS", 3)
    silent = [connect(port) for _ in range(3)]
    try:
        assert refused(port)
        silent.pop().close()
        wait_until(lambda: works(port))
    finally:
        for connected in silent:
            connected.close()


def test_a_world_of_ten_thousand_members_is_read(port: int, lab: Lab) -> None:
    members = [{"uid": f"uid-{number}", "name": "w", "host": "h", "port": 1, "slots": 1} for number in range(10_000)]
    body = json.dumps({"uid": "uid-0", "generation": 1, "members": members}).encode()
    with connect(port) as connected:
        connected.sendall(head(len(body), path="/v1/jobs/default/job/watch") + body)
        status, said = answer(connected)
        assert (status, json.loads(said)["state"]) == (200, "stale")


@pytest.mark.timeout(900)
def test_other_jobs_join_under_every_attack() -> None:
    """`python -m tests.support.hostile_pods` measures how much longer that takes."""
    found = hostile_pods.run(("unknown clients", "rogue flood", "rogue worlds"), joins=3)
    assert {name: joins.failed for name, joins in found.items() if joins.failed} == {}


LARGE = bytes(16 << 20)
"""More than the buffers of two sockets hold."""


def test_pages_are_served_to_everyone_and_no_client_delays_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_S", QUICK_S)
    monkeypatch.setattr(listener, "LINGER_S", 600.0)
    read = [0]

    def metrics() -> bytes:
        read[0] += 1
        return listener.response(200, "text/plain", f"read {read[0]}".encode())

    async def ask(port: int, path: str, source: str = "127.0.0.1") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n".encode())
        said = await reader.read()  # until it hangs up
        writer.close()
        return said.partition(b" ")[2]

    async def scenario() -> None:
        pages = {"/metrics": metrics, "/large": lambda: listener.response(200, "text/plain", LARGE)}
        served, listening = listener.Listener(pages=pages), socket.create_server(("127.0.0.1", 0))
        await served.open(listening)
        port = listening.getsockname()[1]
        monkeypatch.setattr(admission, "UNKNOWN_PER_ADDRESS", 20)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        assert await ask(port, "/metrics?x=1", "127.0.0.2") == (
            b"200 OK\r\nContent-Type: text/plain\r\nContent-Length: 6\r\nConnection: close\r\n\r\nread 1"
        )
        assert (await ask(port, "/other", "127.0.0.2")).startswith(b"404 ")
        for reader, writer in idle:
            assert await reader.read() == b""
            writer.close()
        assert (await ask(port, "/metrics")).endswith(b"read 2")
        assert (await ask(port, "/large")).endswith(b"\r\n\r\n" + LARGE)
        await served.cleanup()

    asyncio.run(scenario())
