"""From the manifest of a job to that of one that runs the same again. Pure."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from elasticctl.cli.plan import place_of
from elasticctl.codec import Manifest
from elasticctl.podtemplate import START_FROM_VARIABLE, STORAGE_VARIABLE, at, worker_container
from elasticctl.spec import ANNOTATION_NOTIFY, ANNOTATION_RERUN_OF, GROUP, QUEUE_LABEL

_MAX_NAME = 51
_OF_ONE_LIFE = ("suspend", "cancel", "removeWorkers")
"""Fields of a spec that are about this very run of it."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """What is different: its name, its storage URL ("": none), and what it starts from (`URL#STEP`; "": step 0)."""

    name: str
    storage: str = ""
    start_from: str = ""


def again(manifest: Manifest, rerun: Rerun) -> Manifest:
    """The same job as a new object; how many workers it wants is what it was last scaled to."""
    metadata = manifest["metadata"]
    labels = dict(metadata.get("labels") or {})
    spec = {key: value for key, value in copy.deepcopy(manifest["spec"]).items() if key not in _OF_ONE_LIFE}
    container = worker_container(at(spec, "replicaSpecs", "Worker", "template") or {})
    for variable, value in ((STORAGE_VARIABLE, rerun.storage), (START_FROM_VARIABLE, rerun.start_from)):
        set_variable(container, variable, value)
    annotations = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if GROUP not in key or key == ANNOTATION_NOTIFY
    }
    annotations[ANNOTATION_RERUN_OF] = origin(manifest)
    made: Manifest = {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {"name": rerun.name, "namespace": metadata["namespace"], "annotations": annotations},
        "spec": spec,
    }
    if labels:
        made["metadata"]["labels"] = labels
    if QUEUE_LABEL in labels:
        spec["suspend"] = True  # until it is admitted, as the first time
    return made


def origin(manifest: Manifest) -> str:
    """The name of the job that this one, perhaps over several reruns, goes back to."""
    found = at(manifest, "metadata", "annotations", ANNOTATION_RERUN_OF)
    return found if isinstance(found, str) and found else str(manifest["metadata"]["name"])


def next_name(base: str, taken: Collection[str]) -> str:
    """`digits-2` for `digits`; the first number from 2 on that is free."""
    number = 2
    while True:
        suffix = f"-{number}"
        name = base[: _MAX_NAME - len(suffix)].rstrip("-") + suffix
        if name not in taken:
            return name
        number += 1


def beside(url: str, name: str) -> str:
    """A storage URL next to another one; its options (`?endpoint=…`) stay."""
    place, choices = place_of(url)
    return f"{place.rstrip('/').rpartition('/')[0]}/{name}{choices}"


def set_variable(container: Any, name: str, value: str) -> None:
    """Set a variable of a container in place, where it stood or at the end; remove it for ""."""
    if not isinstance(container, dict):
        return
    env = container.get("env") if isinstance(container.get("env"), list) else []
    kept = [item for item in env or [] if at(item, "name") != name]
    if value:
        kept.append({"name": name, "value": value})
    if kept or "env" in container:
        container["env"] = kept
