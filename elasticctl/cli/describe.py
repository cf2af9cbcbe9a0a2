"""`describe`: everything about one job."""

from __future__ import annotations

import shutil
from typing import Annotated, Literal

import typer

from elasticctl.cli import options
from elasticctl.cli.command import new_app, verb
from elasticctl.cli.explain import look_at
from elasticctl.cli.options import Where
from elasticctl.cli.output import emit, hint, on_terminal, print_data
from elasticctl.cli.target import reach

app = new_app()


@verb(app, "describe")
def describe(
    *,
    job: options.Job,
    output: Annotated[
        Literal["text", "json", "yaml"], typer.Option("-o", "--output", help="How to print: a page, or whole objects.")
    ] = "text",
    where: Where,
) -> None:
    """Show everything about a job: what it runs, its policy, workers, groups, interruptions, conditions.

    \b
      elasticctl describe digits
    """
    from elasticctl.diagnosis import diagnose
    from elasticctl.spec import ElasticJob

    target = reach(where)
    manifest = target.find(job)
    name = manifest["metadata"]["name"]
    if output != "text":
        found = ElasticJob.from_manifest(manifest)
        pods, happened = target.cluster.pods_of([found])[found.uid], target.cluster.list_events
        data = {"job": name, "object": manifest, "pods": pods, "events": happened(target.namespace, name)}
        print_data("Description", data, output)
        return
    from elasticctl.cli.portrait import drawn, portrait

    case = look_at(target, manifest)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    emit("\n".join(drawn(portrait(case, diagnose(case)), width)))
    hint(f"\nwhat happened when: elasticctl events {name}")
