"""A cluster that knows people by their tokens, and a dashboard for a team, as a pod would run it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elasticctl.cluster.kube.user import log_in
from elasticctl.dashboard.in_cluster import AccessRules, ClusterDashboard
from elasticctl.kubeapi import connection, credentials
from tests.support.certificates import issue, pem, server_context
from tests.support.dashboard.serving import App, running
from tests.support.fakeapi import FakeApi, Request
from tests.support.job_samples import job

JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/{}/elasticjobs/{}"
_OF_JOBS = re.compile(r".*/v1alpha1/(?:namespaces/(?P<namespace>[^/]+)/)?elasticjobs(?:/.*)?")


@dataclass(slots=True)
class Guest:
    """Somebody by name: the namespaces whose jobs they may see, and those where they may change them ("*": all)."""

    user: str
    sees: set[str]
    changes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Team:
    """An API server, and people by token; `find` says who shows one. `shown` are the tokens that it was shown."""

    api: FakeApi
    people: dict[str, Guest]
    find: Callable[[str], Guest | None]
    shown: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.api.refuse = self._judge

    def _judge(self, request: Request) -> tuple[int, Any, dict[str, str]] | None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.shown.append(token)
        person = self.find(token)
        if person is None:
            return 401, {"message": "Unauthorized"}, {}
        if request.path.endswith("/selfsubjectreviews"):
            return 201, {"status": {"userInfo": {"username": person.user}}}, {}
        found = _OF_JOBS.fullmatch(request.path)
        allowed = person.sees if request.method == "GET" else person.changes
        if found is None or {"*", found["namespace"]} & allowed:
            return None
        verb = {"GET": "list", "PATCH": "patch"}[request.method]
        where = f'in the namespace "{found["namespace"]}"' if found["namespace"] else "at the cluster scope"
        said = f'elasticjobs is forbidden: User "{person.user}" cannot {verb} resource "elasticjobs" {where}'
        return 403, {"message": said}, {}

    def add(self, name: str, namespace: str) -> dict[str, Any]:
        """A job in a namespace, which runs."""
        made = job(name)
        made["metadata"] |= {"namespace": namespace, "uid": f"uid-{name}"}
        return self.api.put(JOBS.format(namespace, name), made)

    def job(self, namespace: str, name: str) -> dict[str, Any]:
        """A job as the cluster has it."""
        return self.api.objects[JOBS.format(namespace, name)]


@contextmanager
def team(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    people: dict[str, Guest],
    find: Callable[[str], Guest | None] | None = None,
) -> Iterator[Team]:
    """A cluster, of which this process is a pod without a token; `find` knows its people otherwise than by `people`."""
    certificate = issue("localhost")
    (folder / "ca.crt").write_bytes(pem(certificate).certificate)
    for module in (credentials, connection):
        monkeypatch.setattr(module, "SERVICE_ACCOUNT", folder)
    api = FakeApi(server_context(pem(certificate)))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.url.rpartition(":")[2])
    try:
        yield Team(api, people, find or people.get)
    finally:
        api.close()


def dashboard(**rules: bool) -> ClusterDashboard:
    """The dashboard of many."""
    return ClusterDashboard(log_in, AccessRules(**rules), poll_s=0.02)


@contextmanager
def served(page: App) -> Iterator[str]:
    """Serve it from a thread; yields its address."""
    with running(page) as host:
        yield host.link
