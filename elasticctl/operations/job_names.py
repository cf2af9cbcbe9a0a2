"""Names of jobs: valid ones, those derived from a script or another job, and those that are taken."""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Collection

from elasticctl.api.errors import ConflictError, UsageError
from elasticctl.api.text import quote
from elasticctl.cluster.base import Manifest
from elasticctl.operations.target import Target

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MAX_NAME = 51
"""Characters of a job's name: those of its workers and their Services are longer, and may have 63."""
_MAX_MADE_NAME = 40
_SUFFIX_CHARS = "bcdfghjkmnpqrstvwxz23456789"


def check_name(name: str) -> str:
    """Return `name` if it is a valid job name. Raises UsageError otherwise."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise UsageError(
            f"--name {quote(name)}: a name is lower-case letters, digits and '-', starts with a letter, does not end"
            f" with '-', and has {MAX_NAME} characters at most"
        )
    return name


def name_from(script: str) -> str:
    """A job name derived from a script's: `My_Train.py` -> `my-train`, `entraîné.py` -> `entraine`."""
    stem = script.replace("\\", "/").rstrip("/").rpartition("/")[2].partition(".")[0].lower()
    stem = "".join(char for char in unicodedata.normalize("NFKD", stem) if not unicodedata.combining(char))
    made = re.sub(r"[^a-z0-9]+", "-", stem)[:_MAX_MADE_NAME]
    return re.sub(r"^[^a-z]+|-+$", "", made) or "job"


def next_name(base: str, taken: Collection[str]) -> str:
    """`digits-2` for `digits`; the first number from 2 on that is free."""
    number = 2
    while True:
        suffix = f"-{number}"
        name = base[: MAX_NAME - len(suffix)].rstrip("-") + suffix
        if name not in taken:
            return name
        number += 1


def name_with_suffix(name: str) -> str:
    """The name with four random letters, for one that is taken."""
    return f"{name}-{''.join(secrets.choice(_SUFFIX_CHARS) for _ in range(4))}"


def taken_names(target: Target) -> set[str]:
    """The names of the jobs in the namespace."""
    return {job["metadata"]["name"] for job in target.cluster.list_jobs(target.namespace)}


def refuse_taken_name(target: Target, manifest: Manifest) -> None:
    """Raise ConflictError if the name is taken, before anything is uploaded."""
    name, namespace = manifest["metadata"]["name"], manifest["metadata"].get("namespace") or target.namespace
    if all(job["metadata"]["name"] != name for job in target.cluster.list_jobs(namespace)):
        return
    raise ConflictError(
        f"job {namespace}/{name} already exists. FIX: choose another name,"
        f" or delete it first (elasticctl delete {name})"
    )
