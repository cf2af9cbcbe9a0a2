"""`submit`: print a plan, create the job, then follow its logs until it ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from elasticctl.api.errors import UsageError
from elasticctl.api.text import quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import Verb, new_app, verb
from elasticctl.cli.framework.output import hint, print_objects
from elasticctl.cli.framework.place import Where, locate
from elasticctl.cli.verbs.start_jobs.job_options import JOB_OPTIONS, SECTIONS
from elasticctl.cli.views.follow import attach, await_end, code_of_followed
from elasticctl.cluster import connect
from elasticctl.cluster.base import Manifest
from elasticctl.operations.option_values import Assignment
from elasticctl.operations.submit.job_flags import JobFlags
from elasticctl.operations.target import Target
from elasticctl.terminal import Terminal, say

if TYPE_CHECKING:
    from elasticctl.cli.verbs.start_jobs.job_file import JobFile
    from elasticctl.operations.submit.create import Draft
    from elasticctl.operations.submit.training_command import TrainingCommand
    from elasticctl.settings.contexts import Context

_FILES = "Script, files and storage"

app = new_app()


NOTIFY_OPTION: Any = options.described(
    "Notify the webhook whose URL is in secret:KEY, file:PATH or env:NAME; none: do not notify.", "REF"
)


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """The source of the manifest, and what is changed in it."""

    template: Annotated[
        str, typer.Option("--template", metavar="NAME", help="The template to render the job with: its name or path.")
    ] = "default"
    file: Annotated[
        str,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            show_default=False,
            help="Submit this job file or ElasticJob manifest; - reads stdin.",
        ),
    ] = ""
    module: Annotated[
        str, typer.Option("-m", "--module", metavar="NAME", show_default=False, help="Run a module, like python -m.")
    ] = ""
    same_code: Annotated[
        bool, typer.Option("--same-code", help="With -f: run the code that the manifest names, not the folder's.")
    ] = False
    save: Annotated[
        str, options.described("Write the script, arguments and options to a file for -f, and submit nothing.", "FILE")
    ] = ""
    settings: Annotated[
        tuple[Assignment, ...],
        options.assignments("--set", "PATH=VALUE", "Change a field of the manifest: spec.policy.hangTimeoutSeconds=60"),
    ] = ()
    notify: Annotated[str, NOTIFY_OPTION] = ""


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What to do with the job."""

    detach: Annotated[bool, typer.Option("-d", "--detach", help="Return immediately and print the job's name.")] = False
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end without showing the logs.")] = False
    dry_run: Annotated[
        Literal["client", "server"] | None,
        typer.Option("--dry-run", help="Only print the manifest; server: have the cluster validate it too."),
    ] = None
    output: Annotated[
        Literal["json", "yaml", "name"] | None,
        typer.Option("-o", "--output", help="Output format, with -d or --dry-run."),
    ] = None

    def check(self) -> None:
        """Raise UsageError for contradicting options."""
        if self.output and not (self.detach or self.dry_run):
            raise UsageError("--output needs --detach or --dry-run: without them stdout is the output of the job")


@dataclass(frozen=True, slots=True)
class Places(Where):
    """The contexts to try, and for how long."""

    capacity_timeout: Annotated[
        int | None,
        options.time("Try the next context if too few workers start within this time; 10m with several contexts."),
    ] = None


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line says beyond its parsed options.

    `after_dashes` are the words after `--`. `after_dry_run` are those after a --dry-run without a value. `written` is
    the job file, `project` the project file. `typed` names the parameters that were typed, `from_files` those that a
    file gave.
    """

    after_dashes: tuple[str, ...] = ()
    after_dry_run: frozenset[str] = frozenset()
    written: JobFile | None = None
    project: JobFile | None = None
    typed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    from_files: tuple[str, ...] = ()


class DryRunVerb(Verb):
    """Takes --dry-run with or without a value, as kubectl does; Typer does not support optional values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ours = ["--dry-run=client" if arg == "--dry-run" else arg for arg in args[:end]]
        return super().parse_args(ctx, ours + args[end:])


class SubmitVerb(DryRunVerb):
    """Lists its many options in the sections of docs/cli.md, and takes options from files."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **SECTIONS,
        _FILES: (*SECTIONS[_FILES], "template", "module", "file", "same_code", "settings"),
        "After submission": ("detach", "wait", "notify", "dry_run", "save", "output"),
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typed options take precedence over the job file, and that over the project file."""
        ours = args[: args.index("--")] if "--" in args else args
        written = project = None
        if not (ctx.resilient_parsing or {"-h", "--help"} & {*ours}):
            from elasticctl.cli.verbs.start_jobs import job_file

            known = job_file.options_of_files(self.params)
            path = _file_of(ours)
            written = job_file.read_job_file(path, known) if path else None
            folder = Path(os.path.abspath(path)).parent if written else Path.cwd()
            project = job_file.read_project_file(folder, known) if written or not path else None
            files = (project, written)
            ctx.default_map = {name: value for file in files if file for name, value in file.options.items()}
        rest = super().parse_args(ctx, args)
        ctx.obj = CommandLine(
            after_dashes=tuple(args[len(ours) + 1 :]),
            after_dry_run=frozenset(word for before, word in pairwise(ours) if before == "--dry-run"),
            written=written,
            project=project,
            typed={name: ctx.params[name] for name in ctx.params if _source_of(ctx, name) == "COMMANDLINE"},
            from_files=tuple(name for name in ctx.params if _source_of(ctx, name) == "DEFAULT_MAP"),
        )
        return rest


def _source_of(ctx: Any, parameter: str) -> str:
    """Where the value of a parameter comes from, as Typer calls it."""
    source = ctx.get_parameter_source(parameter)
    return "" if source is None else str(source.name)


def _file_of(args: list[str]) -> str:
    """The value of -f, before anything is parsed; "" for none or stdin."""
    for at, word in enumerate(args):
        name, mark, value = word.partition("=")
        if name == "--file" and mark:
            return value
        if word in ("-f", "--file") and args[at + 1 :]:
            return args[at + 1].removeprefix("-")
        if word.startswith("-f") and not word.startswith("--"):
            return word[2:]
    return ""


@verb(app, "submit", cls=SubmitVerb)
def submit(
    ctx: typer.Context,
    *,
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT")] = None,
    args: Annotated[tuple[str, ...], typer.Argument(metavar="-- ARGS...")] = (),
    flags: Annotated[JobFlags, JOB_OPTIONS],
    source: ManifestSource,
    how: SubmitOptions,
    where: Places,
) -> int:
    """Run SCRIPT as an elastic job: it keeps training while workers are lost and added.

    ARGS, after --, are passed to the script; without SCRIPT, they are any command, such as a torchrun command line.
    The exit code is that of `elasticctl wait`. Ctrl-C asks whether to detach, which leaves the job running, or to
    cancel it. With several contexts (--context aws,gcp), the cheapest is tried first, and the next if there is no
    capacity. Options that you do not give come from elasticctl.toml, or from [tool.elasticctl] in pyproject.toml.

    \b
      elasticctl submit train.py -- --epochs 90
      elasticctl submit train.py --gpus 16 --gpu-type t4 --min-gpus 4
      elasticctl submit -- torchrun --nproc-per-node 2 train.py
      elasticctl submit -f job.yaml --set spec.backoffLimit=10
    """
    how.check()
    line: CommandLine = ctx.obj
    words = (*([script] if script is not None else []), *args)
    _check_dry_run(line, words[1 : len(words) - len(line.after_dashes)])
    if source.file and line.written is None:
        _check_alone(ctx, line, script)
        command = None
    else:
        command = _what_to_run(line, source.module, words, starts_ranks=flags.launcher)
    _check_files(line, command)
    planner = _Planner(command, flags, source, where.namespace)
    places = _places_of(where)
    if source.save:
        if command is None:
            raise UsageError("--save writes what is typed, and a manifest is a file already. FIX: leave out --save")
        planner.plan(places[0])  # what cannot run is not written
        _save(ctx, line, source.save, command)
        if not how.dry_run:
            return 0
    if len(places) == 1 and where.capacity_timeout is None:
        return _submit_to(places[0], planner.plan(places[0]), how)
    return _search(places, planner, where, how)


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans the job of a command line in a context; `command` None: the job of a manifest."""

    command: TrainingCommand | None
    flags: JobFlags
    source: ManifestSource
    namespace: str

    def plan(self, context: Context) -> Draft:
        from elasticctl.operations.submit.create import ManifestChanges, ManifestFile, plan_command, plan_manifest

        source, observer = self.source, Terminal()
        changes = ManifestChanges(source.settings, source.notify)
        if self.command is not None:
            return plan_command(self.command, self.flags, context, changes, template=source.template, observer=observer)
        text = _read_manifest(source.file)
        file = ManifestFile(text, source.file, self.flags.name, self.namespace, same_code=source.same_code)
        return plan_manifest(file, context, changes, observer)


def _read_manifest(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e


def _places_of(where: Places) -> list[Context]:
    """The contexts to try, each with the namespace to use there."""
    from elasticctl.operations.submit.failover import split_contexts

    located = (locate(Where(name, where.namespace)) for name in split_contexts(where.context))
    return [dataclasses.replace(context, namespace=namespace) for context, namespace in located]


def _search(places: Sequence[Context], planner: _Planner, where: Places, how: SubmitOptions) -> int:
    """Submit the job to the cheapest of several contexts that has capacity; returns the exit code."""
    from elasticctl.operations.submit.failover import CAPACITY_TIMEOUT_S, Search

    if planner.command is None and planner.source.file == "-":
        raise UsageError(
            "stdin can be read only once, but several contexts and --capacity-timeout read the"
            " manifest again. FIX: give -f a file"
        )
    timeout_s = CAPACITY_TIMEOUT_S if where.capacity_timeout is None else where.capacity_timeout
    search = Search(_target_in, timeout_s, Terminal())
    if how.dry_run:
        context = search.cheapest(places, planner.plan)
        return _submit_to(context, planner.plan(context), how)
    with _interruptible():
        target, manifest = search.first(places, planner.plan)
    code = follow_up(target, manifest, how)
    # A job that ended while the search waited for its workers does not count as one that runs.
    return code_of_followed(target, manifest) if how.detach else code


@contextmanager
def _interruptible() -> Iterator[None]:
    """A closed terminal and SIGTERM end the search as Ctrl-C does, unless they are ignored (nohup)."""
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, signal.default_int_handler) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def _target_in(context: Context) -> Target:
    return Target(context, context.namespace, connect(context), Terminal())


def _check_files(line: CommandLine, command: TrainingCommand | None) -> None:
    """Raise UsageError or JobStorageError if a file chooses what is sent, or the target, without being allowed to."""
    from elasticctl.cli.verbs.start_jobs import job_file

    written, project = line.written or job_file.JobFile(), line.project or job_file.JobFile()
    runs_its_script = command is not None and written.script and command.script == written.script
    names = [name for name in line.from_files if name in written.options]
    job_file.check_reach(written, [*(["script"] if runs_its_script else []), *names])
    job_file.check_reach(project, [name for name in line.from_files if name not in written.options])


def _what_to_run(line: CommandLine, module: str, words: tuple[str, ...], *, starts_ranks: bool) -> TrainingCommand:
    """The command as typed or from the job file."""
    from elasticctl.operations.submit.training_command import TrainingCommand, of_words

    written, after = line.written, line.after_dashes
    typed = words[: len(words) - len(after)]
    if module:
        if typed:
            raise UsageError(f"-m {module} and {quote(typed[0])} cannot be used together. FIX: give one of them")
        return TrainingCommand("", ("python", "-m", module, *after))
    if typed and typed[0]:
        return TrainingCommand(typed[0], (*typed[1:], *after))
    if written is not None and not typed:
        if written.script:
            return TrainingCommand(written.script, after or written.args)
        return of_words(written.command, starts_ranks=starts_ranks)
    if typed or not after:  # a variable of a shell that is not set, perhaps
        raise UsageError("nothing to run. FIX: give a script, or a manifest with -f")
    return of_words(after, starts_ranks=starts_ranks)


def _check_dry_run(line: CommandLine, args: tuple[str, ...]) -> None:
    """Raise UsageError if one of the script's arguments may be meant as the value of --dry-run."""
    for word in args:
        if word in line.after_dry_run:
            raise UsageError(
                f"--dry-run {quote(word)}: is that a value, or an argument of the script? FIX: --dry-run=client or "
                "--dry-run=server; put arguments of the script after --"
            )


def _check_alone(ctx: typer.Context, line: CommandLine, script: str | None) -> None:
    """Raise UsageError for options next to a manifest, which defines everything about the job but its name."""
    if script is not None:
        raise UsageError("a script and a manifest (-f) cannot be used together. FIX: give one of them")
    refused = {"args", "template", *(field.name for field in dataclasses.fields(JobFlags))} - {"name"}
    for parameter in ctx.command.params:
        if parameter.name in refused and parameter.name in line.typed:
            raise UsageError(
                f"{parameter.opts[0]} cannot be used with -f. FIX: change the manifest with --set PATH=VALUE"
            )


def _save(ctx: typer.Context, line: CommandLine, path: str, command: TrainingCommand) -> None:
    """Write a job file with the typed options and those of the job file they were added to."""
    from elasticctl.cli.verbs.start_jobs import job_file

    saved = {**command.options, **(line.written.options if line.written is not None else {})}
    if command.env:
        saved["env"] = [f"{name}={value}" for name, value in command.env]
    for name in job_file.options_of_files(ctx.command.params):
        if name in line.typed:
            saved[name] = job_file.as_typed(line.typed[name])
    job_file.write_job_file(path, command.script, command.args, saved)
    say(f"{path}: written, nothing submitted")
    hint(f"Next: submit it: elasticctl submit -f {path}")


def _confirm(doubt: str, *, dry_run: bool) -> None:
    """Ask for confirmation. Raises UsageError for no, or without a terminal. A dry run only prints the doubt."""
    if dry_run:
        say(doubt)
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(doubt)
    if not typer.confirm(f"{doubt.partition(' FIX: ')[0]} Run it there anyway?", err=True):
        raise UsageError(f"not submitted: {doubt}")


def _submit_to(context: Context, draft: Draft, how: SubmitOptions) -> int:
    """Create the job in this context, or only show it; returns the exit code."""
    from elasticctl.operations.submit.create import create, preview

    if draft.doubt:
        _confirm(draft.doubt, dry_run=how.dry_run is not None)
    if how.dry_run == "client":
        print_objects([preview(draft, Terminal())], how.output or "yaml", one=True)
        return 0
    target = _target_in(context)
    manifest = create(target, draft, dry_run=how.dry_run == "server")
    if how.dry_run:
        print_objects([manifest], how.output or "yaml", one=True)
        return 0
    return follow_up(target, manifest, how)


def follow_up(target: Target, manifest: Manifest, how: SubmitOptions) -> int:
    """Follow a created job, or not, as requested; returns the exit code."""
    name = manifest["metadata"]["name"]
    target = dataclasses.replace(target, namespace=manifest["metadata"]["namespace"])
    if how.detach:
        print_objects([manifest], how.output or "name", one=True)
        hint(f"Next: watch it: elasticctl status -w {name}   follow its output: elasticctl logs -f {name}")
        return 0
    if how.wait:
        return await_end(target, manifest)
    return attach(target, manifest)
