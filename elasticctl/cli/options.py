"""Flags and arguments that several verbs take, each defined once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from elasticctl.cli.target import Where
from elasticctl.errors import ElasticctlError
from elasticctl.wording import shown

F = TypeVar("F", bound=Callable[..., Any])

_DURATION = re.compile(r"([0-9]{1,9})(s|m|h|d)?")
_UNIT_S = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """90s, 10m, 2h, 1d, or plain seconds -> whole seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _DURATION.fullmatch(str(value))
        if found is None:
            self.fail(f"{shown(value)} is not a duration such as 90s, 10m, 2h or 1d.", param, ctx)
        return int(found[1]) * _UNIT_S[found[2]]


class Whole(click.ParamType):  # type: ignore[type-arg]
    """A whole number, at least `low`."""

    name = "number"

    def __init__(self, low: int) -> None:
        self._low = low

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not re.fullmatch(r"[0-9]{1,9}", str(value)) or int(value) < self._low:
            self.fail(f"{shown(value)} is not a whole number of at least {self._low}.", param, ctx)
        return int(value)


class Assignment(click.ParamType):  # type: ignore[type-arg]
    """NAME=VALUE -> (name, value); `form` is what the help and the error call it."""

    def __init__(self, form: str) -> None:
        self.name = form

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, separator, rest = str(value).partition("=")
        if not separator or not name:
            self.fail(f"{shown(value)} is not of the form {self.name}.", param, ctx)
        return name, rest


def target(function: F) -> F:
    """--context and --namespace, handed to the verb as `where`."""

    @click.option(
        "--context",
        metavar="NAME",
        envvar="ELASTICCTL_CONTEXT",
        shell_complete=complete_context,
        help="Where to run: a name of `elasticctl config get-contexts`.",
    )
    @click.option("-n", "--namespace", metavar="NAME", help="The namespace; the context's own by default.")
    @_debug
    @functools.wraps(function)
    def wrapped(context: str | None, namespace: str | None, **given: Any) -> Any:
        return function(where=Where(context or "", namespace or ""), **given)

    return wrapped  # type: ignore[return-value]


def complete_context(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from elasticctl.cli.target import contexts

    try:
        names = [context.name for context in contexts().contexts]
    except ElasticctlError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from elasticctl.cli.target import job_names

    where = Where(ctx.params.get("context") or "", ctx.params.get("namespace") or "")
    try:
        return [CompletionItem(name, help=phase) for name, phase in job_names(where) if name.startswith(incomplete)]
    except ElasticctlError:
        return []


# main() looks for it among the words; this makes it known to each verb.
_debug = click.option("--debug", is_flag=True, hidden=True, expose_value=False)
bare = _debug

JOB = click.argument("job", shell_complete=complete_job)
JOBS = click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
OUTPUT = click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["table", "wide", "json", "yaml", "name"]),
    default="table",
    help="How to print: a table (tab-separated in a pipe), or the whole objects.",
)
WATCH = click.option("-w", "--watch", is_flag=True, help="Go on showing changes.")
TIMEOUT = click.option("--timeout", type=Duration(), metavar="TIME", help="Give up after 90s, 10m, 2h (exit code 124).")
