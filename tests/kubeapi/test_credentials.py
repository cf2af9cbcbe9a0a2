"""kubeconfig as kubectl reads it: certificates of a real server and its clients, tokens, proxies, several files."""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import CredentialsError, NotFoundError, UnreachableError
from elasticctl.kubeapi import credentials
from elasticctl.kubeapi.connection import Connection, connect, open_transport
from elasticctl.kubeapi.credentials import from_kubeconfig, from_service_account
from tests.support.certificates import issue, pem, server_context
from tests.support.fakeapi import FakeApi
from tests.support.kube import WriteKubeconfig

PODS = "/api/v1/namespaces/default/pods"


AUTHORITY = issue("the lab's authority")
SERVER, CLIENT, UNKNOWN_CLIENT = (
    pem(issue("lab.internal", AUTHORITY)),
    pem(issue("me", AUTHORITY)),
    pem(issue("nobody")),
)


def data(value: bytes) -> str:
    return base64.b64encode(value).decode()


@pytest.fixture
def secure() -> Iterator[FakeApi]:
    """The API server over TLS: it is `lab.internal`, and wants to see a certificate of its own authority."""
    server = FakeApi(server_context(SERVER, clients_from=pem(AUTHORITY)))
    yield server
    server.close()


CA = {"certificate-authority-data": data(pem(AUTHORITY).certificate), "tls-server-name": "lab.internal"}
ME = {"client-certificate-data": data(CLIENT.certificate), "client-key-data": data(CLIENT.key)}


def ask(connection: Connection) -> Any:
    return connection.request("GET", PODS)["items"]


def test_certificates_in_the_file(
    secure: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig(secure.url, user=ME, cluster=CA)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    assert ask(connect()) == []
    assert list((tmp_path / "scratch").iterdir()) == []  # no key stays behind


def test_certificates_in_files_next_to_it(secure: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path) -> None:
    (tmp_path / "me.crt").write_bytes(CLIENT.certificate)
    (tmp_path / "me.key").write_bytes(CLIENT.key)
    cluster = {"certificate-authority": "ca.pem", "tls-server-name": "lab.internal"}
    (tmp_path / "ca.pem").write_bytes(pem(AUTHORITY).certificate)
    kubeconfig(secure.url, user={"client-certificate": "me.crt", "client-key": "me.key"}, cluster=cluster)
    assert ask(connect()) == []


@pytest.mark.parametrize(
    ("cluster", "user"),
    [
        ({"tls-server-name": "lab.internal"}, ME),  # not of an authority that this machine knows
        ({**CA, "tls-server-name": "other.internal"}, ME),
        ({"certificate-authority-data": CA["certificate-authority-data"]}, ME),  # 127.0.0.1 is not its name
        (CA, {}),
        (
            CA,
            {"client-certificate-data": data(UNKNOWN_CLIENT.certificate), "client-key-data": data(UNKNOWN_CLIENT.key)},
        ),
    ],
)
def test_certificates_that_do_not_fit_are_no_answer(
    secure: FakeApi, kubeconfig: WriteKubeconfig, cluster: dict[str, Any], user: dict[str, Any]
) -> None:
    kubeconfig(secure.url, user=user, cluster=cluster)
    with pytest.raises(UnreachableError):
        ask(connect())
    assert secure.requests == []


def test_skipping_certificate_checks_must_be_explicit(secure: FakeApi, kubeconfig: WriteKubeconfig) -> None:
    kubeconfig(secure.url, user=ME, cluster={"insecure-skip-tls-verify": True})
    assert ask(connect()) == []


def test_a_plugin_may_make_certificates(secure: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path) -> None:
    status = {"clientCertificateData": CLIENT.certificate.decode(), "clientKeyData": CLIENT.key.decode()}
    made = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    (tmp_path / "made.json").write_text(json.dumps(made))
    code = "import json, os, sys; server = json.loads(os.environ['KUBERNETES_EXEC_INFO'])['spec']['cluster']['server'];"
    code += "assert server.startswith(os.environ['SCHEME']); print(open('made.json').read())"
    plugin = {
        "apiVersion": made["apiVersion"],
        "command": sys.executable,
        "args": ["-c", code.replace("made.json", str(tmp_path / "made.json"))],
        "env": [{"name": "SCHEME", "value": "https"}],
        "provideClusterInfo": True,
    }
    kubeconfig(secure.url, user={"exec": plugin}, cluster=CA)
    assert ask(connect()) == []


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("print('hello')", "its output is not an ExecCredential"),
        ("""print('{"apiVersion": "v9", "status": {"token": "t"}}')""", 'its output is of the version "v9", not "v1"'),
        ("""print('{"apiVersion": "v1", "status": {}}')""", "contains no credentials"),
        ("raise SystemExit(3)", r"\(exit code 3\)"),
    ],
)
def test_a_plugin_without_credentials_is_an_error(
    api: FakeApi, kubeconfig: WriteKubeconfig, printed: str, said: str
) -> None:
    kubeconfig(api.url, user={"exec": {"apiVersion": "v1", "command": sys.executable, "args": ["-c", printed]}})
    with pytest.raises(CredentialsError, match=said):
        connect()


def test_a_plugin_that_is_not_installed_says_where_it_is_from(api: FakeApi, kubeconfig: WriteKubeconfig) -> None:
    kubeconfig(api.url, user={"exec": {"apiVersion": "v1", "command": "no-such-plugin", "installHint": "Get it at x"}})
    with pytest.raises(
        CredentialsError, match=r'logs in with "no-such-plugin", which is not installed. FIX: Get it at x$'
    ):
        connect()


def test_a_token_in_a_file_is_read_again(
    api: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("first\n")
    kubeconfig(api.url, user={"tokenFile": "token", "token": "old"})
    made = connect()
    ask(made)
    (tmp_path / "token").write_text("second\n")
    ask(made)
    monkeypatch.setattr(credentials, "TOKEN_KEPT_S", -1.0)
    ask(made)
    assert [request.headers["Authorization"][7:] for request in api.requests] == ["first", "first", "second"]
    (tmp_path / "token").unlink()
    with pytest.raises(CredentialsError, match="the token of the credentials cannot be read"):
        ask(made)


def test_a_token_that_no_header_can_hold_is_an_error(api: FakeApi, kubeconfig: WriteKubeconfig) -> None:
    kubeconfig(api.url, user={"token": "secret\n"})
    ask(connect())
    assert api.requests[-1].headers["Authorization"] == "Bearer secret"
    kubeconfig(api.url, user={"token": "sec\nret"})
    with pytest.raises(CredentialsError, match="characters that no HTTP header can hold") as caught:
        ask(connect())
    assert "ret" not in str(caught.value)


def test_a_name_and_a_password(api: FakeApi, kubeconfig: WriteKubeconfig) -> None:
    kubeconfig(api.url, user={"username": "me", "password": "x"})
    ask(connect())
    assert api.requests[0].headers["Authorization"] == f"Basic {data(b'me:x')}"


def test_a_pods_own_account(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "SERVICE_ACCOUNT", tmp_path)
    host, port = api.url.removeprefix("http://").split(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    with pytest.raises(CredentialsError, match="this pod's service account cannot be used"):
        from_service_account()
    (tmp_path / "token").write_text("mine")
    (tmp_path / "ca.crt").write_bytes(pem(AUTHORITY).certificate)
    found = from_service_account()
    assert (found.server, found.authorization()) == (f"https://{host}:{port}", "Bearer mine")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert from_service_account().server == f"https://[fd00::1]:{port}"


def test_a_proxy_of_the_environment(api: FakeApi, kubeconfig: WriteKubeconfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", api.url)
    kubeconfig("http://far-away.invalid")
    assert ask(connect()) == []
    monkeypatch.setenv("http_proxy", api.url.removeprefix("http://"))
    assert ask(connect()) == []
    monkeypatch.setenv("no_proxy", "far-away.invalid")
    with pytest.raises(UnreachableError):
        ask(connect())


def test_a_proxy_that_asks_for_a_login(api: FakeApi, kubeconfig: WriteKubeconfig) -> None:
    kubeconfig("http://far-away.invalid", cluster={"proxy-url": api.url.replace("//", "//me:p%40ss@")})
    ask(connect())
    headers = {name.lower(): value for name, value in api.requests[0].headers.items()}
    assert headers["proxy-authorization"] == f"Basic {data(b'me:p@ss')}"


@pytest.mark.parametrize("proxy", ["socks5://me:hush@127.0.0.1:1", "http://me:hush@[::1", "http://me:hush@:x"])
def test_an_error_about_a_proxy_has_no_password(kubeconfig: WriteKubeconfig, proxy: str) -> None:
    kubeconfig("http://far-away.invalid", cluster={"proxy-url": proxy})
    with pytest.raises(CredentialsError, match="proxy-url in the kubeconfig") as refused:
        connect()
    assert "hush" not in str(refused.value)


def test_the_first_of_several_files_counts(api: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path) -> None:
    kubeconfig(api.url)
    other = tmp_path / "other"
    other.write_text(
        json.dumps(
            {
                "current-context": "elsewhere",
                "contexts": [
                    {"name": "lab", "context": {"cluster": "gone"}},
                    {"name": "elsewhere", "context": {"cluster": "lab", "user": "none"}},
                ],
            }
        )
    )
    found = from_kubeconfig((tmp_path / "kubeconfig", tmp_path / "absent", other))
    assert found is not None
    assert (found.server, found.authorization()) == (api.url, "Bearer t1")
    elsewhere = from_kubeconfig((tmp_path / "kubeconfig", other), "elsewhere")
    assert elsewhere is not None
    assert (elsewhere.server, elsewhere.authorization()) == (api.url, "")
    assert open_transport(elsewhere).server == api.url
    with pytest.raises(NotFoundError, match=r'no usable current context .*\(it has no cluster "lab"\)'):
        from_kubeconfig((other,))


def test_logins_of_the_old_kind_are_left_to_the_package(api: FakeApi, kubeconfig: WriteKubeconfig) -> None:
    parts = (json.dumps(part).encode() for part in ({"alg": "none"}, {"exp": 9_999_999_999}))
    token = ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), "x"])
    kubeconfig(api.url, user={"auth-provider": {"name": "oidc", "config": {"id-token": token}}})
    assert ask(connect()) == []
    assert api.requests[0].headers["Authorization"] == f"Bearer {token}"


def test_without_that_package_it_is_named(
    api: FakeApi, kubeconfig: WriteKubeconfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig(api.url, user={"auth-provider": {"name": "oidc"}})
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delitem(sys.modules, "kubernetes.client", raising=False)
    with pytest.raises(CredentialsError, match=r"pip install 'elasticctl\[kube\]'"):
        connect()


@pytest.mark.parametrize(
    ("user", "cluster"),
    [
        ({"client-certificate-data": "%%%", "client-key-data": ""}, {}),
        ({"client-certificate": "/no/such/file"}, {}),
        ({}, {"certificate-authority-data": data(b"no certificate")}),
        ({"exec": {"command": 3}}, {}),
        ({"exec": {"apiVersion": "v1"}}, {}),
        ({"exec": {"apiVersion": "v1", "command": "true", "env": [{}]}}, {}),
    ],
)
def test_a_file_of_another_shape_is_one_line(
    kubeconfig: WriteKubeconfig, user: dict[str, Any], cluster: dict[str, Any]
) -> None:
    kubeconfig("https://127.0.0.1:1", user=user, cluster=cluster)
    with pytest.raises(CredentialsError, match="kubeconfig") as error:
        connect()
    assert "\n" not in str(error.value)
