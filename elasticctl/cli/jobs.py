"""`list` and `status`: jobs as they are, once or until they end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.cli import options
from elasticctl.cli.command import new_app, verb
from elasticctl.cli.options import Where
from elasticctl.cli.output import hint, print_objects, print_table, say
from elasticctl.cli.target import Target, reach
from elasticctl.errors import UsageError

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest

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
    if watch and output in ("json", "yaml", "name"):
        raise UsageError(f"--watch shows tables; it does not go with --output {output}")
    name = target.find(job)["metadata"]["name"]
    if watch:
        from elasticctl.cli import watching

        watching.watch_job(target, name)
        return
    manifest = target.cluster.get_job(target.namespace, name)
    if output in ("json", "yaml", "name"):
        print_objects([manifest], output, one=True)
        return
    from elasticctl.cli import views

    pods = target.cluster.list_pods(target.namespace, name)
    print_table(views.status_table(manifest, pods, time.time()))
    hint(_next(manifest))


def _list(target: Target, everywhere: bool, output: str, watch: bool) -> None:
    namespace = None if everywhere else target.namespace
    if watch and output in ("json", "yaml", "name"):
        raise UsageError(f"--watch shows tables; it does not go with --output {output}")
    if watch:
        from elasticctl.cli import watching

        watching.watch_list(target, namespace, wide=output == "wide")
        return
    jobs = target.cluster.list_jobs(namespace)
    if output in ("json", "yaml", "name"):
        print_objects(jobs, output, one=False)
        return
    if not jobs:
        place = "in any namespace" if everywhere else f"in namespace {target.namespace}"
        say(f"no jobs {place} of context {target.context.name}; start one: elasticctl submit train.py")
        return
    from elasticctl.cli import views

    print_table(views.job_table(jobs, time.time(), wide=output == "wide", namespaces=everywhere))
    hint(f"more about one: elasticctl status {jobs[-1]['metadata']['name']}")


def _next(manifest: Manifest) -> str:
    from elasticctl.spec import ElasticJob
    from elasticctl.status import Phase

    job = ElasticJob.from_manifest(manifest)
    if job.status.phase in (Phase.PENDING, Phase.RESTARTING, Phase.FAILED):
        return f"what to do about it: elasticctl explain {job.name}; its output: elasticctl logs {job.name}"
    if job.status.phase.terminal:
        return f"what it cost: elasticctl history {job.name}; its output: elasticctl logs {job.name}"
    return f"its output: elasticctl logs -f {job.name}; live: elasticctl status -w {job.name}"
