"""`list` and `status`: jobs as they are, once or until they end."""

from __future__ import annotations

import time

import click

from elasticctl.cli import options, views, watching
from elasticctl.cli.output import hint, print_objects, print_table, say
from elasticctl.cli.target import Target, Where, reach
from elasticctl.cluster.base import Manifest
from elasticctl.errors import UsageError
from elasticctl.spec import ElasticJob


@click.command("list")
@click.option("-A", "--all-namespaces", is_flag=True, help="The jobs of every namespace.")
@options.OUTPUT
@options.WATCH
@options.target
def list_jobs(where: Where, all_namespaces: bool, form: str, watch: bool) -> None:
    """List jobs, oldest first."""
    _list(reach(where), all_namespaces, form, watch)


@click.command()
@click.argument("job", required=False, shell_complete=options.complete_job)
@options.OUTPUT
@options.WATCH
@options.target
def status(where: Where, job: str | None, form: str, watch: bool) -> None:
    """Show where a job is: workers, progress, checkpoint, interruptions; without JOB, all jobs."""
    target = reach(where)
    if job is None:
        _list(target, False, form, watch)
        return
    if watch and form in ("json", "yaml", "name"):
        raise UsageError(f"--watch shows tables; it does not go with --output {form}")
    name = target.find(job)["metadata"]["name"]
    if watch:
        watching.watch_job(target, name)
        return
    manifest = target.cluster.get_job(target.namespace, name)
    if form in ("json", "yaml", "name"):
        print_objects([manifest], form, one=True)
        return
    pods = target.cluster.list_pods(target.namespace, name)
    print_table(views.status_table(manifest, pods, time.time()))
    hint(_next(manifest))


def _list(target: Target, everywhere: bool, form: str, watch: bool) -> None:
    namespace = None if everywhere else target.namespace
    if watch and form in ("json", "yaml", "name"):
        raise UsageError(f"--watch shows tables; it does not go with --output {form}")
    if watch:
        watching.watch_list(target, namespace, wide=form == "wide")
        return
    jobs = target.cluster.list_jobs(namespace)
    if form in ("json", "yaml", "name"):
        print_objects(jobs, form, one=False)
        return
    if not jobs:
        place = "in any namespace" if everywhere else f"in namespace {target.namespace}"
        say(f"no jobs {place} of context {target.context.name}; start one: elasticctl submit train.py")
        return
    print_table(views.job_table(jobs, time.time(), wide=form == "wide", namespaces=everywhere))
    hint(f"more about one: elasticctl status {jobs[-1]['metadata']['name']}")


def _next(manifest: Manifest) -> str:
    job = ElasticJob.from_manifest(manifest)
    if job.status.phase.terminal:
        return f"what it cost: elasticctl history {job.name}; its output: elasticctl logs {job.name}"
    return f"its output: elasticctl logs -f {job.name}; live: elasticctl status -w {job.name}"
