"""`elasticctl`: the table of verbs, and the place where errors become messages and exit codes.

Verbs are imported on use: `elasticctl --help` and completion need none of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command, get_group

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.text import did_you_mean, visible
from elasticctl.cli.framework.command import VerbGroup, new_app, show_overview
from elasticctl.cli.framework.completion import complete_context
from elasticctl.terminal import name_no_place, with_place
from elasticctl_protocol import variables

# heading -> name -> (module, what it does); in the order of the help and of docs/cli.md. A module is in the folder that
# its heading names.
_SECTIONS = {
    "Start jobs": {
        "submit": ("submit", "Run a training script as an elastic job"),
        "sweep": ("sweep", "Run a script once for each point of a grid"),
        "rerun": ("rerun", "Run a job again, from the beginning or from a checkpoint"),
    },
    "See what jobs do": {
        "list": ("list_status", "List jobs"),
        "status": ("list_status", "Show the state of a job"),
        "logs": ("logs_wait", "Print the output of a job's workers"),
        "top": ("top", "Show how jobs use CPUs, memory and GPUs"),
        "events": ("events", "Show what happened to a job, in order"),
        "history": ("events", "Show a job's interruptions and scalings, and what they cost"),
        "compare": ("compare", "Show how two jobs differ: arguments, code, results, cost"),
        "dashboard": ("dashboard", "Show jobs, their curves and costs in a browser"),
        "wait": ("logs_wait", "Wait until a job ends"),
    },
    "Find out what is wrong": {
        "explain": ("describe_explain", "Explain why a job is waiting, restarting or failed"),
        "describe": ("describe_explain", "Show everything about a job"),
        "stacks": ("stacks", "Print the Python stacks of all ranks"),
        "exec": ("exec_debug", "Run a command in a worker"),
        "shell": ("exec_debug", "Open a shell in a worker"),
        "debug": ("exec_debug", "Open a shell in a copy of a failed job's worker"),
        "cp": ("cp", "Copy files to or from a worker"),
        "port-forward": ("port_forward", "Forward local ports to a worker"),
    },
    "Change jobs": {
        "scale": ("scale", "Change the number of workers of a running job"),
        "preempt": ("lifecycle", "Remove a worker, as a spot reclaim would"),
        "suspend": ("lifecycle", "Stop a job's workers until it is resumed"),
        "resume": ("lifecycle", "Resume a suspended job"),
        "move": ("lifecycle", "Continue a job in another context"),
        "cancel": ("lifecycle", "Stop a job permanently"),
        "delete": ("lifecycle", "Delete a job, its workers and its logs"),
        "prune": ("prune", "Delete old jobs that have ended"),
    },
    "Checkpoints and plans": {
        "checkpoints": ("checkpoints", "List, verify, fetch and delete the checkpoints of a job"),
        "simulate": ("simulate", "Forecast time, cost and goodput on other numbers of GPUs"),
    },
    "Set up": {
        "config": ("config", "Manage contexts: the clusters that jobs run in"),
        "install": ("install", "Make a Kubernetes cluster ready for jobs"),
        "doctor": ("install", "Check that a context is ready for jobs"),
        "quota": ("quota", "Manage the quotas of projects that share a cluster"),
        "secret": ("secret", "Store passwords and tokens for jobs"),
        "local": ("local", "Manage the built-in local cluster"),
        "template": ("config", "Manage the templates that jobs are rendered from"),
        "completion": ("version_completion", "Print the completion script for a shell"),
        "version": ("version_completion", "Print the version"),
    },
}
_MODULES = {
    name: f"elasticctl.cli.verbs.{heading.lower().replace(' ', '_')}.{module}"
    for heading, verbs in _SECTIONS.items()
    for name, (module, _) in verbs.items()
}


class Verbs(VerbGroup):
    """All verbs, listed from the table above; the module of a verb is imported when the verb is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stub with the verb's name, which is all that completion needs; `resolve_command` returns the verb.

        It has no help text: Typer would import rich to show it next to a completion, which takes longer than the rest.
        """
        return TyperCommand(cmd_name) if cmd_name in _MODULES else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the verb that is used; `help VERB` is `VERB --help`."""
        if args[0] == "help":
            if not args[1:]:
                typer.echo(ctx.get_help())
                ctx.exit()
            args = [*args[1:], "--help"]
        name, found, rest = super().resolve_command(ctx, args)
        if name is not None:
            module = import_module(_MODULES[name])
            found = get_group(module.app).commands[name]
        return name, found, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, _MODULES))
        for title, verbs in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in verbs.items()])


app = new_app(
    cls=Verbs,
    epilog="\b\nStart with:        elasticctl submit train.py\nMore about a verb: elasticctl VERB --help",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from elasticctl import __version__

        typer.echo(f"elasticctl {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def elasticctl(
    ctx: typer.Context,
    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="NAME",
            show_default=False,
            autocompletion=complete_context,
            help="The context; you can also put this after the verb.",
        ),
    ] = "",
    namespace: Annotated[
        str,
        typer.Option(
            "-n",
            "--namespace",
            metavar="NAME",
            show_default=False,
            help="The namespace; you can also put this after the verb.",
        ),
    ] = "",
    debug: Annotated[bool, typer.Option("--debug", help="Show Python's traceback with an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Elastic PyTorch training on spot GPUs, from your machine to any cloud."""
    show_overview(ctx)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0: done; 1: a job failed, or elasticctl did; 2: wrong usage; 3: not found, or no answer from the cluster; 4:
    cancelled; 124: timed out; 130: interrupted; 141: the output's reader has gone.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    name_no_place()
    # A command's own words may be followed by --, after which everything belongs to the training script.
    ours = args[: args.index("--")] if "--" in args else args
    debug = "--debug" in ours or bool(os.environ.get(variables.DEBUG))
    try:
        result = get_command(app).main(args, prog_name="elasticctl", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (typer.TyperException, ElasticctlError, OSError) as e:
        return _report_error(e, debug)
    except typer.Abort as e:
        # Ctrl-C as shells report it; an end of input where an answer was wanted is a plain failure.
        return 130 if isinstance(e.__cause__ or e.__context__, KeyboardInterrupt) else 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as e:  # how Typer ends when the reader of the output has gone
        if not isinstance(e.__context__, BrokenPipeError):
            raise
        return _report_error(e.__context__, debug)
    except Exception as e:  # noqa: BLE001 - the edge: a bug of ours is one line too, unless asked for more
        return _report_bug(e, debug)


def _report_error(error: typer.TyperException | ElasticctlError | OSError, debug: bool) -> int:
    if isinstance(error, BrokenPipeError):
        # The reader of our output has closed it. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if debug:
        _print_traceback(error)
    if isinstance(error, typer.TyperException):
        _say_error(_usage_message(error))
        return error.exit_code
    if isinstance(error, OSError):
        _say_error(f"{error.filename or 'output'}: {error.strerror or error}")
        return 1
    _say_error(f"{error}{_TO_REACH_IT if str(error).startswith(_NO_ANSWER) else ''}")
    return error.exit_code


_NO_ANSWER = "no answer from the cluster"
_TO_REACH_IT = ". FIX: check your network or VPN; `elasticctl doctor` checks the context step by step"


def _report_bug(error: Exception, debug: bool) -> int:
    if debug:
        _print_traceback(error)
    else:
        _say_error(f"this is a bug in elasticctl: {type(error).__name__}: {error} (--debug shows where)")
    return 1


def _print_traceback(error: Exception) -> None:
    import traceback

    traceback.print_exception(error)


def _usage_message(error: typer.TyperException) -> str:
    message = error.format_message()
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return message
    if hasattr(error, "possibilities"):
        message = _unknown_option(getattr(error, "option_name", ""), context)
    return f"{message.removesuffix('.')}. See `{context.command_path} --help`."


_AFTER_DASHES = {"submit": "the script's own arguments", "exec": "the command's own options"}


def _unknown_option(name: str, context: Any) -> str:
    params = context.command.get_params(context)
    known = [option for param in params for option in (*param.opts, *param.secondary_opts)]
    # A letter is meant by a letter alone: -f is not near to --foo.
    near = did_you_mean(name, [option for option in known if option.startswith("--") or not name.startswith("--")])
    others = _AFTER_DASHES.get(context.info_name)
    more = f"; {others} come after `--`" if others else ""
    return f"{context.info_name} has no option {name}{near}{more}."


def _say_error(message: str) -> None:
    """Print an error on one line; its commands name the context and the namespace of this command line."""
    line = with_place(" ".join(message.split()))
    sys.stderr.write(f"error: {visible(line)}\n".encode(errors="backslashreplace").decode())
