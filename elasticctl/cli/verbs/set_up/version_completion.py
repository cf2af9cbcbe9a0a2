"""`version` and `completion`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer.completion import shell_complete

import elasticctl
from elasticctl.cli.framework.command import COMPLETE_VAR, new_app, verb
from elasticctl.cli.framework.output import emit, hint

_WHERE = {
    "bash": 'eval "$(elasticctl completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(elasticctl completion zsh)" in ~/.zshrc, after compinit',
    "fish": "elasticctl completion fish > ~/.config/fish/completions/elasticctl.fish",
}

app = new_app()


@verb(app, "version")
def version() -> None:
    """Print the version."""
    emit(f"elasticctl {elasticctl.__version__}")


@verb(app, "completion")
def completion(
    ctx: typer.Context, shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL")]
) -> int:
    """Print the completion script for a shell; it also completes names of jobs and contexts.

    \b
    bash  eval "$(elasticctl completion bash)"   in ~/.bashrc
    zsh   eval "$(elasticctl completion zsh)"    in ~/.zshrc, after compinit
    fish  elasticctl completion fish > ~/.config/fish/completions/elasticctl.fish
    """
    code = shell_complete(ctx.find_root().command, {}, "elasticctl", COMPLETE_VAR, f"source_{shell}")
    hint(f"Next: load it in every shell: {_WHERE[shell]}")
    return code
