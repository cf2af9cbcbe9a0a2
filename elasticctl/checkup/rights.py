"""What a user may do in a namespace, and which of our verbs need it; the table of docs/kubernetes.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticctl.spec import GROUP, PLURAL


@dataclass(frozen=True, slots=True)
class Right:
    """One right: a verb of Kubernetes on a resource. `needed_by`: the verbs of ours that do not work without it."""

    verb: str
    resource: str
    needed_by: str
    group: str = ""
    part: str = ""
    vital: bool = False

    def review(self, namespace: str) -> dict[str, Any]:
        """The SelfSubjectAccessReview that asks for it."""
        asked = {
            "namespace": namespace,
            "verb": self.verb,
            "group": self.group,
            "resource": self.resource,
            "subresource": self.part,
        }
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }

    def __str__(self) -> str:
        resource = f"{self.resource}/{self.part}" if self.part else self.resource
        return f"{self.verb} {resource} ({self.needed_by})"


RIGHTS = (
    Right("list", PLURAL, "list, status", GROUP, vital=True),
    Right("get", PLURAL, "all verbs on a job", GROUP, vital=True),
    Right("create", PLURAL, "submit, rerun", GROUP, vital=True),
    Right("patch", PLURAL, "scale, suspend, resume, cancel", GROUP),
    Right("delete", PLURAL, "delete, prune", GROUP),
    Right("list", "pods", "status, explain"),
    Right("watch", "pods", "logs -f"),
    Right("get", "pods", "preempt"),
    Right("delete", "pods", "preempt"),
    Right("patch", "pods", "preempt, to be recorded as one"),
    Right("get", "pods", "logs", part="log"),
    Right("list", "events", "events, describe"),
)
