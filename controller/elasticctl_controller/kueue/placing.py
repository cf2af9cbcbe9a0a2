"""Where admitted workers may go: what flavors and admission checks add to the pods' template. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elasticctl.codec import Manifest
from elasticctl.podtemplate import at
from elasticctl_controller.kueue.model import POD_SET


def placed(template: Mapping[str, Any], workload: Manifest, flavors: Iterable[Manifest]) -> Manifest:
    """The template with the nodes' labels and the tolerations of its flavors, and what admission checks want.

    What the template says itself stays: Kueue has chosen flavors that fit it.
    """
    additions = [_of_flavor(flavor) for flavor in flavors] + _of_checks(workload)
    metadata, spec = dict(_mapping(template.get("metadata"))), dict(_mapping(template.get("spec")))
    for added in additions:
        _add_keys(metadata, "labels", added.get("labels"))
        _add_keys(metadata, "annotations", added.get("annotations"))
        _add_keys(spec, "nodeSelector", added.get("nodeSelector"))
        _add_items(spec, "tolerations", added.get("tolerations"))
    return {**template, **({"metadata": metadata} if metadata else {}), "spec": spec}


def _of_flavor(flavor: Manifest) -> Mapping[str, Any]:
    spec = _mapping(flavor.get("spec"))
    return {"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")}


def _of_checks(workload: Manifest) -> list[Mapping[str, Any]]:
    updates = [
        _mapping(update)
        for check in _sequence(at(workload, "status", "admissionChecks"))
        for update in _sequence(at(check, "podSetUpdates"))
    ]
    return [update for update in updates if update.get("name") == POD_SET]


def _add_keys(target: Manifest, name: str, more: object) -> None:
    if _mapping(more):
        target[name] = {**_mapping(more), **_mapping(target.get(name))}


def _add_items(target: Manifest, name: str, more: object) -> None:
    there = _sequence(target.get(name))
    new = [item for item in _sequence(more) if item not in there]
    if new:
        target[name] = [*there, *new]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
