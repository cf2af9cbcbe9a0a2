"""`list` and `status`: jobs as they are, once or until they end."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from elasticctl.api.errors import UsageError
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import hint, print_objects, print_table, say
from elasticctl.cli.framework.target import Target, reach
from elasticctl.cli.views.next_steps import bar_encoding, next_line, next_of_list, none_line, reasons

app = new_app()


@verb(app, "list")
def list_jobs(
    *,
    all_namespaces: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="The jobs of every namespace.")
    ] = False,
    output: options.Output = "table",
    watch: options.Watch = False,
    where: Where,
) -> None:
    """List jobs, oldest first."""
    _list(reach(where), all_namespaces, output, watch)


@verb(app, "status")
def status(
    *, job: options.MaybeJob = None, output: options.Output = "table", watch: options.Watch = False, where: Where
) -> None:
    """Show where a job is: workers, progress, checkpoint, interruptions; without JOB, all jobs."""
    target = reach(where)
    if job is None:
        _list(target, False, output, watch)
        return
    _check_watchable(output, watch)
    manifest = target.find(job)
    name = manifest["metadata"]["name"]
    if watch:
        from elasticctl.cli.views import watch as watching

        watching.watch_job(target, name)
        return
    if output in ("json", "yaml", "name"):
        print_objects([manifest], output, one=True)
        return
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views import job as views

    found = ElasticJob.from_manifest(manifest)
    pods = target.cluster.pods_of([found])[found.uid]
    print_table(views.status_table(manifest, pods, time.time(), bar_encoding=bar_encoding()))
    hint(next_line(manifest))


def _check_watchable(output: str, watch: bool) -> None:
    if watch and output in ("json", "yaml", "name"):
        raise UsageError(f"--watch shows tables; it does not go with --output {output}")


def _list(target: Target, everywhere: bool, output: str, watch: bool) -> None:
    _check_watchable(output, watch)
    namespace = None if everywhere else target.namespace
    if output in ("json", "yaml", "name"):
        print_objects(target.cluster.list_jobs(namespace), output, one=False)
        return
    from elasticctl.cli.views.job_list import Shape, job_table

    shape = Shape(wide=output == "wide", namespaces=everywhere)
    if watch:
        from elasticctl.cli.views import watch as watching

        watching.watch_list(target, namespace, shape)
        return
    jobs = target.cluster.list_jobs(namespace)
    if not jobs:
        say(none_line(target, namespace))
        return
    now = time.time()
    print_table(job_table(jobs, now, shape, reasons(target, jobs, now)))
    hint(next_of_list(jobs))
