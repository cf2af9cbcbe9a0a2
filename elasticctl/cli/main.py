"""`elasticctl`: the table of verbs, and the one place where errors become lines and exit codes.

Verbs are imported on use: `elasticctl --help` and completion need none of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from elasticctl.errors import ElasticctlError
from elasticctl.wording import did_you_mean, shown

# name -> (module and command, what it does); in the order of the help
_JOBS = {
    "submit": ("submit:submit", "Run a training script as an elastic job"),
    "list": ("jobs:list_jobs", "List jobs"),
    "status": ("jobs:status", "Show where a job is"),
    "logs": ("logs:logs", "Print what a job's workers print"),
    "scale": ("scale:scale", "Change the number of workers of a running job"),
    "wait": ("wait:wait", "Wait until a job has ended"),
    "history": ("history:history", "Show a job's interruptions and scalings, and what they cost"),
    "suspend": ("lifecycle:suspend", "Stop a job's workers and keep its place"),
    "resume": ("lifecycle:resume", "Go on with a suspended job"),
    "cancel": ("lifecycle:cancel", "Stop a job for good"),
    "delete": ("lifecycle:delete", "Delete a job, its workers and its logs"),
}
_SETUP = {
    "config": ("contexts:config", "Choose and describe the places to run jobs at"),
    "local": ("local:local", "The cluster that is built into this machine"),
    "template": ("templates:template", "The shapes that jobs are made in"),
    "completion": ("about:completion", "Print the completion script of a shell"),
    "version": ("about:version", "Print the version"),
}
_VERBS = {**_JOBS, **_SETUP}


class Verbs(click.Group):
    """A group that knows its commands by name and loads them on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module, _, attribute = _VERBS[cmd_name][0].partition(":")
        command = getattr(import_module(f"elasticctl.cli.{module}"), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - of our own table
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _VERBS:
            ctx.fail(f"there is no verb {shown(args[0])}{did_you_mean(args[0], _VERBS)}.")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[click.shell_completion.CompletionItem]:
        names = (name for name in _VERBS if name.startswith(incomplete))
        return [click.shell_completion.CompletionItem(name, help=_VERBS[name][1]) for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _VERBS))
        for title, verbs in (("Jobs", _JOBS), ("Setup", _SETUP)):
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in verbs.items()])


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Begin with: elasticctl submit train.py   (`elasticctl VERB --help` tells more)",
)
@click.option("--debug", is_flag=True, help="Show Python's traceback with an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Elastic PyTorch training on spot GPUs, from this machine to any cloud."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 done; 1 a job failed, or something did; 2 wrong use; 3 not there, or no answer from the cluster; 4 cancelled;
    124 timed out; 130 interrupted; 141 nobody reads the output any more.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    # A command's own words may be followed by --, after which everything belongs to the training script.
    ours = args[: args.index("--")] if "--" in args else args
    debug = "--debug" in ours or bool(os.environ.get("ELASTICCTL_DEBUG"))
    try:
        result = cli.main(args, prog_name="elasticctl", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (click.ClickException, ElasticctlError, OSError) as e:
        return _failed(e, debug)
    except click.Abort as e:
        # Ctrl-C as shells report it; an end of input where an answer was wanted is a plain failure.
        return 130 if isinstance(e.__cause__ or e.__context__, KeyboardInterrupt) else 1
    except KeyboardInterrupt:
        return 130
    except Exception as e:  # noqa: BLE001 - the edge: a bug of ours is one line too, unless asked for more
        return _bug(e, debug)


def _failed(error: click.ClickException | ElasticctlError | OSError, debug: bool) -> int:
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has enough of it. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if debug:
        _trace(error)
    if isinstance(error, click.ClickException):
        _say_error(_usage(error))
        return error.exit_code
    if isinstance(error, OSError):
        _say_error(f"{error.filename or 'output'}: {error.strerror or error}")
        return 1
    _say_error(str(error))
    return error.exit_code


def _bug(error: Exception, debug: bool) -> int:
    if debug:
        _trace(error)
    else:
        _say_error(f"this is a bug in elasticctl: {type(error).__name__}: {error} (--debug shows where)")
    return 1


def _trace(error: Exception) -> None:
    import traceback

    traceback.print_exception(error)


def _usage(error: click.ClickException) -> str:
    message = error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return message
    if isinstance(error, click.NoSuchOption) and context.info_name == "submit":
        message = f"submit has no option {error.option_name}; the script's own arguments come after `--`."
    return f"{message} See `{context.command_path} --help`."


def _say_error(message: str) -> None:
    line = " ".join(message.split())
    sys.stderr.write(f"error: {line}\n".encode(errors="backslashreplace").decode())
