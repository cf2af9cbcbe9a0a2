"""The place that a command line names with --context and --namespace, and the cluster there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.completion import complete_context
from elasticctl.operations import target
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context
from elasticctl.terminal import Terminal, name_place
from elasticctl_protocol import variables


@dataclass(frozen=True, slots=True)
class Where:
    """The place given on the command line; empty: not given."""

    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="NAME",
            envvar=variables.CONTEXT,
            show_envvar=False,
            show_default=False,
            autocompletion=complete_context,
            help="The context; the current one by default.",
        ),
    ] = ""
    namespace: Annotated[str, options.namespace("The namespace; the context's own by default.")] = ""


def locate(where: Where) -> tuple[Context, str]:
    """The context and the namespace of `where`; commands that are printed from now on name them."""
    name_place(where.context, where.namespace)
    return target.locate(where.context, where.namespace)


def reach(where: Where) -> Target:
    """The cluster of `where`, without connecting to it yet; what operations report there is printed."""
    name_place(where.context, where.namespace)
    return target.reach(where.context, where.namespace, Terminal())
