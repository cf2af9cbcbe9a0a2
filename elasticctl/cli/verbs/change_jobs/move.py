"""`move`: continue a job in another context, or with another storage, from the step at which it was stopped."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.completion import complete_context
from elasticctl.cli.framework.output import hint
from elasticctl.cli.framework.place import Where, reach

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
    from elasticctl.operations import move as moves

    source = reach(where)
    manifest = source.find(job, whole=True)
    metadata = manifest["metadata"]
    source = dataclasses.replace(source, namespace=metadata["namespace"])
    target = source if to == source.context.name else reach(Where(to, where.namespace))
    if moves.move(source, target, manifest, storage):
        hint(f"Next: follow it: elasticctl logs -f {metadata['name']} --context {to}")
