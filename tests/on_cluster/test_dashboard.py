"""The dashboard of many as a Deployment on a real cluster: two people, with rights in two namespaces."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.observed.changes import changes_of
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.cluster.kube.install import Installer, path_of
from elasticctl.dashboard.access import TOKEN_HEADER
from elasticctl.dashboard.in_cluster import COOKIE
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import Connection, resource_path
from tests.on_cluster.audit import Audit, need_audit_log
from tests.on_cluster.commands import kubectl
from tests.on_cluster.installing import dashboard
from tests.on_cluster.waiting import wait_until
from tests.support.jobs import shell_job

pytestmark = pytest.mark.each_release

ANSWER_S = 90
"""The dashboard asks an API server that shares a machine with all that it serves."""
HOME, ML, NLP = "team-dashboard", "team-ml", "team-nlp"
JO, MARIA = f"system:serviceaccount:{ML}:jo", f"system:serviceaccount:{NLP}:maria"


@dataclass(slots=True)
class Browser:
    """Somebody who has logged in; the cookie is sent along without TLS, which no browser would do."""

    address: str
    cookie: str = ""

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        """A request, its status and the JSON of its answer."""
        connection = http.client.HTTPConnection(self.address, timeout=ANSWER_S)
        given = {"Cookie": self.cookie, "Origin": f"http://{self.address}", **headers}
        connection.request(method, path, None if body is None else json.dumps(body), given)
        answer = connection.getresponse()
        self.cookie = (answer.getheader("Set-Cookie") or self.cookie).partition(";")[0]
        found = answer.status, json.loads(answer.read() or b"null")
        connection.close()
        return found

    def log_in(self, token: str) -> tuple[int, dict[str, Any]]:
        return self.ask("POST", "/login", {"token": token})

    def news(self, base: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The stream of news, each with its name."""
        connection = http.client.HTTPConnection(self.address, timeout=ANSWER_S)
        connection.request("GET", f"{base}events", None, {"Cookie": self.cookie})
        answer, name = connection.getresponse(), ""
        try:
            for line in answer:
                key, _, value = line.decode().rstrip().partition(": ")
                name = value if key == "event" else name
                if key == "data":
                    yield name, json.loads(value)
        finally:
            connection.close()

    def hears(self, base: str, wanted: str, said: str = "") -> dict[str, Any]:
        """The next news of this name that says so."""
        return next(data for name, data in self.news(base) if name == wanted and said in data.get("message", ""))


def apply(item: dict[str, Any]) -> None:
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=json.dumps(item))


@pytest.fixture(scope="module")
def address(crd: None, api: Connection) -> Iterator[str]:
    """The dashboard runs, in a namespace that takes restricted pods alone; yields where."""
    need_audit_log()
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    for name, labels in ((HOME, restricted), (ML, {}), (NLP, {})):
        apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    for role in installation.manifests():
        if role["metadata"]["name"] in ("elasticjobs-edit", "elasticjobs-view"):
            apply(role)
    for name, namespace, role in (("jo", ML, "view"), ("maria", NLP, "edit")):
        account = f"--serviceaccount={namespace}:{name}"
        kubectl("create", "serviceaccount", name, "-n", namespace)
        kubectl("create", "rolebinding", name, "-n", namespace, f"--clusterrole={role}", account)
        wait_until(lambda user=f"system:serviceaccount:{namespace}:{name}", where=namespace: _may_list(user, where))
    cluster = KubeCluster(api)
    for name, namespace in (("digits", ML), ("words", NLP)):
        cluster.create_job(shell_job(name, "true", namespace=namespace, maxReplicas=4))
    wanted = dashboard(HOME, ["--allow-changes"])
    installer = Installer(api, print)
    try:
        installer.apply(wanted)
        installer.await_available(HOME, 480, installation.DASHBOARD)
        found = str(api.request("GET", path_of(wanted[1]))["spec"]["clusterIP"])
        wait_until(lambda: _answers(found))  # nodes learn of a Service's pods some time after those are ready
        yield found
    finally:
        print(kubectl("logs", "-n", HOME, f"deployment/{installation.DASHBOARD}", "--tail", "80"))
        for namespace in (HOME, ML, NLP):
            with suppress(NotFoundError, ConflictError):
                api.request("DELETE", resource_path("v1", None, "namespaces", namespace))


def _answers(address: str) -> bool:
    with suppress(OSError):
        socket.create_connection((address, 80), ANSWER_S).close()
        return True
    return False


def _may_list(user: str, namespace: str) -> bool:
    """Whether the cluster has added the rights to jobs to the roles `view` and `edit`."""
    try:
        kubectl("auth", "can-i", "list", "elasticjobs", "-n", namespace, "--as", user)
    except AssertionError:
        return False
    return True


@pytest.fixture
def people(address: str) -> tuple[Browser, Browser]:
    """Jo, who may see the jobs of one namespace, and Maria, who may change those of another; both have logged in."""
    jo, maria = Browser(address), Browser(address)
    for browser, name, namespace in ((jo, "jo", ML), (maria, "maria", NLP)):
        status, body = browser.log_in(kubectl("create", "token", name, "-n", namespace).strip())
        assert (status, body) == (200, {"user": f"system:serviceaccount:{namespace}:{name}"})
    return jo, maria


def test_each_sees_what_the_cluster_lets_them_see(people: tuple[Browser, Browser]) -> None:
    for browser, own, name, others, user in (
        (people[0], ML, "digits", NLP, JO),
        (people[1], NLP, "words", ML, MARIA),
    ):
        assert [row["name"] for row in browser.hears(f"/in/{own}/", "jobs")["rows"]] == [name]
        refused = f'User "{user}" cannot list resource "elasticjobs"'
        assert f'in the namespace "{others}"' in browser.hears(f"/in/{others}/", "trouble", refused)["message"]
        assert "at the cluster scope" in browser.hears("/", "trouble", refused)["message"]
        status, _ = browser.ask("GET", f"/in/{own}/jobs/{own}/{name}")
        assert status == 200


def test_a_wrong_token_lets_nobody_in(address: str) -> None:
    unknown = Browser(address)
    status, body = unknown.log_in("eyJhbGciOiJSUzI1NiJ9.e30.AAAA")
    assert (status, "does not accept this token" in body["error"]) == (401, True)
    assert unknown.ask("GET", f"/in/{ML}/events")[0] == 401


def test_a_change_takes_the_persons_own_right_and_bears_their_name(
    people: tuple[Browser, Browser], api: Connection
) -> None:
    jo, maria = people
    cluster = KubeCluster(api)
    for browser, namespace, name in ((jo, ML, "digits"), (maria, NLP, "words")):
        token = browser.hears(f"/in/{namespace}/", "hello")["token"]
        uid = cluster.get_job(namespace, name)["metadata"]["uid"]
        status, body = browser.ask(
            "POST",
            f"/in/{namespace}/jobs/{namespace}/{name}/scale",
            {"uid": uid, "workers": 3},
            **{TOKEN_HEADER: token},
        )
        replicas = cluster.get_job(namespace, name)["spec"]["replicaSpecs"]["Worker"].get("replicas", 1)
        if browser is jo:
            assert status == 403
            assert f'User "{JO}" cannot patch resource "elasticjobs"' in body["error"]
            assert replicas == 1
        else:
            assert (status, body, replicas) == (200, {}, 3)
    (change,) = changes_of(cluster.get_job(NLP, "words"))
    assert (change.by, change.verb) == (MARIA, "scale")
    (event,) = [item for item in cluster.list_events(NLP, "words") if item["reason"] == "Changed"]
    assert f"scale by {MARIA} with dashboard" in event["message"]
    (record,) = wait_until(_records)  # a node's log has a line some time after it was printed
    assert (record["by"], record["namespace"], record["name"]) == (MARIA, NLP, "words")


def _records() -> list[dict[str, Any]]:
    """What the dashboard has logged of changes."""
    printed = kubectl("logs", "-n", HOME, f"deployment/{installation.DASHBOARD}")
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_the_pod_itself_has_no_token_and_asks_for_nothing(people: tuple[Browser, Browser], api: Connection) -> None:
    itself, jo = Audit(f"system:serviceaccount:{HOME}:{installation.DASHBOARD}"), Audit(JO)
    people[0].hears(f"/in/{ML}/", "jobs")
    (pod,) = api.request("GET", resource_path("v1", HOME, "pods"))["items"]
    volumes = json.dumps(pod["spec"]["volumes"])
    assert "serviceAccountToken" not in volumes
    assert "secret" not in volumes
    assert ("elastic.pytorch.org", "elasticjobs", "list") in wait_until(jo.read)
    assert itself.read() == set()


def test_a_person_whom_the_cluster_knows_no_more_is_logged_out(people: tuple[Browser, Browser]) -> None:
    jo = people[0]
    jo.hears(f"/in/{ML}/", "jobs")
    assert jo.ask("GET", "/session")[0] == 200
    kubectl("delete", "serviceaccount", "jo", "-n", ML)
    # The API server keeps what it has found out about a token for some seconds.
    wait_until(lambda: jo.ask("GET", f"/in/{ML}/jobs/{ML}/digits")[0] == 401)
    assert jo.ask("GET", "/session")[0] == 401
    assert jo.cookie.startswith(COOKIE)
