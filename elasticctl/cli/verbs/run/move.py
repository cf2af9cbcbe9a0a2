"""`move`: continue a job in another context, or with another storage, from the step at which it was stopped."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.errors import ConflictError, UsageError
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.contexts import complete_context
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import hint, say
from elasticctl.cli.framework.target import Target, reach

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.submit.move_job import Move
    from elasticctl.cluster.base import Manifest

app = new_app()


@verb(app, "move")
def move(
    *,
    job: options.Job,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="CONTEXT", autocompletion=complete_context, help="The context to move the job to."
        ),
    ],
    storage: Annotated[
        str, options.text("The new storage of its state; by default a new location in that context's storage.", "URL")
    ] = "",
    where: Where,
) -> None:
    """Continue a job in another context, from exactly the step at which it stops in this one.

    The job's newest checkpoint is copied and verified. Then the job continues in the new context under the same name,
    and never again in the old one. With its current context and --storage, only its state moves. After a failure, run
    the same command again to continue.

    While a move is unfinished, the job trains in at most one place: `resume --here` cancels the move.

    \b
      elasticctl move digits --to gcp
      elasticctl move digits --to local --storage s3://bucket/digits
    """
    from elasticctl.api.spec import ElasticJob

    source = reach(where)
    manifest = source.find(job, whole=True)
    found = ElasticJob.from_manifest(manifest)
    source = dataclasses.replace(source, namespace=found.namespace)
    target = source if to == source.context.name else reach(Where(to, where.namespace))
    if _is_already_moved(found, target):
        return
    if found.moving_from:
        from elasticctl.cli.submit.move_job import describe_open

        raise ConflictError(describe_open(found))
    _plan_move(source, target, manifest, storage).run(manifest)
    hint(f"Next: follow it: elasticctl logs -f {found.name} --context {to}")


def _is_already_moved(job: ElasticJob, target: Target) -> bool:
    """True if this job has already been moved there. Raises ConflictError if it was moved elsewhere."""
    context, _, url = job.moved_to.partition(" ")
    if not context:
        return False
    if context != target.context.name:
        raise ConflictError(
            f"{job.name} has been moved to context {context}. FIX: move it from there, with --context {context}"
        )
    say(f"{job.name} has been moved to context {context} already, with its state in {url}")
    return True


def _plan_move(source: Target, target: Target, manifest: Manifest, storage: str) -> Move:
    """Check everything that can be known beforehand; nothing has been changed if it fails."""
    from elasticctl.api.objects import at
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ANNOTATION_MOVING_TO, ElasticJob
    from elasticctl.cli.submit.derived_manifests import JobLocation
    from elasticctl.cli.submit.draft import choose_storage
    from elasticctl.cli.submit.move_job import Move
    from elasticctl.cli.submit.spec_from_flags import needed_error

    job = ElasticJob.from_manifest(manifest)
    old = JobLocation(source.context, source.namespace, hardware(job).storage)
    if not old.url:
        raise UsageError(f"{job.name} names no storage, so it has no checkpoint to continue from elsewhere")
    context, _, begun = str(at(manifest, "metadata", "annotations", ANNOTATION_MOVING_TO) or "").partition(" ")
    in_place = target is source
    if begun and not storage and context == target.context.name:
        url = begun  # where an earlier attempt has copied to
    elif in_place and not storage:
        raise UsageError(
            f"{job.name} is already in context {context or old.context.name}. FIX: give --storage, or another --to"
        )
    else:
        url = choose_storage(job.name, storage, target.context)
    if not url:
        raise needed_error("--storage", target.context)
    place = JobLocation(target.context, target.namespace, url)
    return Move(source, target, old, place, job.uid, storage, begun, context if begun else "")
