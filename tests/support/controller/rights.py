"""What the controller's role allows, and what a request needs."""

from __future__ import annotations

from importlib.resources import files

import yaml

from tests.support.fakeapi import Request

Right = tuple[str, str, str]
"""API group, resource, verb."""


def allowed() -> set[Right]:
    """What the controller's role allows in all namespaces."""
    text = files("elasticctl_controller").joinpath("deploy/access.yaml").read_text()
    role = next(
        item
        for item in yaml.safe_load_all(text)
        if (item["kind"], item["metadata"]["name"]) == ("ClusterRole", "elasticctl-controller")
    )
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
