"""Every reader of what others wrote, with input for it and what must hold: no error but its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.support.fuzz import client, command_line, rendezvous, storage


@dataclass(frozen=True, slots=True)
class Target:
    """`check(folder, input)` raises for a counterexample; `folder` is for its files. The tests try `slice` inputs."""

    inputs: st.SearchStrategy[Any]
    check: Callable[[Path, Any], None]
    slice: int = 200


def _pure(check: Callable[[Any], None]) -> Callable[[Path, Any], None]:
    return lambda folder, found: check(found)


TARGETS: Mapping[str, Target] = {
    "S3's answers": Target(storage.S3_ANSWERS, _pure(storage.check_s3)),
    "GCS's answers": Target(storage.GCS_ANSWERS, _pure(storage.check_gcs)),
    "entries of a journal": Target(storage.ENTRIES, _pure(storage.check_entry)),
    "journals": Target(storage.ENTRIES, storage.check_journal, slice=80),
    "share documents": Target(storage.DOCUMENTS, _pure(storage.check_documents)),
    "lists of workspaces": Target(storage.WORKSPACES, _pure(storage.check_workspace)),
    "requests of workers": Target(rendezvous.REQUESTS, _pure(rendezvous.check_request)),
    "YAML": Target(client.YAML, _pure(client.check_yaml)),
    "manifests": Target(client.MANIFESTS, _pure(client.check_manifest)),
    "templates": Target(client.TEMPLATES, _pure(client.check_template), slice=80),
    "kubeconfig": Target(client.KUBECONFIGS, lambda folder, found: client.check_kubeconfig(folder / "kube", found)),
    "contexts": Target(client.CONFIGS, lambda folder, found: client.check_config(folder / "config", found)),
    "command lines": Target(command_line.COMMAND_LINES, command_line.check_command_line, slice=250),
    "manifest files": Target(command_line.MANIFEST_FILES, command_line.check_manifest_file, slice=120),
}
