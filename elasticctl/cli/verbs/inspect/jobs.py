"""`list` and `status`: jobs as they are, once or until they end."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.errors import UsageError
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import hint, on_terminal, print_objects, print_table, say
from elasticctl.cli.framework.target import Target, reach

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest

_WAITING = (None, "Pending", "Restarting")
_LOOKED_AT = 5
"""Of how many waiting jobs the pods are asked for."""

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


def bar_encoding() -> str | None:
    """The encoding in which stdout takes a bar; None where no person looks."""
    return sys.stdout.encoding if on_terminal() else None


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


def reasons(target: Target, jobs: list[Manifest], now: float) -> dict[str, str]:
    """UID -> why a job waits, of the first few that do: for that their pods are looked at."""
    waiting = [job for job in jobs if job.get("status", {}).get("phase") in _WAITING][:_LOOKED_AT]
    if not waiting:
        return {}
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views.job import reason

    found = [ElasticJob.from_manifest(manifest) for manifest in waiting]
    pods = target.cluster.pods_of(found)
    return {job.uid: reason(job, pods[job.uid], now) for job in found}


def none_line(target: Target, namespace: str | None) -> str:
    """What to say where there are no jobs."""
    place = "in any namespace" if namespace is None else f"in namespace {namespace}"
    return f"no jobs {place} of context {target.context.name}; start one: elasticctl submit train.py"


def next_of_list(jobs: list[Manifest]) -> str:
    """What to type next: about a job that waits, if there is one, else about the newest."""
    waiting = [job for job in jobs if job.get("status", {}).get("phase") in _WAITING]
    if waiting:
        return f"why one waits: elasticctl explain {waiting[-1]['metadata']['name']}"
    return f"more about one: elasticctl status {jobs[-1]['metadata']['name']}"


def next_line(manifest: Manifest, *, live: bool = False) -> str:
    """What to type next about a job; `live`: it is being watched already."""
    from elasticctl.api.spec import ElasticJob
    from elasticctl.api.status import Phase

    job = ElasticJob.from_manifest(manifest)
    if job.status.phase in (Phase.PENDING, Phase.RESTARTING, Phase.FAILED):
        return f"what to do about it: elasticctl explain {job.name}; its output: elasticctl logs {job.name}"
    if job.status.phase.terminal:
        return f"what it cost: elasticctl history {job.name}; its output: elasticctl logs {job.name}"
    more = "" if live else f"; live: elasticctl status -w {job.name}"
    return f"its output: elasticctl logs -f {job.name}{more}"
