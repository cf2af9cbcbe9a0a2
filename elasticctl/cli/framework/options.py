"""Options and arguments that several verbs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from elasticctl.cli.framework.completion import complete_job, complete_worker
from elasticctl.operations import option_values
from elasticctl.operations.option_values import duration, whole
from elasticctl.operations.selection import Selector, selector


def described(about: str, metavar: str = "NAME") -> Any:
    """An option whose parser, if it has one, is in the annotation of its field; its help shows no default."""
    return typer.Option(metavar=metavar, help=about, show_default=False)


def flag(about: str, *names: str) -> Any:
    """An option without a value."""
    return typer.Option(*names, help=about)


def count(about: str, *, low: int = 1, letter: str = "N", default: bool = False) -> Any:
    """An option that takes a whole number of at least `low`."""
    return typer.Option(parser=whole(low), metavar=letter, help=about, show_default=default)


def time(about: str) -> Any:
    """An option that takes a duration; `about` has to give the default in a readable unit."""
    return typer.Option(parser=duration, metavar="TIME", help=about, show_default=False)


def assignments(flag: str, form: str, about: str) -> Any:
    """An option that takes NAME=VALUE, any number of times."""
    return typer.Option(flag, parser=option_values.assignment(form), metavar=form, help=about)


def worker(about: str, flag: str = "--worker") -> Any:
    """An option that names a worker of the job."""
    return typer.Option(flag, metavar="NAME", help=about, show_default=False, autocompletion=complete_worker)


def namespace(about: str) -> Any:
    """The option that names a namespace."""
    return typer.Option("-n", "--namespace", metavar="NAME", help=about, show_default=False)


def phase_option(about: str) -> Any:
    """An option that names phases of jobs; `--status` was its name in `list`."""
    return typer.Option("--phase", "--status", metavar="PHASE", help=about)


WHICH_WORKER: Mapping[str, Any] = {
    "worker": worker("The worker, by name or number; by default that of rank 0."),
    "rank": described("The worker that runs rank N.", "N"),
}
"""The fields of `WhichWorker`."""
Job = Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete_job)]
MaybeJob = Annotated[str | None, typer.Argument(metavar="JOB", autocompletion=complete_job)]
Jobs = Annotated[tuple[str, ...], typer.Argument(metavar="JOB...", autocompletion=complete_job)]

OutputFormat = Literal["table", "wide", "json", "yaml", "name"]
Output = Annotated[
    OutputFormat,
    typer.Option("-o", "--output", help="Output format: a table (tab-separated in a pipe), or whole objects."),
]
Labels = Annotated[
    tuple[Selector, ...],
    typer.Option(
        "-l", "--label", parser=selector, metavar="KEY=VALUE", help="Select jobs by this label instead of by name."
    ),
]
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Keep watching for changes.")]
Timeout = Annotated[int | None, time("Give up after this long: 90s, 10m, 2h (exit code 124).")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")]
