"""A small API server in a process of its own, for `cli.py`: jobs to list, and workers that print on request.

It is the one of the tests, over TLS, with the discovery that kubectl needs before its first request. Standard input has
one JSON object per line: {"jobs": N} creates N jobs, {"talk": {"workers": W, "lines": L, "every_s": S, "settle_s": T}}
makes W workers of the job `talks` print L lines each, starting T seconds later. The first line of output is a
kubeconfig's entry for it, as JSON; another line follows when a command is done.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from typing import Any

from elasticctl.api.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION, worker_labels, worker_name
from tests.support.certificates import issue, pem, server_context
from tests.support.fakeapi import FakeApi, Object, Request
from tests.support.jobs import shell_job

JOBS = f"/apis/{API_VERSION}/namespaces/default/{PLURAL}"
PODS = "/api/v1/namespaces/default/pods"
_VERBS = ["get", "list", "watch", "create", "patch", "delete"]


def discovery() -> dict[str, Object]:
    """Return path -> what kubectl reads there before it knows what a job or a pod is."""
    group = {"groupVersion": API_VERSION, "version": VERSION}
    pods = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": _VERBS}
    jobs = {"name": PLURAL, "singularName": "elasticjob", "namespaced": True, "kind": KIND, "verbs": _VERBS}
    return {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [{"name": GROUP, "versions": [group], "preferredVersion": group}],
        },
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [pods]},
        f"/apis/{API_VERSION}": {"kind": "APIResourceList", "groupVersion": API_VERSION, "resources": [jobs]},
    }


class Server(FakeApi):
    """The tests' server, with discovery for kubectl."""

    _known = discovery()

    def answer(self, request: Request) -> tuple[int, Any]:
        if request.path in self._known:
            return 200, self._known[request.path]
        status, content = super().answer(request)
        if request.method == "GET" and isinstance(content, dict) and "items" in content:
            kind, version = ("PodList", "v1") if request.path.endswith("/pods") else (f"{KIND}List", API_VERSION)
            content = {"kind": kind, "apiVersion": version, **content}
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


def pod(index: int) -> Object:
    """Return a running worker of the job `talks`."""
    name = worker_name("talks", index)
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "talks", "uid": "talks", "controller": True}
    metadata = {
        "name": name,
        "namespace": "default",
        "labels": worker_labels("talks", index),
        "ownerReferences": [owner],
    }
    running = {"name": "elasticjob-worker", "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    spec = {"containers": [{"name": "elasticjob-worker"}]}
    status = {"phase": "Running", "containerStatuses": [running]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def fill(server: Server, jobs: int) -> None:
    """Create that many jobs."""
    for number in range(jobs):
        name = f"job-{number:04}"
        server.put(f"{JOBS}/{name}", running_job(name))


def talk(server: Server, workers: int, lines: int, every_s: float, settle_s: float) -> None:
    """Have each worker print its lines, in step, and exit; the job has then succeeded."""
    began = time.monotonic() + settle_s
    for number in range(lines):
        time.sleep(max(0.0, began + number * every_s - time.monotonic()))
        for index in range(workers):
            server.say(worker_name("talks", index), f"line {number}", end=number == lines - 1)
    job = running_job("talks")
    job["status"]["phase"] = "Succeeded"
    server.put(f"{JOBS}/talks", job)
    for index in range(workers):
        ended = pod(index)
        ended["status"] = {"phase": "Succeeded"}
        server.put(f"{PODS}/{worker_name('talks', index)}", ended)


def main() -> None:
    authority, name = issue("the benchmark's authority"), "bench.internal"
    server = Server(server_context(pem(issue(name, authority))))
    trusted = base64.b64encode(pem(authority).certificate).decode()
    entry = {"server": server.url, "tls-server-name": name, "certificate-authority-data": trusted}
    print(json.dumps(entry), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "jobs" in command:
            fill(server, command["jobs"])
        if "talk" in command:
            server.put(f"{JOBS}/talks", running_job("talks"))
            for index in range(command["talk"]["workers"]):
                server.put(f"{PODS}/{worker_name('talks', index)}", pod(index))
            threading.Thread(target=talk, args=(server,), kwargs=command["talk"], daemon=True).start()
        print("done", flush=True)
    server.close()


if __name__ == "__main__":
    main()
