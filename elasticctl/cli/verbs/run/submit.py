"""`submit`: print a plan, create the job, then follow its logs until it ends."""

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
from elasticctl.cli.submit.follow import attach, await_end, code_of_followed
from elasticctl.cli.submit.plan import JobFlags
from elasticctl.cluster import connect
from elasticctl.cluster.base import Manifest

if TYPE_CHECKING:
    from elasticctl.cli.submit.draft import Draft
    from elasticctl.settings.contexts import Context

_ATTEMPTS = 5
_SUFFIX_CHARS = "bcdfghjkmnpqrstvwxz23456789"

app = new_app()


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """What the manifest is made from."""

    template: Annotated[
        str, typer.Option("--template", metavar="NAME", help="The job's shape: a template's name or path.")
    ] = "default"
    file: Annotated[
        str,
        typer.Option(
            "-f", "--file", metavar="FILE", show_default=False, help="Submit this ElasticJob manifest; - reads stdin."
        ),
    ] = ""
    settings: Annotated[
        tuple[Assignment, ...],
        options.assignments("--set", "PATH=VALUE", "Change a field of the manifest: spec.policy.hangTimeoutSeconds=60"),
    ] = ()


@dataclass(frozen=True, slots=True)
class SubmitOptions:
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
        str, options.text("Notify the webhook whose URL is in secret:KEY, file:PATH or env:NAME; or none.", "REF")
    ] = ""

    def check(self) -> None:
        """Refuse what contradicts itself; UsageError."""
        if self.output and not (self.detach or self.dry_run):
            raise UsageError("--output needs --detach or --dry-run: without them stdout is the output of the job")


@dataclass(frozen=True, slots=True)
class Places(Where):
    """Where to try, and how long."""

    capacity_timeout: Annotated[
        int | None, options.time("Try the next context when too few workers start in this time; 10m with several.")
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
    request: JobFlags,
    source: ManifestSource,
    how: SubmitOptions,
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
    from elasticctl.cli.submit.draft import from_file, from_script, with_notifications

    how.check()
    if source.file:
        _check_alone(ctx, script)
    elif script is None:
        raise UsageError("nothing to run. FIX: give a script, or a manifest with -f")

    def draft_in(context: Context) -> Draft:
        if source.file:
            draft = from_file(source.file, source.settings, request.name, where.namespace, context)
        else:
            draft = from_script(script or "", args, request, context, source.settings, template=source.template)
        return with_notifications(draft, how.notify, context)

    places = [
        dataclasses.replace(context, namespace=namespace)
        for context, namespace in (
            locate(Where(name, where.namespace)) for name in failover.split_contexts(where.context)
        )
    ]
    context = places[0]
    if len(places) > 1 or where.capacity_timeout is not None:
        if source.file == "-":
            raise UsageError(
                "stdin can be read only once, but several contexts and --capacity-timeout read the"
                " manifest again. FIX: give -f a file"
            )
        search = _new_search(where)
        plan = failover.planner(request, None if source.file else script, draft_in)
        if not how.dry_run:
            target, manifest = search.first(places, plan)
            code = follow_up(target, manifest, how)
            # One that ended while the search waited for its workers is not handed on as if it ran.
            return code_of_followed(target, manifest) if how.detach else code
        context = search.cheapest(places, plan)
    return _submit_to(context, draft_in(context), how)


def _submit_to(context: Context, draft: Draft, how: SubmitOptions) -> int:
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


def _new_search(where: Places) -> failover.Search:
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
        raise UsageError("a script and a manifest (-f) contradict each other. FIX: give one of them")
    refused = {"args", "template", *(field.name for field in dataclasses.fields(JobFlags))} - {"name"}
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if parameter.name in refused and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]} does not go with -f. FIX: change the manifest with --set PATH=VALUE")


def _create(target: Target, draft: Draft, *, dry_run: bool) -> Manifest:
    """Create the job; under another name when ours is taken."""
    jobs = target.cluster.list_jobs(target.namespace) if draft.name_is_ours else []
    taken = {job["metadata"]["name"] for job in jobs}
    for left in reversed(range(_ATTEMPTS)):
        name = _free_name(draft.name, taken)
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


def _free_name(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    free = f"{name}-{''.join(secrets.choice(_SUFFIX_CHARS) for _ in range(4))}"
    say(f"the name {name} is taken: this job is called {free}")
    return free


def follow_up(target: Target, manifest: Manifest, how: SubmitOptions) -> int:
    """Go on with a job that has been created, as was asked for; returns the exit code."""
    name = manifest["metadata"]["name"]
    target = dataclasses.replace(target, namespace=manifest["metadata"]["namespace"])
    if how.detach:
        print_objects([manifest], how.output or "name", one=True)
        hint(f"Next: watch it: elasticctl status -w {name}   follow its output: elasticctl logs -f {name}")
        return 0
    if how.wait:
        return await_end(target, manifest)
    return attach(target, manifest)
