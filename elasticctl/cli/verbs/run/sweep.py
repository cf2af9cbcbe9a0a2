"""`sweep`: one job for each point of a grid, so many at once, and the results in one table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import typer

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.text import plural, quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import Verb, new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import print_table, say
from elasticctl.cli.framework.selection import fits, selector
from elasticctl.cli.framework.target import PATIENCE_S, Poller, Target, phase_of, reach
from elasticctl.cli.submit import sweeps
from elasticctl.cli.submit.flags.job_flags import SECTIONS, JobFlags
from elasticctl.cli.submit.sweeps import Axis
from elasticctl.cluster.base import Manifest

LOOK_EVERY_S = 1.0

app = new_app()


@dataclass(frozen=True, slots=True)
class SweepFlags:
    """The grid, the number of parallel jobs, and the metric to compare."""

    grid: Annotated[
        tuple[Axis, ...],
        typer.Option(
            "--grid",
            parser=sweeps.axis,
            metavar="NAME=VALUES",
            help="A parameter and its values: lr=0.1,0.01 or seed=1..3.",
        ),
    ] = ()
    parallel: Annotated[int, options.count("The number of jobs that run at once.", default=True)] = 1
    metric: Annotated[str, options.text("The metric by which to order the results: loss.")] = ""
    mode: Annotated[
        Literal["min", "max"],
        typer.Option("--mode", help="Whether the lowest or the highest value of the metric is best."),
    ] = "min"
    early_stop: Annotated[
        int | None,
        options.count("From step N on, cancel jobs whose best metric is worse than the others' median at their step."),
    ] = None
    proceed: Annotated[
        str,
        typer.Option("--continue", metavar="NAME", show_default=False, help="Continue a sweep, or show its results."),
    ] = ""

    def check(self) -> None:
        """Raise UsageError for contradicting options."""
        if self.early_stop is not None and not self.metric:
            raise UsageError("--early-stop needs a metric to compare jobs by. FIX: add --metric loss, for example")
        if self.proceed and self.grid:
            raise UsageError(
                "--continue and --grid cannot be used together: a sweep keeps its points. FIX: leave one out"
            )


class SweepVerb(Verb):
    """Lists its own options before those of `submit`."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "The sweep": tuple(field.name for field in dataclasses.fields(SweepFlags)),
        **SECTIONS,
    }
    unlisted = ("queue",)


@verb(app, "sweep", cls=SweepVerb)
def sweep(
    *,
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT")] = None,
    args: Annotated[tuple[str, ...], typer.Argument(metavar="-- ARGS...")] = (),
    flags: SweepFlags,
    request: JobFlags,
    where: Where,
) -> int:
    """Run SCRIPT once for each point of a grid, and print the results in one table.

    Each point is a job with the label `sweep=NAME`. Its values are added to the script's arguments as --lr 0.1, or
    replace {lr} in them. Ctrl-C leaves the jobs as they are: those that run continue, the others wait for --continue.
    The job options of `submit` apply to each job. The exit code is 1 if a job has failed.

    \b
      elasticctl sweep train.py --grid lr=0.1,0.01 --grid seed=1..3 --parallel 4
      elasticctl sweep train.py --grid lr=0.1,0.01 -- optimizer.lr={lr}
      elasticctl sweep --continue train --parallel 4
    """
    flags.check()
    target = reach(where)
    name = flags.proceed
    if name:
        if script is not None:
            raise UsageError(f"--continue and {quote(script)} cannot be used together. FIX: leave one out")
        if not jobs_of(target, name):
            raise NotFoundError(f"no jobs of a sweep {quote(name)}. FIX: see `elasticctl list --label sweep`")
    elif not script:
        raise UsageError("nothing to run. FIX: give a script")
    else:
        name = create(target, script, args, flags, request)
    try:
        jobs = drive(target, name, flags)
    except KeyboardInterrupt:
        say(f"detached: running jobs of {name} continue, the others wait. Next: elasticctl sweep --continue {name}")
        return 130
    from elasticctl.cli.views.sweep import sweep_table

    points = [sweeps.point_of(job) for job in jobs]
    print_table(sweep_table(jobs, points, time.time(), flags.metric, lowest=flags.mode == "min"))
    return 1 if any(phase_of(job) == "Failed" for job in jobs) else 0


def create(target: Target, script: str, args: Sequence[str], flags: SweepFlags, request: JobFlags) -> str:
    """Create the jobs of a sweep, most of them suspended; returns its name. Raises UsageError, ConflictError."""
    from elasticctl.cli.submit.draft import choose_storage, from_command
    from elasticctl.cli.submit.spec_from_flags import check_name, child_url, name_from
    from elasticctl.cli.submit.training_command import Command

    found = sweeps.points(flags.grid)
    if request.queue:
        raise UsageError("--queue cannot be used with a sweep, whose jobs wait for each other. FIX: leave it out")
    name = request.name or name_from(script)
    check_name(f"{name}-{sweeps.MAX_JOBS}")
    _refuse_taken(target, name, len(found))
    draft = from_command(
        Command(script, tuple(args)), dataclasses.replace(request, name=name), target.context, (), template="default"
    )
    base = draft.make(name)
    say(f"{name}: {plural(len(found), 'job')}, {flags.parallel} at once")
    draft.deliver(base, True)
    for number, point in enumerate(found, 1):
        given = child_url(request.storage, f"{name}-{number}") if request.storage else ""
        storage = choose_storage(f"{name}-{number}", given, target.context)
        late = number > flags.parallel
        target.cluster.create_job(sweeps.job_of_point(base, name, number, point, storage, waits=late))
    return name


def _refuse_taken(target: Target, name: str, number: int) -> None:
    names = {job["metadata"]["name"] for job in target.cluster.list_jobs(target.namespace)}
    taken = next((made for at in range(number) if (made := f"{name}-{at + 1}") in names), None)
    if taken is not None:
        raise ConflictError(
            f"job {target.namespace}/{taken} already exists. FIX: choose another --name, go on with that sweep"
            f" (elasticctl sweep --continue {name}), or delete it (elasticctl delete --label sweep={name})"
        )


def jobs_of(target: Target, name: str) -> list[Manifest]:
    """The jobs of a sweep, in the order of its points."""
    chosen = (selector(f"{sweeps.SWEEP_LABEL}={name}"),)
    jobs = [job for job in target.cluster.list_jobs(target.namespace) if fits(job, chosen)]
    return sorted(jobs, key=lambda job: (len(job["metadata"]["name"]), job["metadata"]["name"]))


def drive(target: Target, name: str, flags: SweepFlags) -> list[Manifest]:
    """Start jobs as others end, and stop unpromising ones; returns all once they have ended.

    A job that is deleted meanwhile no longer counts.
    """
    told: set[str] = set()
    for jobs in Poller(lambda: jobs_of(target, name), LOOK_EVERY_S, patience_s=PATIENCE_S, say=say).each():
        for job in jobs:
            if sweeps.has_ended(job) and job["metadata"]["name"] not in told:
                told.add(job["metadata"]["name"])
                say(_ended_line(job, flags.metric))
        if all(map(sweeps.has_ended, jobs)):
            return jobs
        if flags.early_stop is not None:
            lowest = flags.mode == "min"
            for worse in sweeps.to_stop(jobs, flags.metric, lowest=lowest, after_step=flags.early_stop):
                _patch(target, worse, {"spec": {"cancel": True}})
                say(f"{worse}: stopped early, its {flags.metric} is worse than the others' at its step")
        for due in sweeps.next_to_start(jobs, flags.parallel):
            started = {"metadata": {"annotations": {sweeps.ANNOTATION_WAITS: None}}, "spec": {"suspend": False}}
            _patch(target, due, started)
            say(f"{due}: started")
    raise AssertionError("unreachable")


def _patch(target: Target, name: str, patch: dict[str, object]) -> None:
    try:
        target.cluster.patch_job(target.namespace, name, patch)
    except (NotFoundError, ConflictError) as e:
        say(f"{name}: {e}")  # it is looked at again in a moment


def _ended_line(job: Manifest, metric: str) -> str:
    value = sweeps.metric_of(job, metric) if metric else None
    point = " ".join(f"{name}={text}" for name, text in sweeps.point_of(job).items())
    told = "" if value is None else f": {metric} {value:g}"
    return f"{job['metadata']['name']} ({point}): {phase_of(job).lower()}{told}"
