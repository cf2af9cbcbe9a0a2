"""`version` and `completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

import elasticctl
from elasticctl.cli import options
from elasticctl.cli.output import emit, hint

_WHERE = {
    "bash": 'eval "$(elasticctl completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(elasticctl completion zsh)" in ~/.zshrc, after compinit',
    "fish": "elasticctl completion fish > ~/.config/fish/completions/elasticctl.fish",
}


@click.command()
@options.bare
def version() -> None:
    """Print the version."""
    emit(f"elasticctl {elasticctl.__version__}")


@click.command()
@click.argument("shell", metavar="SHELL", type=click.Choice(list(_WHERE)))
@options.bare
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell: names of jobs and contexts are completed too.

    \b
      bash   eval "$(elasticctl completion bash)"     in ~/.bashrc
      zsh    eval "$(elasticctl completion zsh)"      in ~/.zshrc, after compinit
      fish   elasticctl completion fish > ~/.config/fish/completions/elasticctl.fish
    """
    found = get_completion_class(shell)
    if found is None:
        raise AssertionError(f"click knows no {shell}")
    emit(found(ctx.find_root().command, {}, "elasticctl", "_ELASTICCTL_COMPLETE").source())
    hint(f"to have it always: {_WHERE[shell]}")
