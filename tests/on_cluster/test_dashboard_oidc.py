"""The dashboard of many behind a proxy, with an API server that takes ID tokens of a real OIDC server.

That API server is one more of the lab's, on the same etcd; the proxy is the tests' own (`support.dashboard.oidc`).
"""

from __future__ import annotations

import http.cookiejar
import json
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.observed.changes import changes_of
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.dashboard.access import TOKEN_HEADER
from elasticctl.kubeapi import connection, credentials
from elasticctl.kubeapi.connection import Connection, resource_path
from tests.on_cluster.commands import LAB_HOME, kubectl, need_lab
from tests.on_cluster.waiting import wait_until
from tests.support.certificates import issue, pem
from tests.support.dashboard.oidc import CLIENT, Proxy, provider
from tests.support.dashboard.team import dashboard, served
from tests.support.jobs import shell_job
from tests.support.ports import free_port

SPACE = "oidc-ml"
RIGHTS = {"jo@example.org": ("list", "get", "patch"), "maria@example.org": ("list", "get")}


@contextmanager
def api_server(issuer: str, certificate: Path, log: Path) -> Iterator[int]:
    """One more API server, which knows people by the issuer's ID tokens; yields its port."""
    pid = int((LAB_HOME / "pid" / "kube-apiserver").read_text().split()[0])
    program, *given = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    port = free_port("0.0.0.0")
    mine = {
        "--secure-port": str(port),
        "--endpoint-reconciler-type": "none",  # pods go on with the other one
        "--audit-log-path": str(log.with_suffix(".audit")),
        "--oidc-issuer-url": issuer,
        "--oidc-ca-file": str(certificate),
        "--oidc-client-id": CLIENT,
        "--oidc-username-claim": "sub",
        "--oidc-username-prefix": "oidc:",
    }
    argv = [program, *(arg for arg in given if arg.partition("=")[0] not in mine)]
    argv += [f"{name}={value}" for name, value in mine.items()]
    with log.open("wb") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:
        try:
            yield port
        finally:
            process.terminate()


class Person:
    """Somebody with a browser of a kind: it follows redirects, keeps cookies, and fills in the issuer's form."""

    def __init__(self, address: str, trusts: ssl.SSLContext) -> None:
        handlers = (
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()),
            urllib.request.HTTPSHandler(context=trusts),
        )
        self.address, self._opener = address, urllib.request.build_opener(*handlers)

    def log_in(self, name: str) -> None:
        with self._opener.open(f"{self.address}/", timeout=90) as form:
            where = form.url
        with self._opener.open(where, urllib.parse.urlencode({"sub": name}).encode(), timeout=90) as page:
            assert "<title>elasticctl</title>" in page.read().decode()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Origin": self.address, **headers})
        try:
            with self._opener.open(request, timeout=90) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def hears(self, wanted: str) -> dict[str, Any]:
        """The next news of this name, of the namespace."""
        with self._opener.open(f"{self.address}/in/{SPACE}/events", timeout=90) as stream:
            name = ""
            for line in stream:
                key, _, value = line.decode().rstrip().partition(": ")
                name = value if key == "event" else name
                if key == "data" and name == wanted:
                    found: dict[str, Any] = json.loads(value)
                    return found
        raise AssertionError(f"the stream has ended without {wanted}")


@pytest.fixture
def job(crd: None, api: Connection) -> Iterator[str]:
    """A job in a namespace where Jo may change jobs, and Maria may see them; its uid."""
    kubectl("create", "namespace", SPACE)
    try:
        for name, verbs in RIGHTS.items():
            role = name.partition("@")[0]
            kubectl("create", "role", role, "-n", SPACE, f"--verb={','.join(verbs)}", "--resource=elasticjobs")
            kubectl("create", "rolebinding", role, "-n", SPACE, f"--role={role}", f"--user=oidc:{name}")
        made = KubeCluster(api).create_job(shell_job("digits", "true", namespace=SPACE))
        yield str(made["metadata"]["uid"])
    finally:
        api.request("DELETE", resource_path("v1", None, "namespaces", SPACE))


def test_who_logs_in_by_oidc_is_known_to_the_api_server(
    job: str, api: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_lab()
    pair = pem(issue("localhost"))
    certificate = tmp_path / "issuer.pem"
    certificate.write_bytes(pair.certificate + pair.key)
    trusts = ssl.create_default_context(cadata=pair.certificate.decode())
    (tmp_path / "ca.crt").write_bytes((LAB_HOME / "pki" / "ca.crt").read_bytes())
    for module in (credentials, connection):
        monkeypatch.setattr(module, "SERVICE_ACCOUNT", tmp_path)
    with provider(certificate) as issuer, api_server(issuer, certificate, tmp_path / "api.log") as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        with (
            served(dashboard(allow_changes=True, behind_proxy=True)) as upstream,
            served(Proxy(issuer, upstream, trusts)) as address,
        ):
            jo, maria = Person(address, trusts), Person(address, trusts)
            for person, name in ((jo, "jo@example.org"), (maria, "maria@example.org")):
                person.log_in(name)
                # The API server asks the issuer for its keys by and by.
                wait_until(lambda person=person: person.ask("/session")[0] == 200)
                assert person.ask("/session")[1] == {"user": f"oidc:{name}"}
                assert [row["name"] for row in person.hears("jobs")["rows"]] == ["digits"]
            change = f"/in/{SPACE}/jobs/{SPACE}/digits/suspend"
            for person, wanted in ((maria, 403), (jo, 200)):
                token = person.hears("hello")["token"]
                status, body = person.ask(change, {"uid": job}, **{TOKEN_HEADER: token})
                assert status == wanted, body
                if person is maria:
                    assert 'User "oidc:maria@example.org" cannot patch resource "elasticjobs"' in body["error"]
    (made,) = changes_of(KubeCluster(api).get_job(SPACE, "digits"))
    assert (made.by, made.verb) == ("oidc:jo@example.org", "suspend")
