"""Options and arguments that several verbs share, and the formats of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import typer

from elasticctl.api.errors import UsageError
from elasticctl.api.text import quote
from elasticctl.cli.framework.contexts import complete_context, complete_job, complete_worker

_DURATION = re.compile(r"([0-9]{1,9})(s|m|h|d)?")
_BYTES = re.compile(r"([0-9]{1,9})([kMGT]?)(i?)B?")
_OBJECT = r"[a-z0-9](?:[-a-z0-9.]{0,200}[a-z0-9])?"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    rf"(?P<name>{_OBJECT})(?::(?P<key>[-._A-Za-z0-9]{{1,253}})(?:=(?P<variable>{_VARIABLE.pattern}))?)?"
)
_MOUNT = re.compile(rf"(?P<claim>(?:secrets:)?{_OBJECT}):(?P<path>/[^\0:]+)")
SCHEMES = ("file", "s3", "gs")
"""Of storage URLs."""
_NEAR_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(:/*)|(s3|gs)(//+)")
_UNIT_S = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Assignment(NamedTuple):
    """NAME=VALUE."""

    name: str
    value: str


class SecretRef(NamedTuple):
    """A reference to a secret: all its keys (`key` ""), or one of them as a variable."""

    name: str
    key: str
    variable: str


class Mount(NamedTuple):
    """A volume claim, or `secrets:` and a SecretProviderClass, and the absolute path to mount it at."""

    claim: str
    path: str


def duration(text: str) -> int:
    """90s, 10m, 2h, 1d, or plain seconds -> whole seconds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{quote(text)} is not a duration such as 90s, 10m, 2h or 1d.")
    return int(found[1]) * _UNIT_S[found[2]]


def size(text: str) -> int:
    """500MB, 2GB, 1GiB, or plain bytes -> bytes."""
    found = _BYTES.fullmatch(text)
    if found is None or (found[3] and not found[2]):
        raise typer.BadParameter(f"{quote(text)} is not a size such as 500MB, 2GB or 1GiB.")
    unit: int = (1024 if found[3] else 1000) ** " kMGT".index(found[2] or " ")
    return int(found[1]) * unit


def whole(low: int) -> Callable[[str], int]:
    """A parser of whole numbers of at least `low`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < low:
            raise typer.BadParameter(f"{quote(text)} is not a whole number of at least {low}.")
        return int(text)

    return parse


def assignment(form: str) -> Callable[[str], Assignment]:
    """A parser of NAME=VALUE; `form` describes it in the error."""

    def parse(text: str) -> Assignment:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{quote(text)} is not of the form {form}.")
        return Assignment(name, value)

    return parse


def secret_ref(text: str) -> SecretRef:
    """NAME, NAME:KEY or NAME:KEY=VARIABLE."""
    found = _SECRET.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{quote(text)} is not of the form NAME, NAME:KEY or NAME:KEY=VARIABLE.")
    name, key, variable = found["name"], found["key"] or "", found["variable"] or ""
    if key and not variable and not _VARIABLE.fullmatch(key):
        raise typer.BadParameter(f"{quote(key)} cannot be the name of a variable; give one: {name}:{key}=VARIABLE.")
    return SecretRef(name, key, variable or key)


def mount(text: str) -> Mount:
    """CLAIM:/path, or secrets:CLASS:/path."""
    found = _MOUNT.fullmatch(text)
    if found is None or ".." in found["path"].split("/"):
        raise typer.BadParameter(f"{quote(text)} is not of the form CLAIM:/path.")
    return Mount(found["claim"], found["path"])


def count(about: str, *, low: int = 1, letter: str = "N", default: bool = False) -> Any:
    """An option that takes a whole number of at least `low`."""
    return typer.Option(parser=whole(low), metavar=letter, help=about, show_default=default)


def time(about: str, *, low_s: int = 0) -> Any:
    """An option that takes a duration; `about` has to give the default in a readable unit."""

    def parse(text: str) -> int:
        if (found := duration(text)) < low_s:
            raise typer.BadParameter(f"{quote(text)} is too short: the least is {low_s}s.")
        return found

    return typer.Option(parser=parse, metavar="TIME", help=about, show_default=False)


def assignments(flag: str, form: str, about: str) -> Any:
    """An option that takes NAME=VALUE, any number of times."""
    return typer.Option(flag, parser=assignment(form), metavar=form, help=about)


def text(about: str, letter: str = "NAME") -> Any:
    """An option that takes any text and is empty by default, which its help does not show."""
    return typer.Option(metavar=letter, help=about, show_default=False)


def worker(about: str, flag: str = "--worker") -> Any:
    """An option that names a worker of the job."""
    return typer.Option(flag, metavar="NAME", help=about, show_default=False, autocompletion=complete_worker)


def namespace(about: str) -> Any:
    """The option that names a namespace."""
    return typer.Option("-n", "--namespace", metavar="NAME", help=about, show_default=False)


@dataclass(frozen=True, slots=True)
class Where:
    """The place given on the command line; empty: not given."""

    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="NAME",
            envvar="ELASTICCTL_CONTEXT",
            show_envvar=False,
            show_default=False,
            autocompletion=complete_context,
            help="The context; the current one by default.",
        ),
    ] = ""
    namespace: Annotated[str, namespace("The namespace; the context's own by default.")] = ""


Job = Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete_job)]
MaybeJob = Annotated[str | None, typer.Argument(metavar="JOB", autocompletion=complete_job)]
Jobs = Annotated[tuple[str, ...], typer.Argument(metavar="JOB...", autocompletion=complete_job)]

Form = Literal["table", "wide", "json", "yaml", "name"]
Output = Annotated[
    Form,
    typer.Option("-o", "--output", help="Output format: a table (tab-separated in a pipe), or whole objects."),
]
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Keep watching for changes.")]
Timeout = Annotated[int | None, time("Give up after this long: 90s, 10m, 2h (exit code 124).")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")]


def check_near_url(given: str) -> None:
    """Raise UsageError for a misspelt URL, which would be taken for the name of a folder.

    `s3:/bucket`, `gs:x`, `S3://bucket`, `file:/path`, `s3//bucket`, `s3:///prefix`.
    """
    near = _NEAR_URL.match(given)
    if near is None:
        return
    scheme, marks, rest = near[1] or near[3], near[2] or near[4], given[near.end() :]
    slashes = ("://", ":///") if scheme == "file" and rest.startswith("localhost/") else (":///",)
    if scheme in SCHEMES and marks in (slashes if scheme == "file" else ("://",)):
        return
    if scheme.lower() in SCHEMES:
        fix = f"{scheme.lower()}://{'/' if scheme.lower() == 'file' else ''}{rest or 'bucket'}"
    elif marks.startswith("://"):
        return  # an unknown kind of storage; opening it raises an error that lists the known ones
    else:
        fix = f"a folder, or a URL such as s3://bucket/prefix; ./{given} is a folder of that name"
    raise UsageError(f"{quote(given)} is not the URL of a storage. FIX: give {fix}")
