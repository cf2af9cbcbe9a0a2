"""What a project allows, and jobs that keep to it or do not: the same for this project's code and an API server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticctl.cluster.base import Manifest
from elasticctl_protocol import variables
from tests.support.jobs import shell_job

ALLOWED: dict[str, Any] = {
    "priorityClasses": ["batch"],
    "images": ["lab/trainer:dev", "registry.example/team/*"],
    "serviceAccounts": ["default", "trainer"],
    "storage": ["s3://vision/jobs/", "s3://vision/here?endpoint=http://s3.lab:9000", "file:///shared/vision"],
    "nodeTypes": ["g5.xlarge"],
    "priority": 50,
    "usdPerDay": 20.5,
}


@dataclass(frozen=True, slots=True)
class LimitCase:
    """A job in a project that allows only `allowed`; `breach` is part of what is said of it ("": nothing)."""

    name: str
    job: Manifest
    breach: str = ""
    allowed: Any = None


def job_of(
    name: str, pod: dict[str, Any] | None = None, labels: dict[str, str] | None = None, **container: Any
) -> Manifest:
    """A job with these fields in its container and its pod; `sharing` goes to its spec."""
    sharing = container.pop("sharing", None)
    job = shell_job(name, "true", container={"image": "lab/trainer:dev", **container})
    job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"] |= pod or {}
    job["metadata"]["labels"] = labels or {}
    return job if sharing is None else {**job, "spec": {**job["spec"], "sharing": sharing}}


def stored_at(url: str) -> dict[str, Any]:
    """The variable that names a job's storage."""
    return {"env": [{"name": variables.STORAGE, "value": url}]}


def by_reference() -> dict[str, Any]:
    """The same, with a value that nobody can check."""
    return {"env": [{"name": variables.STORAGE, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}


def case(name: str, breach: str, pod: dict[str, Any] | None = None, **rest: Any) -> LimitCase:
    """A case whose job has the case's name."""
    return LimitCase(name, job_of(name, pod, **rest), breach, ALLOWED)


CASES = [
    case("plain", ""),
    LimitCase("without-limits", job_of("without-limits", image="evil.example/x", sharing={"priority": 900}), "", {}),
    case("priority", "", sharing={"priority": 50}),
    case("too-high", "its priority is 51, and 50 is the most", sharing={"priority": 51}),
    case("class", "", {"priorityClassName": "batch"}),
    case("other-class", "its priority class", {"priorityClassName": "system-cluster-critical"}),
    case("kueue-class", "its priority class", labels={"kueue.x-k8s.io/priority-class": "urgent"}),
    case("image-below", "", image="registry.example/team/trainer@sha256:1234"),
    case("image", "its image", image="registry.example/teamster/x"),
    case("init-image", "its image", {"initContainers": [{"name": "i", "image": "evil.example/x"}]}),
    case("volume-image", "its image", {"volumes": [{"name": "v", "image": {"reference": "evil.example/x"}}]}),
    case("account", "", {"serviceAccountName": "trainer"}),
    case("other-account", "its service account", {"serviceAccountName": "admin"}),
    case("old-account", "its service account", {"serviceAccount": "admin"}),
    case("storage", "", **stored_at("s3://vision/jobs/a")),
    case("storage-itself", "", **stored_at("s3://vision/jobs")),
    case("storage-query", "", **stored_at("s3://vision/here/x?endpoint=http://s3.lab:9000")),
    case("beside", "its storage", **stored_at("s3://vision/jobs-of-others/a")),
    case("other-endpoint", "its storage", **stored_at("s3://vision/jobs/a?endpoint=http://evil.example")),
    case("no-endpoint", "its storage", **stored_at("s3://vision/here/x")),
    case("dots", "its storage", **stored_at("file:///shared/vision/../speech")),
    case("coded-dots", "its storage", **stored_at("file:///shared/vision/%2e%2E/speech")),
    case("variable", "its storage", **stored_at("file:///shared/vision/$(WHERE)")),
    case("reference", "its storage", **by_reference()),
    case("init-storage", "its storage", {"initContainers": [{"name": "i", **stored_at("s3://speech")}]}),
    case("node-type", "", {"nodeSelector": {"node.kubernetes.io/instance-type": "g5.xlarge"}}),
    case("other-node-type", "its node type", {"nodeSelector": {"node.kubernetes.io/instance-type": "p4d.24xlarge"}}),
    case("node-name", "node", {"nodeName": "node-1"}),
]
