"""`submit`: a plan, a job, and then its logs until it has ended."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from elasticctl.cli import options
from elasticctl.cli.attach import attach
from elasticctl.cli.outcome import await_end
from elasticctl.cli.output import hint, print_objects, say
from elasticctl.cli.plan import Request
from elasticctl.cli.target import Target, Where, locate
from elasticctl.cluster import connect
from elasticctl.cluster.base import Cluster, Manifest
from elasticctl.errors import ConflictError, UsageError
from elasticctl.spec import DEFAULT_BACKOFF_LIMIT, RestartPolicy

if TYPE_CHECKING:
    from elasticctl.cli.making import Draft

_ATTEMPTS = 5
_SUFFIX_CHARS = "bcdfghjkmnpqrstvwxz23456789"
_COUNT = options.Whole(1)
_ANY_COUNT = options.Whole(0)


@dataclass(frozen=True, slots=True)
class How:
    """What is to happen with the job; `dry_run` is "client", "server" or None."""

    template: str
    file: str
    settings: tuple[tuple[str, str], ...]
    detach: bool
    wait: bool
    dry_run: str | None
    form: str | None


class _Submit(click.Command):
    """Takes --dry-run with and without a value, as kubectl does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ours = ["--dry-run=client" if arg == "--dry-run" else arg for arg in args[:end]]
        return super().parse_args(ctx, ours + args[end:])


@click.command(cls=_Submit, short_help="Run a training script as an elastic job")
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--gpus", type=_ANY_COUNT, metavar="N", help="How many GPUs in all.")
@click.option("--gpu-type", metavar="TYPE", default="", help="t4, v100, a10g, l4, a100 or h100.")
@click.option("--gpus-per-node", type=_COUNT, metavar="N", help="How many of them on each worker.")
@click.option("--workers", type=_COUNT, metavar="N", help="How many workers; without --gpus they run on CPUs.")
@click.option("--min-gpus", type=_COUNT, metavar="N", help="Go on with as few as N GPUs.")
@click.option("--max-gpus", type=_COUNT, metavar="N", help="Never use more than N GPUs.")
@click.option("--min-workers", type=_COUNT, metavar="N", help="Go on with as few as N workers; 1 by default.")
@click.option("--max-workers", type=_COUNT, metavar="N", help="Never use more than N workers.")
@click.option("--name", metavar="NAME", default="", help="The job's name; made from the script's by default.")
@click.option("--image", metavar="IMAGE", default="", help="The container image; on this machine there is none.")
@click.option("--env", type=options.Assignment("NAME=VALUE"), multiple=True, help="A variable of the script's.")
@click.option("--storage", metavar="URL", default="", help="Where state is kept: a folder, s3://…, gs://…")
@click.option("--spot/--on-demand", default=True, help="Spot capacity (the default) or not.")
@click.option("--backoff-limit", type=_ANY_COUNT, default=DEFAULT_BACKOFF_LIMIT, metavar="N", show_default=True,
              help="How many failures of the script to put up with.")  # fmt: skip
@click.option(
    "--deadline", type=options.Duration(), metavar="TIME", help="Fail the job when it takes longer than this."
)
@click.option("--ttl", type=options.Duration(), metavar="TIME", help="Delete the job this long after its end.")
@click.option("--restart-policy", type=click.Choice([policy.value for policy in RestartPolicy]),
              default=RestartPolicy.ON_FAILURE.value, help="Which ended workers are replaced.")  # fmt: skip
@click.option("--template", metavar="NAME", default="default", show_default=True, help="The job's shape, or a path.")
@click.option("-f", "--file", metavar="FILE", default="", help="Submit this ElasticJob manifest instead; - is stdin.")
@click.option("--set", "settings", type=options.Assignment("PATH=VALUE"), multiple=True,
              help="Change a field of the manifest: spec.policy.hangTimeoutSeconds=60")  # fmt: skip
@click.option("-d", "--detach", is_flag=True, help="Return at once and print the job's name.")
@click.option("--wait", is_flag=True, help="Wait for the end without showing the logs.")
@click.option("--dry-run", type=click.Choice(["client", "server"]), default=None, help="Print the manifest only.")
@click.option("-o", "--output", "form", type=click.Choice(["json", "yaml", "name"]), help="With -d or --dry-run.")
@options.target
@click.pass_context
def submit(ctx: click.Context, /, where: Where, script: str | None, args: tuple[str, ...], **given: Any) -> int:
    """Run SCRIPT as an elastic job: workers may be lost and added while it trains.

    ARGS, after --, are the script's own. The exit code is that of `elasticctl wait`; Ctrl-C lets go of the job and
    leaves it running.

    \b
      elasticctl submit train.py -- --epochs 90
      elasticctl submit train.py --gpus 16 --gpu-type t4 --min-gpus 4
      elasticctl submit -f job.yaml --set spec.backoffLimit=10
    """
    from elasticctl.cli.making import from_file, from_script  # reads and writes YAML, which --help need not

    how = How(**{field.name: given.pop(field.name) for field in dataclasses.fields(How)})
    if how.form and not (how.detach or how.dry_run):
        raise UsageError("--output goes with --detach or --dry-run; otherwise stdout is the job's own output")
    context, namespace = locate(where)
    if how.file:
        _check_alone(ctx, script)
        draft = from_file(
            how.file,
            how.settings,
            name=given["name"],
            namespace=where.namespace,
            default_namespace=context.namespace,
        )
    elif script is None:
        raise UsageError("what is to run? Give a script, or a manifest with -f; see `elasticctl submit --help`")
    else:
        given |= {"env": dict(given["env"]), "restart_policy": RestartPolicy(given["restart_policy"])}
        request = Request(namespace=namespace, **given)
        draft = from_script(script, args, request, context, how.settings, template=how.template)
    if how.dry_run == "client":
        print_objects([draft.make(draft.name)], how.form or "yaml", one=True)
        return 0
    cluster = connect(context)
    manifest = _create(cluster, draft, dry_run=how.dry_run == "server")
    if how.dry_run:
        print_objects([manifest], how.form or "yaml", one=True)
        return 0
    return _follow_up(Target(context, manifest["metadata"]["namespace"], cluster), manifest, how)


def _check_alone(ctx: click.Context, script: str | None) -> None:
    """With a manifest, nothing else says what the job is like."""
    if script is not None:
        raise UsageError("give a script or a manifest with -f, not both")
    allowed = {"file", "name", "settings", "detach", "wait", "dry_run", "form", "context", "namespace", "debug"}
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and parameter.name not in allowed:
            raise UsageError(f"{parameter.opts[0]} does not go with -f; change the manifest with --set PATH=VALUE")


def _create(cluster: Cluster, draft: Draft, *, dry_run: bool) -> Manifest:
    """Create the job; under another name when ours is taken."""
    name = draft.name
    for _ in range(_ATTEMPTS - 1):
        try:
            return cluster.create_job(draft.make(name), dry_run=dry_run)
        except ConflictError:
            if not draft.name_is_ours:
                raise
        taken, name = name, f"{draft.name}-{''.join(secrets.choice(_SUFFIX_CHARS) for _ in range(4))}"
        say(f"there is a job {taken} already: this one is {name}")
    return cluster.create_job(draft.make(name), dry_run=dry_run)


def _follow_up(target: Target, manifest: Manifest, how: How) -> int:
    name = manifest["metadata"]["name"]
    if how.detach:
        print_objects([manifest], how.form or "name", one=True)
        hint(f"watch it: elasticctl status -w {name}   its output: elasticctl logs -f {name}")
        return 0
    if how.wait:
        return await_end(target, name)
    return attach(target, name)
