"""What the controller's roles allow, and what a request needs."""

from __future__ import annotations

from collections.abc import Collection

from elasticctl.api.codec import Manifest
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.features import ALL, Feature
from tests.support.fakeapi import Request

Right = tuple[str, str, str]
"""API group, resource, verb."""
LEADER_ROLE = "elasticctl-leader"


def allowed(features: Collection[Feature] = ALL) -> set[Right]:
    """What the controller's roles allow in all namespaces, with these features."""
    return {right for role in bound_roles(installation.manifests(features=features)) for right in rights_of(role)}


def bound_roles(manifests: list[Manifest]) -> list[Manifest]:
    """The ClusterRoles and Roles that are bound to the controller's account, but for that of its own namespace."""
    bindings = [item for item in manifests if item["kind"] in ("ClusterRoleBinding", "RoleBinding")]
    bound = {
        (item["roleRef"]["kind"], item["roleRef"]["name"])
        for item in bindings
        if any(subject["name"] == installation.ACCOUNT for subject in item["subjects"])
    }
    roles = [item for item in manifests if (item["kind"], item["metadata"]["name"]) in bound]
    return [role for role in roles if role["metadata"]["name"] != LEADER_ROLE]


def leader_role(manifests: list[Manifest]) -> Manifest:
    """The Role in the controller's own namespace."""
    return next(item for item in manifests if (item["kind"], item["metadata"]["name"]) == ("Role", LEADER_ROLE))


def rights_of(role: Manifest) -> set[Right]:
    """Each right of a role by itself."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def asked(request: Request) -> Right | None:
    """The right that a request takes; None for discovery, which everybody may."""
    words = request.path.strip("/").split("/")
    group, words = ("", words[2:]) if words[0] == "api" else (words[1], words[3:])
    if words[:1] == ["namespaces"] and len(words) > 2:
        words = words[2:]
    if not words:
        return None
    resource = "/".join((words[0], *words[2:]))
    reading = "watch" if request.params.get("watch") else "get" if len(words) > 1 else "list"
    verbs = {"GET": reading, "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    return group, resource, verbs[request.method]
