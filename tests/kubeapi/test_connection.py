"""One request, whatever the server, the way to it or the credentials do: an answer or one clear line."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import (
    BusyError,
    ClusterError,
    ConflictError,
    CredentialsError,
    ElasticctlError,
    ExpiredError,
    ForbiddenError,
    NotFoundError,
    SpecError,
    TooLargeError,
    UnreachableError,
)
from elasticctl.kubeapi import connection as module
from elasticctl.kubeapi.connection import Connection, connect, resource_path
from elasticctl.kubeapi.responses import refusal
from tests.support.fakeapi import FakeApi
from tests.support.kube import WriteKubeconfig

PODS = "/api/v1/namespaces/default/pods"


def refusing(api: FakeApi, status: int, content: Any, **headers: str) -> None:
    api.refuse = lambda request: (status, content, headers)


@pytest.mark.parametrize(
    ("status", "content", "kind", "said"),
    [
        (400, {"message": "container is waiting to start"}, ClusterError, "waiting to start"),
        (401, {"message": "Unauthorized"}, CredentialsError, "log in again"),
        (
            403,
            {"message": 'pods is forbidden: User "jo" cannot list resource "pods" in API group "" in namespace "x"'},
            ForbiddenError,
            '"jo" cannot list resource "pods".*. FIX: ask the cluster.s administrator for that right',
        ),
        (403, {"message": "exceeded quota: gpus"}, ForbiddenError, r"exceeded quota: gpus \(GET /api"),
        (404, b"404 page not found\n", NotFoundError, r"404 page not found \(GET /api"),
        (404, {"message": 'pods "a" not found', "details": {"name": "a"}}, NotFoundError, '^pods "a" not found$'),
        (409, {"message": "already exists"}, ConflictError, "already exists"),
        (412, {"message": "precondition"}, ConflictError, "precondition"),
        (410, {"message": "too old resource version"}, ExpiredError, "too old"),
        (429, {"message": "too many requests"}, BusyError, "too many"),
        (503, b"", BusyError, "HTTP 503"),
        (500, {"message": "etcdserver: no leader"}, ClusterError, "no leader"),
        (502, b"<html>\n bad\xff gateway", ClusterError, "<html> bad. gateway"),
        (200, b"<html>", ClusterError, "is not a Kubernetes API server"),
        (200, [1], ClusterError, "is not a Kubernetes API server"),
    ],
)
def test_refusals_are_errors_of_ours(
    api: FakeApi, connection: Connection, status: int, content: Any, kind: type[ElasticctlError], said: str
) -> None:
    refusing(api, status, content)
    with pytest.raises(kind, match=said) as error:
        connection.request("GET", PODS)
    assert type(error.value) is kind or kind is NotFoundError
    assert "\n" not in str(error.value)


def test_a_long_answer_is_read_only_up_to_a_limit(api: FakeApi, connection: Connection) -> None:
    refusing(api, 200, {"items": ["x" * 1000]})
    assert connection.request("GET", PODS, most_bytes=1020) == {"items": ["x" * 1000]}
    with pytest.raises(TooLargeError, match="more than 900 bytes"):
        connection.request("GET", PODS, most_bytes=900)
    assert connection.request("GET", PODS)


def test_a_refusal_says_when_to_retry(api: FakeApi, connection: Connection) -> None:
    for text, wanted in (("7", 7.0), ("soon", None)):
        refusing(api, 429, {}, **{"Retry-After": text})
        with pytest.raises(BusyError) as error:
            connection.request("GET", PODS)
        assert error.value.retry_after_s == wanted


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"details": {"causes": 5}}', b'{"details": {"causes": [5, {"field": [1]}]}}', b"\xff", b"null"],
)
def test_a_refusal_of_any_content_is_an_error_of_ours(body: bytes) -> None:
    for status in (400, 401, 403, 404, 409, 410, 422, 429, 500):
        assert isinstance(refusal(status, body, {}, "GET /x"), ElasticctlError)


def test_an_invalid_object_is_refused_by_field(api: FakeApi, connection: Connection) -> None:
    causes = [{"field": "spec.minReplicas", "message": "must be at least 1"}]
    refusing(api, 422, {"message": "invalid", "details": {"causes": causes}})
    with pytest.raises(SpecError) as error:
        connection.request("POST", PODS, {})
    assert error.value.path == "spec.minReplicas"


def test_no_one_listens(kubeconfig: WriteKubeconfig) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        port = silent.getsockname()[1]
        kubeconfig(f"http://127.0.0.1:{port}")
        with pytest.raises(UnreachableError, match=rf"http://127.0.0.1:{port}: .*Connection refused$"):
            connect().request("GET", "/version")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_is_stopped_is_given_up(
    kubeconfig: WriteKubeconfig, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and no one answers
        kubeconfig(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UnreachableError):
            connect().request("GET", "/version", timeout_s=0.3)
    assert 2 * 4.0 <= module.ANSWER_TIMEOUT_S < 10


def test_an_answer_that_breaks_off_is_lost(kubeconfig: WriteKubeconfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def half() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

        threading.Thread(target=half, daemon=True).start()
        kubeconfig(f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(UnreachableError, match="was lost"):
            connect().request("GET", "/version")


def plugin(tmp_path: Path, code: str) -> dict[str, Any]:
    """A credential plugin, as EKS and GKE have one."""
    script = tmp_path / "plugin.py"
    script.write_text(f"import json, os, pathlib, sys\n{code}\n")
    argv = {"command": sys.executable, "args": [str(script)]}
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", **argv}}


COUNTING = """
count = pathlib.Path(__file__).with_suffix(".count")
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
status = {"token": f"t{number}", "expirationTimestamp": EXPIRES}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1beta1", "kind": "ExecCredential", "status": status}))
"""


def test_a_plugin_makes_credentials_and_renews_them_when_they_expire(
    api: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path
) -> None:
    kubeconfig(api.url, plugin(tmp_path, "EXPIRES = '2020-01-01T00:00:00Z'" + COUNTING))
    made = connect()
    made.request("GET", PODS)
    made.request("GET", PODS)
    assert [r.headers["Authorization"] for r in api.requests] == ["Bearer t2", "Bearer t3"]


def test_refused_credentials_are_renewed_once(api: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path) -> None:
    kubeconfig(api.url, plugin(tmp_path, "EXPIRES = '2999-01-01T00:00:00Z'" + COUNTING))
    made = connect()
    api.refuse = lambda r: None if r.headers["Authorization"] == "Bearer t2" else (401, {"message": "no"}, {})
    made.request("GET", PODS)
    assert [r.headers["Authorization"] for r in api.requests] == ["Bearer t1", "Bearer t2"]
    refusing(api, 401, {"message": "expired"})
    with pytest.raises(CredentialsError, match=r"does not accept the credentials \(expired\)"):
        made.request("GET", PODS)
    assert len(api.requests) == 4


def test_a_plugin_that_fails_is_one_line(
    api: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kubeconfig(api.url, plugin(tmp_path, "sys.stderr.write('token has\\nexpired'); sys.exit(1)"))
    with pytest.raises(CredentialsError, match=r"plugin failed .*token has expired") as error:
        connect()
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""
    kubeconfig(api.url, {"exec": {"apiVersion": "v1", "command": "/no/such/plugin"}})
    with pytest.raises(CredentialsError, match=r'"/no/such/plugin", which is not installed'):
        connect()
    assert api.requests == []


def test_missing_kubeconfig_entries_are_named(
    api: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kubeconfig(api.url)
    with pytest.raises(NotFoundError, match='no usable context "other" in the kubeconfig'):
        connect("other")
    for text in ("[]", "{", "a: b", ""):
        path.write_text(text)
        with pytest.raises(ClusterError, match="kubeconfig"):
            connect()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(NotFoundError, match=r"there is no kubeconfig at .*absent"):
        connect()


def test_a_clusters_proxy_is_used(api: FakeApi, kubeconfig: WriteKubeconfig) -> None:
    kubeconfig("http://far-away.invalid", cluster={"proxy-url": api.url})
    assert connect().request("GET", PODS)["items"] == []


def test_a_stream_ends_when_another_thread_closes_it(api: FakeApi, connection: Connection) -> None:
    api.put(f"{PODS}/a", {"metadata": {"name": "a"}})
    stream = connection.stream(PODS, {"watch": "true"})
    lines: list[bytes] = []
    got_one = threading.Event()

    def read() -> None:
        for line in stream:
            lines.append(line)
            got_one.set()

    reader = threading.Thread(target=read)
    reader.start()
    got_one.wait()
    stream.close()
    reader.join()
    assert len(lines) == 1
    stream.close()  # again is harmless


def test_an_unread_stream_is_closed_all_the_same(api: FakeApi, connection: Connection) -> None:
    stream = connection.stream(PODS, {"watch": "true"})
    stream.close()
    assert list(stream) == []
    del stream  # an open socket would be an error here
    gc.collect()


def test_a_stream_that_breaks_says_so_and_keeps_its_whole_lines(api: FakeApi, connection: Connection) -> None:
    api.put(f"{PODS}/a", {"metadata": {"name": "a"}})
    api.say("a", *(f"line {n}" for n in range(5)))
    api.logs["a"].cut_after = [3]
    stream = iter(connection.stream(f"{PODS}/a/log", {"follow": "true"}))
    lines = [next(stream) for _ in range(3)]
    with pytest.raises(UnreachableError, match="ended its response early"):
        next(stream)
    assert [line.rpartition(b" ")[2] for line in lines] == [b"0\n", b"1\n", b"2\n"]


def test_a_long_line_comes_in_pieces(api: FakeApi, connection: Connection) -> None:
    api.put(f"{PODS}/a", {"metadata": {"name": "a"}})
    api.say("a", "x" * 300_000)
    pieces = list(connection.stream(f"{PODS}/a/log", {}, max_line_bytes=100_000))
    assert [len(piece) for piece in pieces[:-1]] == [100_000] * (len(pieces) - 1)
    assert b"".join(pieces).endswith(b"xx\n")


@pytest.mark.parametrize("name", ["..", ".", "a/b", "%2e%2e", "../../nodes"])
def test_a_name_cannot_lead_elsewhere(name: str) -> None:
    with pytest.raises(NotFoundError, match="cannot be the name"):
        resource_path("v1", "default", "pods", name)
    with pytest.raises(NotFoundError, match="cannot be the name"):
        resource_path("v1", name, "pods")


def test_paths() -> None:
    assert resource_path("v1", None, "nodes", "a b") == "/api/v1/nodes/a%20b"
    assert resource_path("apps/v1", "x", "deployments", "d", "status") == (
        "/apis/apps/v1/namespaces/x/deployments/d/status"
    )
