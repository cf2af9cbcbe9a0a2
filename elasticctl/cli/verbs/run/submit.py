"""`submit`: print a plan, create the job, then follow its logs until it ends."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from elasticctl.api.errors import ConflictError, ForbiddenError, UsageError
from elasticctl.api.text import quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import Verb, new_app, verb
from elasticctl.cli.framework.options import Assignment, Where
from elasticctl.cli.framework.output import hint, print_objects, say
from elasticctl.cli.framework.target import Target, locate
from elasticctl.cli.submit import failover
from elasticctl.cli.submit.flags.job_flags import SECTIONS, JobFlags
from elasticctl.cli.submit.follow import attach, await_end, code_of_followed
from elasticctl.cluster import connect
from elasticctl.cluster.base import Manifest

if TYPE_CHECKING:
    from elasticctl.cli.submit.draft import Draft
    from elasticctl.cli.submit.job_file import JobFile
    from elasticctl.cli.submit.training_command import Command
    from elasticctl.settings.contexts import Context

_ATTEMPTS = 5
_FILES = "Script, files and storage"
_SUFFIX_CHARS = "bcdfghjkmnpqrstvwxz23456789"

app = new_app()


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """The source of the manifest."""

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
        str, options.text("Write the script, arguments and options to a file for -f, and submit nothing.", "FILE")
    ] = ""
    settings: Annotated[
        tuple[Assignment, ...],
        options.assignments("--set", "PATH=VALUE", "Change a field of the manifest: spec.policy.hangTimeoutSeconds=60"),
    ] = ()


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

    notify: Annotated[
        str,
        options.text(
            "Notify the webhook whose URL is in secret:KEY, file:PATH or env:NAME; none: do not notify.", "REF"
        ),
    ] = ""

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


AFTER_DRY_RUN = "elasticctl.after_dry_run"
"""Where the words behind a `--dry-run` without a value are among the context's meta data."""


class DryRunVerb(Verb):
    """Takes --dry-run with or without a value, as kubectl does; Typer does not support optional values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[AFTER_DRY_RUN] = {word for before, word in pairwise(args[:end]) if before == "--dry-run"}
        ours = ["--dry-run=client" if arg == "--dry-run" else arg for arg in args[:end]]
        return super().parse_args(ctx, ours + args[end:])


JOB_FILE = "elasticctl.job_file"
PROJECT_FILE = "elasticctl.project_file"
AFTER_DASHES = "elasticctl.after_dashes"
"""Where the parsed job file, the project's, and the words after `--`, are among the context's meta data."""


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
        ctx.meta[AFTER_DASHES] = tuple(args[len(ours) + 1 :])
        if not (ctx.resilient_parsing or {"-h", "--help"} & {*ours}):
            from elasticctl.cli.submit import job_file

            known = job_file.options_of_files(self.params)
            path = _file_of(ours)
            found = job_file.read_job_file(path, known) if path else None
            ctx.meta[JOB_FILE] = found
            folder = Path(os.path.abspath(path)).parent if found else Path.cwd()
            project = job_file.read_project_file(folder, known) if found or not path else job_file.JobFile()
            ctx.default_map = {**project.options, **(found.options if found else {})}
            ctx.meta[PROJECT_FILE] = project
        return super().parse_args(ctx, args)


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
    request: JobFlags,
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
    command = _what_to_run(ctx, source, script, args, starts_ranks=request.launcher)
    _check_files(ctx, command)
    draft_in = partial(_draft, command, request, source, how.notify, where.namespace)
    places = [
        dataclasses.replace(context, namespace=namespace)
        for context, namespace in (
            locate(Where(name, where.namespace)) for name in failover.split_contexts(where.context)
        )
    ]
    context = places[0]
    if source.save:
        draft_in(context)  # what cannot be is not written
        if command is not None:
            _save(ctx, source.save, command)
        if not how.dry_run:
            return 0
    if len(places) > 1 or where.capacity_timeout is not None:
        if command is None and source.file == "-":
            raise UsageError(
                "stdin can be read only once, but several contexts and --capacity-timeout read the"
                " manifest again. FIX: give -f a file"
            )
        search = _new_search(where)
        plan = failover.planner(request, command, draft_in)
        if not how.dry_run:
            target, manifest = search.first(places, plan)
            code = follow_up(target, manifest, how)
            # One that ended while the search waited for its workers is not handed on as if it ran.
            return code_of_followed(target, manifest) if how.detach else code
        context = search.cheapest(places, plan)
    draft = draft_in(context)
    if draft.doubt:
        _confirm(draft.doubt, dry_run=how.dry_run is not None)
    return _submit_to(context, draft, how)


def _check_files(ctx: typer.Context, command: Command | None) -> None:
    """Raise UsageError or JobStorageError if a file chooses what is sent, or the target, without being allowed to."""
    from elasticctl.cli.submit import job_file

    written: JobFile = ctx.meta.get(JOB_FILE) or job_file.JobFile()
    project: JobFile = ctx.meta.get(PROJECT_FILE) or job_file.JobFile()
    names = []
    for name in {*written.options, *project.options}:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "DEFAULT_MAP":
            names.append(name)
    runs_its_script = command is not None and written.script and command.script == written.script
    job_file.check_reach(written, [*(["script"] if runs_its_script else []), *names])
    job_file.check_reach(project, [name for name in names if name not in written.options])


def _what_to_run(
    ctx: typer.Context, source: ManifestSource, script: str | None, args: tuple[str, ...], *, starts_ranks: bool
) -> Command | None:
    """The command as typed or from the job file; None for a manifest, which contains it."""
    from elasticctl.cli.submit.training_command import Command, of_words

    written: JobFile | None = ctx.meta.get(JOB_FILE)
    after: tuple[str, ...] = ctx.meta[AFTER_DASHES]
    words = (*([script] if script is not None else []), *args)
    typed = words[: len(words) - len(after)]
    _check_dry_run(ctx, typed[1:])
    if source.file and written is None:
        _check_alone(ctx, script)
        if source.save:
            raise UsageError("--save writes what is typed, and a manifest is a file already. FIX: leave out --save")
        return None
    if source.module:
        if typed:
            raise UsageError(f"-m {source.module} and {quote(typed[0])} cannot be used together. FIX: give one of them")
        return Command("", ("python", "-m", source.module, *after))
    if typed and typed[0]:
        return Command(typed[0], (*typed[1:], *after))
    if written is not None and not typed:
        if written.script:
            return Command(written.script, after or written.args)
        return of_words(written.command, starts_ranks=starts_ranks)
    if typed or not after:  # a variable of a shell that is not set, perhaps
        raise UsageError("nothing to run. FIX: give a script, or a manifest with -f")
    return of_words(after, starts_ranks=starts_ranks)


def _check_dry_run(ctx: typer.Context, args: tuple[str, ...]) -> None:
    """Raise UsageError if one of the script's arguments may be meant as the value of --dry-run."""
    for word in args:
        if word in ctx.meta[AFTER_DRY_RUN]:
            raise UsageError(
                f"--dry-run {quote(word)}: is that a value, or an argument of the script? FIX: --dry-run=client or "
                "--dry-run=server; put arguments of the script behind --"
            )


def _draft(
    command: Command | None,
    request: JobFlags,
    source: ManifestSource,
    notify: str,
    namespace: str,
    context: Context,
) -> Draft:
    """The planned job in a context; `command` None: the job of a manifest."""
    from elasticctl.cli.submit.draft import from_command, from_file, with_notifications

    if command is None:
        draft = from_file(source.file, source.settings, request.name, namespace, context, same_code=source.same_code)
    else:
        draft = from_command(command, request, context, source.settings, template=source.template)
    return with_notifications(draft, notify, context)


def _save(ctx: typer.Context, path: str, command: Command) -> None:
    """Write a job file with the typed options and those of the job file they were added to."""
    from elasticctl.cli.submit import job_file

    written: JobFile | None = ctx.meta.get(JOB_FILE)
    options = {**command.options, **(written.options if written is not None else {})}
    if command.env:
        options["env"] = [f"{name}={value}" for name, value in command.env]
    known = job_file.options_of_files(ctx.command.params)
    for name in known:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            options[name] = job_file.as_typed(ctx.params[name])
    job_file.write_job_file(path, command.script, command.args, options)
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
    if how.dry_run == "client":
        manifest = draft.make(draft.name)
        draft.deliver(manifest, False)
        print_objects([manifest], how.output or "yaml", one=True)
        return 0
    target = Target(context, context.namespace, connect(context))
    manifest = create(target, draft, dry_run=how.dry_run == "server")
    if how.dry_run:
        print_objects([manifest], how.output or "yaml", one=True)
        return 0
    return follow_up(target, manifest, how)


def _new_search(where: Places) -> failover.Search:
    """The search through the contexts, each for the given time."""
    timeout_s = failover.CAPACITY_TIMEOUT_S if where.capacity_timeout is None else where.capacity_timeout
    return failover.Search(
        connect=lambda context: Target(context, context.namespace, connect(context)),
        create=lambda target, draft: create(target, draft, dry_run=False),
        timeout_s=timeout_s,
    )


def _check_alone(ctx: typer.Context, script: str | None) -> None:
    """Raise UsageError for options beside a manifest, which defines everything about the job but its name."""
    if script is not None:
        raise UsageError("a script and a manifest (-f) cannot be used together. FIX: give one of them")
    refused = {"args", "template", *(field.name for field in dataclasses.fields(JobFlags))} - {"name"}
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if parameter.name in refused and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{parameter.opts[0]} cannot be used with -f. FIX: change the manifest with --set PATH=VALUE"
            )


def create(target: Target, draft: Draft, *, dry_run: bool) -> Manifest:
    """Create the job, under another name if a generated one is taken."""
    jobs = target.cluster.list_jobs(target.namespace) if draft.name_is_ours else []
    taken = {job["metadata"]["name"] for job in jobs}
    for left in reversed(range(_ATTEMPTS)):
        name = _free_name(draft.name, taken)
        try:
            manifest = draft.make(name)
            if not draft.name_is_ours:
                refuse_taken_name(target, manifest)
            _refuse_over_limit(target, manifest)
            draft.deliver(manifest, not dry_run)
            return target.cluster.create_job(manifest, dry_run=dry_run)
        except ConflictError:
            # Somebody may have been quicker.
            if not (draft.name_is_ours and left):
                raise
            taken.add(name)
    raise AssertionError("unreachable")


def _refuse_over_limit(target: Target, manifest: Manifest) -> None:
    """Raise SpecError for a job that its project does not allow, before anything is uploaded.

    If the user may not read quotas, the cluster refuses the job instead.
    """
    from elasticctl.api.quota import Quota, refuse_over_limit

    project = manifest["metadata"].get("namespace") or target.namespace
    try:
        quotas = target.cluster.list_quotas()
    except ForbiddenError:
        return
    known = {quota.project: quota for quota in map(Quota.from_manifest, quotas)}
    refuse_over_limit(manifest, known.get(project))


def refuse_taken_name(target: Target, manifest: Manifest) -> None:
    """Raise ConflictError if the name is taken, before anything is uploaded."""
    name, namespace = manifest["metadata"]["name"], manifest["metadata"].get("namespace") or target.namespace
    if all(job["metadata"]["name"] != name for job in target.cluster.list_jobs(namespace)):
        return
    raise ConflictError(
        f"job {namespace}/{name} already exists. FIX: choose another name,"
        f" or delete it first (elasticctl delete {name})"
    )


def _free_name(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    free = f"{name}-{''.join(secrets.choice(_SUFFIX_CHARS) for _ in range(4))}"
    say(f"the name {name} is taken: this job is named {free}")
    return free


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
