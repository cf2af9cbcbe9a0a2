"""`list` and `status`: the state of jobs, once or until they end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from elasticctl.api.errors import UsageError
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import described
from elasticctl.cli.framework.output import hint, print_objects, print_table
from elasticctl.cli.framework.place import Where, reach
from elasticctl.operations.selection import JobFilter
from elasticctl.operations.target import Target
from elasticctl.terminal import say

_CHOSEN: Mapping[str, Any] = {
    "phase": options.phase_option("Only jobs in this phase, or active, or ended."),
    "label": typer.Option("-l", "--label", metavar="KEY=VALUE", help="Only jobs with this label."),
    "user": described("Only jobs that this user submitted; `me` is you.", "NAME"),
    "since": described("Only jobs created in the last 90m, 12h, 7d.", "TIME"),
    "limit": described("At most this many jobs: the newest, or the first in the given order.", "N"),
    "sort": typer.Option("--sort", help="The order; age is the oldest first."),
}

app = new_app()


@verb(app, "list")
def list_jobs(
    *,
    all_namespaces: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="Show the jobs of all namespaces.")
    ] = False,
    output: options.Output = "table",
    watch: options.Watch = False,
    chosen: Annotated[JobFilter, _CHOSEN],
    where: Where,
) -> None:
    """List jobs, oldest first.

    WORKERS shows how many run, of how many wanted, and the bounds: 3/4 (1-8). CHECKPOINT is the last committed step,
    RESTARTS the number of workers that ended unplanned. REASON says why a job waits or has failed.

    \b
      elasticctl list -A -w
      elasticctl list --phase failed --since 7d -o name
      elasticctl list --label team=vision --user me --sort cost --limit 10
    """
    _list(reach(where), all_namespaces, output, watch, chosen)


@verb(app, "status")
def status(
    *, job: options.MaybeJob = None, output: options.Output = "table", watch: options.Watch = False, where: Where
) -> int:
    """Show the state of a job: workers, progress, checkpoint, interruptions; without JOB, all jobs.

    With -w, the exit code is 1 if the job fails.

    \b
      elasticctl status digits
      elasticctl status digits -w
    """
    target = reach(where)
    if job is None:
        _list(target, False, output, watch, JobFilter())
        return 0
    _check_watchable(output, watch)
    manifest = target.find(job)
    if watch:
        from elasticctl.cli.views.follow import code_of_followed
        from elasticctl.cli.views.watch import watch_job

        watch_job(target, manifest)
        return code_of_followed(target, manifest)
    if output in ("json", "yaml", "name"):
        print_objects([manifest], output, one=True)
        return 0
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views.job import bar_encoding, next_line, status_table
    from elasticctl.operations.explain import observe_pods

    found = ElasticJob.from_manifest(manifest)
    pods = target.cluster.pods_of([found])[found.uid]
    seen = observe_pods(target, found, pods)
    print_table(status_table(manifest, pods, time.time(), bar_encoding=bar_encoding(), seen=seen))
    hint(next_line(manifest))
    return 0


def _check_watchable(output: str, watch: bool) -> None:
    if watch and output in ("json", "yaml", "name"):
        raise UsageError(f"--watch shows tables and cannot be used with --output {output}")


def _list(target: Target, everywhere: bool, output: str, watch: bool, chosen: JobFilter) -> None:
    _check_watchable(output, watch)
    namespace = None if everywhere else target.namespace
    if output in ("json", "yaml", "name"):
        print_objects(chosen.of(target.cluster.list_jobs(namespace), time.time()), output, one=False)
        return
    from elasticctl.cli.views.jobs import ListColumns, job_table, next_of_list, no_jobs_line, waiting_reasons

    shape = ListColumns(wide=output == "wide", namespaces=everywhere)
    if watch:
        from elasticctl.cli.views.watch import watch_list

        watch_list(target, namespace, shape, chosen)
        return
    now = time.time()
    jobs = chosen.of(target.cluster.list_jobs(namespace), now)
    if not jobs:
        say(no_jobs_line(target, namespace, chosen))
        return
    print_table(job_table(jobs, now, shape, waiting_reasons(target, jobs, now)))
    hint(next_of_list(jobs))
