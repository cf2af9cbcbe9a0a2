"""A small API server with jobs to list, which answers at once, so that only the command line's own time is left.

It is the one of the tests, over TLS, with the discovery that kubectl needs before its first request.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.programs import installed_environment
from elasticctl.api.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION, worker_name
from elasticctl.settings import contexts
from elasticctl.settings.contexts import Config, Context
from elasticctl_protocol import variables
from tests.support.certificates import issue, pem, server_context
from tests.support.fakeapi import FakeApi, Object, Request
from tests.support.jobs import shell_job

JOBS = f"/apis/{API_VERSION}/namespaces/default/{PLURAL}"
NAME = "api.benchmark"
_VERBS = ["get", "list", "watch", "create", "patch", "delete"]


def discovery() -> dict[str, Object]:
    """Return path -> what kubectl reads there before it knows what a job or a pod is."""
    group = {"groupVersion": API_VERSION, "version": VERSION}
    jobs = {"name": PLURAL, "singularName": "elasticjob", "namespaced": True, "kind": KIND, "verbs": _VERBS}
    return {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [{"name": GROUP, "versions": [group], "preferredVersion": group}],
        },
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        f"/apis/{API_VERSION}": {"kind": "APIResourceList", "groupVersion": API_VERSION, "resources": [jobs]},
    }


class Server(FakeApi):
    """The tests' server, with the discovery that kubectl needs before its first request."""

    _known = discovery()

    def answer(self, request: Request) -> tuple[int, Any]:
        if request.path in self._known:
            return 200, self._known[request.path]
        status, content = super().answer(request)
        if request.method == "GET" and isinstance(content, dict) and "items" in content:
            content = {"kind": f"{KIND}List", "apiVersion": API_VERSION, **content}
        return status, content


def running_job(name: str) -> Object:
    """Return a job as a controller leaves it after some hours: what a list has to carry."""
    job: Object = shell_job(name, "python train.py", 4, minReplicas=1, maxReplicas=8)
    now = time.time()

    def at(ago_s: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - ago_s))

    job["metadata"] |= {"uid": name, "creationTimestamp": at(7200)}
    workers = [{"name": worker_name(name, i), "uid": f"{name}-{i}", "index": i, "phase": "Running"} for i in range(4)]
    names = [worker["name"] for worker in workers]
    job["status"] = {
        "phase": "Running",
        "active": 4,
        "desired": 4,
        "startTime": at(7190),
        "workers": [{**worker, "startedAt": at(7180), "node": f"node-{worker['index']}"} for worker in workers],
        "restarts": {"Preempted": 10},
        "interruptions": [
            {"at": at(600 * n + 60), "worker": names[n % 4], "cause": "Preempted", "recoveryS": 2.5, "stepsRedone": 0}
            for n in range(10, 0, -1)
        ],
        "generations": [
            {"generation": 11 - n, "workers": names, "formedAt": at(600 * n), "firstStepAt": at(600 * n - 2)}
            for n in range(10, 0, -1)
        ],
        "progress": {"at": at(0), "step": 12_000, "totalSteps": 90_000, "epoch": 3, "samplesPerS": 8123.0},
        "checkpoint": {"step": 11_990, "at": at(5), "committed": 700, "url": f"s3://bucket/{name}"},
    }
    return job


def fill(server: Server, jobs: int) -> None:
    """Create that many jobs."""
    for number in range(jobs):
        name = f"job-{number:04}"
        server.put(f"{JOBS}/{name}", running_job(name))


@contextmanager
def serving(home: Path) -> Iterator[tuple[Server, Mapping[str, str]]]:
    """Serve; yield the server, and the environment in which elasticctl and kubectl use it. `home`: for their files."""
    authority = issue("the benchmark's authority")
    server = Server(server_context(pem(issue(NAME, authority))))
    trusted = base64.b64encode(pem(authority).certificate).decode()
    cluster = {"server": server.url, "tls-server-name": NAME, "certificate-authority-data": trusted}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "me", "namespace": "default"}}],
        "clusters": [{"name": "bench", "cluster": cluster}],
        "users": [{"name": "me", "user": {"token": "none"}}],
    }
    path = home / "kubeconfig"
    path.write_text(json.dumps(kubeconfig))
    context = Context("bench", contexts.KUBERNETES)
    contexts.save_config(Config("bench", (Context(contexts.LOCAL, contexts.LOCAL), context)), home / "config.yaml")
    # kubectl caches its discovery below HOME.
    environ = {**installed_environment(), variables.HOME: str(home), "KUBECONFIG": str(path), "HOME": str(home)}
    try:
        yield server, environ
    finally:
        server.close()
