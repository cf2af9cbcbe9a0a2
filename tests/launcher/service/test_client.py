"""The client of the rendezvous service: broken services, connections and tokens."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elasticctl_controller.core.group.signs_of_life import SILENT_S
from elasticctl_launcher.service import client as client_module
from elasticctl_launcher.service.client import ServiceAway, ServiceClient, ServiceError, ServiceRefused
from tests.support.raw_http import read_request


@contextmanager
def serving(handle: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[socket.socket]]]:
    """A server on loopback: its port, and the connections it has accepted, each given to `handle` first."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(connection)
            handle(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1], accepted
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in accepted:
        connection.close()


@pytest.fixture
def broken() -> Iterator[Callable[[bytes], str]]:
    """A server on loopback that answers every request with the given bytes (empty: never)."""
    answers: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        if answers[0]:
            read_request(connection)
            connection.sendall(answers[0])
            connection.close()

    with serving(answer) as (port, _):

        def answer_with(raw: bytes) -> str:
            answers.append(raw)
            return f"127.0.0.1:{port}"

        yield answer_with


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",
        b"garbage\r\n\r\n",
        b"",
    ],
    ids=["500", "not json", "truncated", "not http", "hangs"],
)
def test_a_broken_service_counts_as_away(broken: Callable[[bytes], str], tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "token").write_text("t")
    client = ServiceClient(broken(raw), "default", "job", str(tmp_path / "token"))
    with pytest.raises(ServiceAway, match="rendezvous service at 127"):
        client.call("leave", {}, timeout_s=0.5)
    client.close()


@pytest.mark.parametrize("endpoint", ["no-such-host.invalid:1", "127.0.0.1:1", "unix:///nowhere.sock", "[::1]:1"])
def test_an_unreachable_service_is_one_clear_line(tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "token").write_text("t")
    with pytest.raises(ServiceAway, match="rendezvous service at"):
        ServiceClient(endpoint, "default", "job", str(tmp_path / "token")).call("leave", {})


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[tuple[ServiceClient, list[socket.socket]]]:
    """A client, and the connections that its server has accepted; each is answered while it is open."""

    def answer(connection: socket.socket) -> None:
        with suppress(OSError):
            while received := connection.recv(65536):
                if received.endswith(b"}"):  # the body, which arrives after the headers or with them
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def start(connection: socket.socket) -> None:
        threading.Thread(target=answer, args=(connection,), daemon=True).start()

    (tmp_path / "token").write_text("t")
    with serving(start) as (port, accepted):
        client = ServiceClient(f"127.0.0.1:{port}", "default", "job", str(tmp_path / "token"))
        yield client, accepted
        client.close()


def test_connections_are_reused(counting: tuple[ServiceClient, list[socket.socket]]) -> None:
    client, accepted = counting
    for _ in range(5):
        assert client.call("leave", {}) == {}
    assert len(accepted) == 1


def test_keepalive_detects_a_dead_connection_before_the_worker_counts_as_silent(
    counting: tuple[ServiceClient, list[socket.socket]],
) -> None:
    client, _ = counting
    client.call("leave", {})
    (connection,) = client._idle
    assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle_s, interval_s, probes = (
        connection.sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"))
        for name in ("IDLE", "INTVL", "CNT")
    )
    assert 0 < idle_s + interval_s * probes < SILENT_S
    unacknowledged_ms = connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert 0 < unacknowledged_ms < 1000 * SILENT_S


def test_a_connection_attempt_without_an_answer_times_out_before_the_worker_counts_as_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client_module.CONNECT_S < SILENT_S
    monkeypatch.setattr(client_module, "CONNECT_S", 0.3)
    (tmp_path / "token").write_text("t")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = [socket.create_connection(server.getsockname(), 0.3)]  # they fill the backlog
        with suppress(TimeoutError):
            waiting.append(socket.create_connection(server.getsockname(), 0.3))
        client = ServiceClient(f"127.0.0.1:{server.getsockname()[1]}", "default", "job", str(tmp_path / "token"))
        with pytest.raises(ServiceAway, match="timed out"):
            client.call("watch", {}, 36_000.0)  # longer than any test takes
        for connection in waiting:
            connection.close()


def test_a_closed_connection_is_not_reused(counting: tuple[ServiceClient, list[socket.socket]]) -> None:
    client, accepted = counting
    client.call("leave", {})
    accepted[0].shutdown(socket.SHUT_RDWR)
    assert client.call("leave", {}) == {}
    assert len(accepted) == 2


AWAY, BACK, REFUSED = "trying again until it answers", "the rendezvous service is back", "refused"


@pytest.mark.parametrize(
    ("answers", "words"),
    [([500, 503, 200, 429, 200, 500, 410], [AWAY, BACK, AWAY, BACK]), ([401, 403, 200, 401], [REFUSED, REFUSED])],
)
def test_an_outage_and_its_end_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answers: list[int], words: list[str]
) -> None:
    (tmp_path / "token").write_text("t")

    def answer(connection: socket.socket) -> None:
        read_request(connection)
        status = answers.pop(0)
        connection.sendall(f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        connection.close()

    with serving(answer) as (port, _), caplog.at_level(logging.INFO):
        client = ServiceClient(f"127.0.0.1:{port}", "default", "job", str(tmp_path / "token"))
        while answers:
            with suppress(ServiceError):
                client.call("leave", {})
        client.close()
    here = [record for record in caplog.records if record.thread == threading.get_ident()]
    said = [record.getMessage().rpartition(": ")[2] for record in here]
    assert said == words
    assert client.was_away.is_set() == (BACK in words)


def test_a_token_file_without_a_token_is_named(tmp_path: Path) -> None:
    client = ServiceClient("127.0.0.1:1", "default", "job", str(tmp_path / "token"))
    with pytest.raises(ServiceRefused, match="cannot read the token file"):
        client.call("leave", {})
    for content in (b"", b"\n", b"\xff\xfe", b"one\ntwo"):
        (tmp_path / "token").write_bytes(content)
        with pytest.raises(ServiceRefused, match="token holds no token"):
            client.call("leave", {})
