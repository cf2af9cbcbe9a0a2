"""One HTTP exchange at a time, over real sockets."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from elasticctl_store.errors import StorageError
from elasticctl_store.storage.http import ConnectionPool, HttpRequest, WireError
from tests.support.raw_http import read_request
from tests.support.waiting import wait_until


@contextmanager
def server(serve: Callable[[socket.socket], None], connections: int = 1) -> Iterator[str]:
    """The origin of a server that calls `serve` with each of that many connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            for _ in range(connections):
                connection, _ = listener.accept()
                with connection:
                    serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def connect(origin: str, silence_s: float = 120.0) -> ConnectionPool:
    return ConnectionPool(origin, connect_s=120.0, silence_s=silence_s)


def test_bodies_are_sent_from_views_and_answers_read_into_them() -> None:
    requests: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        for _ in range(2):
            requests.append(read_request(connection))
            connection.sendall(b"HTTP/1.1 206 Partial\r\nX-A: b\r\nContent-Length: 5\r\n\r\nhello")

    with server(serve) as origin:
        connections, into = connect(origin), bytearray(8)
        request = HttpRequest("PUT", "/k?a=b", {"x-c": "d"}, (memoryview(b"one"), memoryview(b"two")), memoryview(into))
        answer = connections.exchange(request)
        assert (answer.status, answer.headers["x-a"], answer.filled_bytes, bytes(into)) == (206, "b", 5, b"hello\0\0\0")
        assert connections.exchange(HttpRequest("GET", "/k")).body == b"hello"  # over the same connection
    assert requests[0].startswith(b"PUT /k?a=b HTTP/1.1\r\n")
    assert requests[0].endswith(b"x-c: d\r\ncontent-length: 6\r\n\r\nonetwo")


def test_transfers_copy_no_bytes() -> None:
    size_bytes = 8 << 20
    scratch = memoryview(bytearray(1 << 20))

    def serve(connection: socket.socket) -> None:
        left = size_bytes
        head = connection.recv(10_000).partition(b"\r\n\r\n")
        left -= len(head[2])
        while left:
            left -= connection.recv_into(scratch)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size_bytes)
        for _ in range(8):
            connection.sendall(scratch)

    body, into = memoryview(bytes(size_bytes)), memoryview(bytearray(size_bytes))
    with server(serve) as origin:
        tracemalloc.start()
        answer = connect(origin).exchange(HttpRequest("PUT", "/", body=(body,), into=into))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert answer.filled_bytes == size_bytes
    assert peak_bytes < 1 << 20


def test_a_closed_idle_connection_is_not_reused() -> None:
    closed = threading.Event()

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        connection.shutdown(socket.SHUT_RDWR)
        closed.set()

    with server(serve, connections=2) as origin:
        connections = connect(origin)
        connections.exchange(HttpRequest("GET", "/"))
        assert closed.wait(240)
        wait_until(lambda: connections._pop_idle() is None)
        assert connections.exchange(HttpRequest("GET", "/")).status == 200


def test_an_early_refusal_is_read() -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass

    with server(serve) as origin:
        answer = connect(origin).exchange(HttpRequest("PUT", "/", body=(memoryview(bytes(32 << 20)),)))
        assert (answer.status, answer.body) == (403, b"no")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "broke off"),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 9\r\n\r\nhalf", "broke off"),
        (b"garbage\r\n\r\n", "garbage"),
    ],
)
def test_a_truncated_answer_is_no_answer(said: bytes, why: str) -> None:
    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(said)

    with server(serve) as origin, pytest.raises(WireError, match=why) as lost:
        connect(origin).exchange(HttpRequest("GET", "/", into=memoryview(bytearray(9))))
    assert lost.value.sent
    assert not lost.value.final


def test_silence_ends_with_a_timeout() -> None:
    over = threading.Event()
    with server(lambda connection: over.wait() and None) as origin:
        with pytest.raises(WireError, match="did not answer in time"):
            connect(origin, silence_s=0.1).exchange(HttpRequest("GET", "/"))
        over.set()


def test_a_missing_server_is_distinguished_from_a_lost_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(WireError, match="cannot connect: connection refused") as refused:
        connect(f"http://127.0.0.1:{port}").exchange(HttpRequest("GET", "/"))
    assert not refused.value.sent


def test_a_proxy_is_used_with_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        received.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    with server(serve) as origin:
        monkeypatch.setenv("HTTPS_PROXY", origin.replace("//", "//me:pass%20word@"))
        monkeypatch.setenv("NO_PROXY", "other.example")
        with pytest.raises(WireError, match="cannot connect: Tunnel connection failed: 403"):
            connect("https://bucket.example").exchange(HttpRequest("GET", "/"))
    assert received[0].startswith(b"CONNECT bucket.example:443 HTTP/1.")
    assert b"Proxy-Authorization: Basic bWU6cGFzcyB3b3Jk\r\n" in received[0]


def certificate(folder: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = folder / "certificate.pem"
    path.write_bytes(secret + made.public_bytes(Encoding.PEM))
    return path


def test_unreadable_certificates_are_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for name, why in (("none", "no such file"), ("empty", ".+")):
        with pytest.raises(StorageError, match=rf"cannot read the certificates in .*{name}: (?i:{why}).*FIX: correct"):
            ConnectionPool("https://host", connect_s=120.0, silence_s=120.0, ca_file=str(tmp_path / name))
    ConnectionPool("https://host", connect_s=120.0, silence_s=120.0, ca_file=str(tmp_path))


def test_an_untrusted_certificate_is_a_final_error(tmp_path: Path) -> None:
    path = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)

    def serve(connection: socket.socket) -> None:
        with suppress(ssl.SSLError), context.wrap_socket(connection, server_side=True) as secured:
            read_request(secured)
            secured.sendall(b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\n\r\nhello")

    with server(serve, connections=2) as origin:
        secure, into = origin.replace("http:", "https:"), bytearray(5)
        with pytest.raises(WireError, match=r"its certificate is not trusted .*AWS_CA_BUNDLE") as refused:
            connect(secure).exchange(HttpRequest("GET", "/"))
        assert refused.value.final
        trusting = ConnectionPool(secure, connect_s=120.0, silence_s=120.0, ca_file=str(path))
        trusting.exchange(HttpRequest("GET", "/", into=memoryview(into)))
    assert into == b"hello"
