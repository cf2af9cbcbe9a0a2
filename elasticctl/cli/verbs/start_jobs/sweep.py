"""`sweep`: one job for each point of a grid, some at a time, and the results in one table."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import typer

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import UsageError
from elasticctl.api.observed.cost import cost
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import dollars, quote, span
from elasticctl.cli.framework.command import Verb, new_app, verb
from elasticctl.cli.framework.options import described
from elasticctl.cli.framework.output import Table, print_table
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cli.verbs.start_jobs.job_options import JOB_OPTIONS, SECTIONS
from elasticctl.operations import sweep as sweeps
from elasticctl.operations.submit.job_flags import JobFlags
from elasticctl.operations.sweep import SweepPlan
from elasticctl.operations.target import phase_of
from elasticctl.terminal import say

_GRID_OPTIONS: Mapping[str, Any] = {
    "grid": typer.Option("--grid", metavar="NAME=VALUES", help="A parameter and its values: lr=0.1,0.01 or seed=1..3."),
    "parallel": typer.Option(metavar="N", help="The number of jobs that run at a time.", show_default=True),
    "metric": described("The metric by which to order the results: loss.", "NAME"),
    "mode": typer.Option("--mode", help="Whether the lowest or the highest value of the metric is best."),
    "early_stop": described(
        "From step N on, cancel jobs whose best metric is worse than the others' median at their step.", "N"
    ),
}

app = new_app()


class SweepVerb(Verb):
    """Lists its own options before those of `submit`."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "The sweep": (*_GRID_OPTIONS, "proceed"),
        **SECTIONS,
    }
    unlisted = ("queue",)


@verb(app, "sweep", cls=SweepVerb)
def sweep(
    *,
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT")] = None,
    args: Annotated[tuple[str, ...], typer.Argument(metavar="-- ARGS...")] = (),
    plan: Annotated[SweepPlan, _GRID_OPTIONS],
    proceed: Annotated[
        str,
        typer.Option("--continue", metavar="NAME", show_default=False, help="Continue a sweep, or show its results."),
    ] = "",
    flags: Annotated[JobFlags, JOB_OPTIONS],
    where: Where,
) -> int:
    """Run SCRIPT once for each point of a grid, and print the results in one table.

    Each point is a job with the label `sweep=NAME`. Its values are added to the script's arguments as --lr 0.1, or
    replace {lr} in them. Ctrl-C leaves the jobs as they are: running jobs continue, the others wait for --continue.
    The job options of `submit` apply to each job. The exit code is 1 if a job has failed.

    \b
      elasticctl sweep train.py --grid lr=0.1,0.01 --grid seed=1..3 --parallel 4
      elasticctl sweep train.py --grid lr=0.1,0.01 -- optimizer.lr={lr}
      elasticctl sweep --continue train --parallel 4
    """
    if proceed and (plan.grid or script is not None):
        other = "--grid cannot be used together: a sweep keeps its points" if plan.grid else ""
        raise UsageError(f"--continue and {other or f'{quote(script)} cannot be used together'}. FIX: leave one out")
    target = reach(where)
    name = proceed
    if name:
        sweeps.check_exists(target, name)
    elif not script:
        raise UsageError("nothing to run. FIX: give a script")
    else:
        from elasticctl.operations.submit.training_command import TrainingCommand

        name = sweeps.create(target, TrainingCommand(script, tuple(args)), flags, plan)
    try:
        jobs = sweeps.run(target, name, plan)
    except KeyboardInterrupt:
        say(f"detached: running jobs of {name} continue, the others wait. Next: elasticctl sweep --continue {name}")
        return 130
    points = [sweeps.point_of(job) for job in jobs]
    print_table(sweep_table(jobs, points, time.time(), plan.metric, lowest=plan.mode == "min"))
    return 1 if any(phase_of(job) == "Failed" for job in jobs) else 0


def sweep_table(
    jobs: Sequence[Manifest], points: Sequence[dict[str, str]], now: float, metric: str = "", *, lowest: bool = True
) -> Table:
    """Name, phase, values of the parameters, steps, metrics, time and cost; sorted by `metric` if given."""
    found = [(ElasticJob.from_manifest(job), point) for job, point in zip(jobs, points, strict=True)]
    parameters = list(dict.fromkeys(name for _, point in found for name in point))
    reported = dict.fromkeys(name for job, _ in found for name in job.status.progress.metrics)
    metrics = sorted(reported, key=lambda name: name != metric)
    if metric:
        found.sort(key=lambda pair: _rank(pair[0], metric, lowest=lowest))
    rows = []
    for job, point in found:
        status, spent = job.status, cost(job, now)
        values = [status.progress.metrics.get(name) for name in metrics]
        took_s = None if status.start_time is None else (status.completion_time or now) - status.start_time
        rows.append(
            (
                job.name,
                status.phase.value,
                *(point.get(name, "") for name in parameters),
                "" if status.progress.step is None else str(status.progress.step),
                *("" if value is None else f"{value:.6g}" for value in values),
                "" if took_s is None else span(took_s),
                "" if spent is None else dollars(spent.spent),
            )
        )
    header = ("NAME", "PHASE", *(name.upper() for name in parameters), "STEP", *(name.upper() for name in metrics))
    return Table((*header, "TOOK", "COST"), rows, spare=("COST", "TOOK", "STEP"))


def _rank(job: ElasticJob, metric: str, *, lowest: bool) -> float:
    value = job.status.progress.metrics.get(metric)
    if value is None or metric in job.status.progress.not_finite:
        return math.inf
    return value if lowest else -value
