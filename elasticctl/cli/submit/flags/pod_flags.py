"""The flags of `submit` about the pods of a job: their resources, nodes, labels, environment files and set-up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from elasticctl.api.errors import UsageError
from elasticctl.api.spec import GROUP, LABEL_GROUP, LABEL_INDEX, LABEL_JOB, LABEL_TYPE, USER_LABEL
from elasticctl.api.text import quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.options import Assignment
from elasticctl.cli.framework.selection import user_name
from elasticctl.cli.submit.flags.goal_flags import GoalFlags

_CPUS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?|[0-9]{1,9}m")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_RESERVED = (LABEL_GROUP, LABEL_JOB, LABEL_TYPE, LABEL_INDEX)
_GIB, _MIB = 1 << 30, 1 << 20


def _cpus(text: str) -> str:
    """4, 0.5 or 500m."""
    if text and (not _CPUS.fullmatch(text) or not any(digit in text for digit in "123456789")):
        raise typer.BadParameter(f"{quote(text)} is not a number of CPUs such as 4, 0.5 or 500m.")
    return text


def _memory(text: str) -> str:
    """500MB, 16Gi, 16GiB, or plain bytes -> a quantity as Kubernetes writes it."""
    if not text:
        return ""
    size = options.size(text)
    if size < 1:
        raise typer.BadParameter(f"{quote(text)} is not a size above 0.")
    for unit, name in ((_GIB, "Gi"), (_MIB, "Mi")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def _label(text: str) -> Assignment:
    """KEY=VALUE, which has to be a valid label on Kubernetes."""
    key, mark, value = text.partition("=")
    if not mark or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
        raise typer.BadParameter(
            f"{quote(text)} is not a label KEY=VALUE: letters, digits, '-', '_' and '.', 63 at most."
        )
    return Assignment(key, value)


def _own_label(text: str) -> Assignment:
    """The same, except for labels that elasticctl sets itself."""
    label = _label(text)
    if label.name in _RESERVED or label.name.startswith(f"{GROUP}/"):
        raise typer.BadParameter(f"the label {label.name} is elasticctl's own.")
    return label


def _annotation(text: str) -> Assignment:
    """KEY=VALUE, where the value is any text."""
    key, mark, value = text.partition("=")
    if not mark or not _KEY.fullmatch(key) or key.startswith(f"{GROUP}/"):
        raise typer.BadParameter(f"{quote(text)} is not an annotation KEY=VALUE.")
    return Assignment(key, value)


class Toleration(NamedTuple):
    """A tolerated taint of nodes: of any `value` if that is None, of any `effect` if that is blank."""

    key: str
    value: str | None
    effect: str

    def __str__(self) -> str:
        return self.key + ("" if self.value is None else f"={self.value}") + (f":{self.effect}" if self.effect else "")

    def to_manifest(self) -> dict[str, str]:
        """The toleration as in a pod."""
        value = {} if self.value is None else {"value": self.value}
        effect = {"effect": self.effect} if self.effect else {}
        return {"key": self.key, "operator": "Exists" if self.value is None else "Equal", **value, **effect}


def toleration(text: str) -> Toleration:
    """KEY[=VALUE][:EFFECT], as kubectl writes taints."""
    taint, _, effect = text.partition(":")
    key, mark, value = taint.partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (effect and effect not in _EFFECTS):
        raise typer.BadParameter(f"{quote(text)} is not of the form KEY[=VALUE][:EFFECT], with {', '.join(_EFFECTS)}.")
    return Toleration(key, value if mark else None, effect)


@dataclass(frozen=True, slots=True)
class PodFlags(GoalFlags):
    """The flags of `submit` for each pod; blank: not given."""

    cpus: Annotated[str, typer.Option(parser=_cpus, metavar="N", show_default=False, help="CPUs of each worker.")] = ""
    memory: Annotated[
        str, typer.Option(parser=_memory, metavar="SIZE", show_default=False, help="Memory of each worker: 32Gi.")
    ] = ""
    shm: Annotated[
        str,
        typer.Option(
            parser=_memory,
            metavar="SIZE",
            show_default=False,
            help="Shared memory of each worker; by default up to the memory limit.",
        ),
    ] = ""
    node_selector: Annotated[
        tuple[Assignment, ...],
        typer.Option("--node-selector", parser=_label, metavar="KEY=VALUE", help="Use only nodes with this label."),
    ] = ()
    tolerations: Annotated[
        tuple[Toleration, ...],
        typer.Option(
            "--toleration", parser=toleration, metavar="KEY[=VALUE][:EFFECT]", help="Tolerate nodes with this taint."
        ),
    ] = ()
    pools: Annotated[
        str,
        options.text(
            "Ask for machines in these pools, best first: spot/us-east-1a,spot,on-demand; none: ignore the context's.",
            "POOL,POOL...",
        ),
    ] = ""
    pool_wait: Annotated[
        int | None, options.time("With --pools: ask in the next one after waiting this long; 10m by default.")
    ] = None
    labels: Annotated[
        tuple[Assignment, ...],
        typer.Option("--label", parser=_own_label, metavar="KEY=VALUE", help="A label of the job, to select it by."),
    ] = ()
    annotations: Annotated[
        tuple[Assignment, ...],
        typer.Option("--annotation", parser=_annotation, metavar="KEY=VALUE", help="An annotation of the job."),
    ] = ()
    env_file: Annotated[
        str, options.text("Variables from a file of lines NAME=VALUE; --env takes precedence.", "FILE")
    ] = ""
    setup: Annotated[
        str,
        options.text(
            "Run this before the ranks start, once per machine: 'pip install -r requirements.txt'.", "COMMAND"
        ),
    ] = ""


def read_env_file(path: str) -> dict[str, str]:
    """The variables of a file: NAME=VALUE lines, blank ones, comments, `export`, quotes around values.

    Raises UsageError with the first other line.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as e:
        raise UsageError(f"--env-file: cannot read {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"--env-file: {path} is not UTF-8 text") from e
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().removeprefix("export ").strip()
        if not words or words.startswith("#"):
            continue
        name, mark, value = words.partition("=")
        if not mark or not _VARIABLE.fullmatch(name.strip()):
            raise UsageError(f"--env-file: {path}:{number} is not of the form NAME=VALUE")
        found[name.strip()] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value.partition(" #")[0].rstrip()


def user_label() -> dict[str, str]:
    """The label with the submitting user: $ELASTICCTL_USER, or the login name; none if unknown."""
    name = user_name()
    return {USER_LABEL: name} if name else {}
