"""`submit`: a plan, a job, and then its logs until it has ended."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from elasticctl.api.errors import ConflictError, UsageError
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import Verb, new_app, verb
from elasticctl.cli.framework.options import Assignment, Where
from elasticctl.cli.framework.output import hint, print_objects, say
from elasticctl.cli.framework.target import Target, locate
from elasticctl.cli.submit import failover
from elasticctl.cli.submit.follow import attach, await_end
from elasticctl.cli.submit.plan import Request
from elasticctl.cluster import connect
from elasticctl.cluster.base import Manifest

if TYPE_CHECKING:
    from elasticctl.cli.submit.manifest import Draft
    from elasticctl.settings.contexts import Context

_ATTEMPTS = 5
_SUFFIX_CHARS = "bcdfghjkmnpqrstvwxz23456789"

app = new_app()


@dataclass(frozen=True, slots=True)
class Source:
    """What the manifest is made from."""

    template: Annotated[
        str, typer.Option("--template", metavar="NAME", help="The job's shape: a template's name or path.")
    ] = "default"
    file: Annotated[
        str,
        typer.Option(
            "-f", "--file", metavar="FILE", show_default=False, help="Submit this ElasticJob manifest; - is stdin."
        ),
    ] = ""
    settings: Annotated[
        tuple[Assignment, ...],
        options.assignments("--set", "PATH=VALUE", "Change a field of the manifest: spec.policy.hangTimeoutSeconds=60"),
    ] = ()


@dataclass(frozen=True, slots=True)
class How:
    """What is to happen with the job."""

    detach: Annotated[bool, typer.Option("-d", "--detach", help="Return at once and print the job's name.")] = False
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end without showing the logs.")] = False
    dry_run: Annotated[
        Literal["client", "server"] | None,
        typer.Option("--dry-run", help="Print the manifest only; --dry-run=server has the cluster check it too."),
    ] = None
    output: Annotated[
        Literal["json", "yaml", "name"] | None,
        typer.Option("-o", "--output", help="How to print it, with -d or --dry-run."),
    ] = None

    notify: Annotated[
        str, options.text("News goes to the webhook whose URL is at secret:KEY, file:PATH, env:NAME; or none.", "REF")
    ] = ""

    def check(self) -> None:
        """Refuse what contradicts itself; UsageError."""
        if self.output and not (self.detach or self.dry_run):
            raise UsageError("--output goes with --detach or --dry-run; otherwise stdout is the job's own output")


@dataclass(frozen=True, slots=True)
class Places(Where):
    """Where to try, and how long."""

    capacity_timeout: Annotated[
        int | None, options.time("Give a context up that brings too few workers; 10m with several.")
    ] = None


class DryRunVerb(Verb):
    """Takes --dry-run with and without a value, as kubectl does; Typer has no options whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ours = ["--dry-run=client" if arg == "--dry-run" else arg for arg in args[:end]]
        return super().parse_args(ctx, ours + args[end:])


class SubmitVerb(DryRunVerb):
    """Has its many options in sections, those of docs/cli.md."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "How large": (
            "gpus", "gpu_type", "gpus_per_node", "workers", "min_gpus", "max_gpus", "min_workers", "max_workers",
            "spot", "priority", "queue",
        ),
        "What, and where its state goes": (
            "name", "workspace", "no_workspace", "workspace_limit", "env", "secrets", "mounts", "storage", "image",
            "service_account", "template", "file", "settings",
        ),
        "How long, and how often": ("backoff_limit", "restart_policy", "deadline", "hang_timeout", "ttl"),
        "What happens next": ("detach", "wait", "notify", "dry_run", "output"),
    }  # fmt: skip


@verb(app, "submit", cls=SubmitVerb)
def submit(
    ctx: typer.Context,
    *,
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT")] = None,
    args: Annotated[tuple[str, ...], typer.Argument(metavar="-- ARGS...")] = (),
    request: Request,
    source: Source,
    how: How,
    where: Places,
) -> int:
    """Run SCRIPT as an elastic job: workers may be lost and added while it trains.

    ARGS, after --, are the script's own. The exit code is that of `elasticctl wait`; Ctrl-C asks whether to let go of
    the job, which leaves it running, or to cancel it. Of several contexts (--context aws,gcp) the cheapest is tried
    first, and the next when capacity does not come.

    \b
      elasticctl submit train.py -- --epochs 90
      elasticctl submit train.py --gpus 16 --gpu-type t4 --min-gpus 4
      elasticctl submit -f job.yaml --set spec.backoffLimit=10
    """
    from elasticctl.cli.submit.manifest import (  # reads and writes YAML, which --help need not
        from_file,
        from_script,
        with_news,
    )

    how.check()
    if source.file:
        _check_alone(ctx, script)
    elif script is None:
        raise UsageError("what is to run? Give a script, or a manifest with -f; see `elasticctl submit --help`")

    def draft_in(context: Context) -> Draft:
        if source.file:
            draft = from_file(source.file, source.settings, request.name, where.namespace, context)
        else:
            draft = from_script(script or "", args, request, context, source.settings, template=source.template)
        return with_news(draft, how.notify, context)

    places = [
        dataclasses.replace(context, namespace=namespace)
        for context, namespace in (locate(Where(name, where.namespace)) for name in failover.several(where.context))
    ]
    context = places[0]
    if len(places) > 1 or where.capacity_timeout is not None:
        if source.file == "-":
            raise UsageError("-f - is read once only: with several contexts or --capacity-timeout give a file")
        search = _search(where)
        plan = failover.planner(request, None if source.file else script, draft_in)
        if not how.dry_run:
            return follow_up(*search.first(places, plan), how)
        context = search.cheapest(places, plan)
    return _submitted(context, draft_in(context), how)


def _submitted(context: Context, draft: Draft, how: How) -> int:
    """Create the job in this context, or only show what it would be; returns the exit code."""
    if how.dry_run == "client":
        manifest = draft.make(draft.name)
        draft.deliver(manifest, False)
        print_objects([manifest], how.output or "yaml", one=True)
        return 0
    target = Target(context, context.namespace, connect(context))
    manifest = _create(target, draft, dry_run=how.dry_run == "server")
    if how.dry_run:
        print_objects([manifest], how.output or "yaml", one=True)
        return 0
    return follow_up(target, manifest, how)


def _search(where: Places) -> failover.Search:
    """Each context in turn, for as long as it was said."""
    timeout_s = failover.CAPACITY_TIMEOUT_S if where.capacity_timeout is None else where.capacity_timeout
    return failover.Search(
        connect=lambda context: Target(context, context.namespace, connect(context)),
        create=lambda target, draft: _create(target, draft, dry_run=False),
        timeout_s=timeout_s,
    )


def _check_alone(ctx: typer.Context, script: str | None) -> None:
    """With a manifest, nothing else says what the job is like, but for its name."""
    if script is not None:
        raise UsageError("give a script or a manifest with -f, not both")
    refused = {"args", "template", *(field.name for field in dataclasses.fields(Request))} - {"name"}
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if parameter.name in refused and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]} does not go with -f; change the manifest with --set PATH=VALUE")


def _create(target: Target, draft: Draft, *, dry_run: bool) -> Manifest:
    """Create the job; under another name when ours is taken."""
    jobs = target.cluster.list_jobs(target.namespace) if draft.name_is_ours else []
    taken = {job["metadata"]["name"] for job in jobs}
    for left in reversed(range(_ATTEMPTS)):
        name = _free(draft.name, taken)
        try:
            manifest = draft.make(name)
            draft.deliver(manifest, not dry_run)
            return target.cluster.create_job(manifest, dry_run=dry_run)
        except ConflictError:
            # Somebody may have been quicker.
            if not (draft.name_is_ours and left):
                raise
            taken.add(name)
    raise AssertionError("unreachable")


def _free(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    free = f"{name}-{''.join(secrets.choice(_SUFFIX_CHARS) for _ in range(4))}"
    say(f"there is a job {name} already: this one is {free}")
    return free


def follow_up(target: Target, manifest: Manifest, how: How) -> int:
    """Go on with a job that has been created, as was asked for; returns the exit code."""
    name = manifest["metadata"]["name"]
    target = dataclasses.replace(target, namespace=manifest["metadata"]["namespace"])
    if how.detach:
        print_objects([manifest], how.output or "name", one=True)
        hint(f"watch it: elasticctl status -w {name}   its output: elasticctl logs -f {name}")
        return 0
    if how.wait:
        return await_end(target, name)
    return attach(target, name)
