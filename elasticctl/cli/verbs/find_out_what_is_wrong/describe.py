"""`describe`: everything about one job."""

from __future__ import annotations

import shutil
from typing import Annotated, Literal

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.output import emit, hint, on_terminal, print_data
from elasticctl.cli.framework.place import Where, reach

app = new_app()


@verb(app, "describe")
def describe(
    *,
    job: options.Job,
    output: Annotated[
        Literal["text", "json", "yaml"], typer.Option("-o", "--output", help="Output format: a page, or whole objects.")
    ] = "text",
    where: Where,
) -> None:
    """Show everything about a job: what it runs, its policy, workers, groups, interruptions and conditions.

    \b
      elasticctl describe digits
    """
    from elasticctl.api.spec import ElasticJob
    from elasticctl.diagnosis import diagnose

    target = reach(where)
    manifest = target.find(job)
    name = manifest["metadata"]["name"]
    if output != "text":
        found = ElasticJob.from_manifest(manifest)
        pods, happened = target.cluster.pods_of([found])[found.uid], target.cluster.list_events
        data = {"job": name, "object": manifest, "pods": pods, "events": happened(target.namespace, name)}
        print_data("Description", data, output)
        return
    from elasticctl.cli.views.description import describe_job, format_sections
    from elasticctl.operations.explain import read_case

    case = read_case(target, manifest)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    emit("\n".join(format_sections(describe_job(case, diagnose(case)), width)))
    hint(f"\nNext: see what happened when: elasticctl events {name}")
