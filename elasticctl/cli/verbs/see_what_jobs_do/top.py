"""`top`: what jobs use of their machines, as their launchers measure it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from elasticctl.api.codec import to_json
from elasticctl.api.observed.usage import (
    PARTS,
    USES,
    idle_text,
    mean_times,
    part_texts,
    single_gpus,
    step_times_text,
    total_usage,
    unshown_text,
    usage_note,
    uses,
)
from elasticctl.api.spec import ElasticJob
from elasticctl.api.usage import JobUsage, WorkerUsage
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.output import Table, hint, print_data, print_table
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cli.views.watch import Screenful, can_redraw, redrawing
from elasticctl.operations.target import Poller, Target
from elasticctl.terminal import say

EVERY_S = 2.0
"""Launchers measure every 10 s."""

app = new_app()

Form = Literal["table", "wide", "json", "yaml"]


@verb(app, "top")
def top(
    *,
    job: options.MaybeJob = None,
    output: Annotated[
        Form,
        typer.Option("-o", "--output", help="Output format: a table, a wide table with a row for each GPU, or data."),
    ] = "table",
    once: Annotated[bool, typer.Option("--once", help="Print it once, even on a terminal.")] = False,
    where: Where,
) -> None:
    """Show how a job's workers use CPUs, memory, GPUs and network; without JOB, those of all jobs.

    On a terminal, it keeps updating until Ctrl-C, or until the job has ended.

    DATA, COMPUTE, ALL-REDUCE and SAVE show where the training time went, of scripts that use the training library. NOTE
    names GPUs that have been idle for ten minutes. Values are measured every 10 s.

    \b
      elasticctl top
      elasticctl top digits -o wide
    """
    target = reach(where)
    name = None if job is None else str(target.find(job)["metadata"]["name"])
    if output in ("json", "yaml"):
        print_data("Usage", usage_data(_read_jobs(target, name)), output)
        return
    wide = output == "wide"
    if once or not can_redraw():
        jobs = _read_jobs(target, name)
        table = _table(jobs, name, wide)
        if table.rows:
            print_table(table)
        (hint if table.rows else say)(_next_line(jobs, name))
        return
    answers = Poller(lambda: _read_jobs(target, name), EVERY_S)
    with redrawing() as draw:
        for jobs in answers.each():
            table = _table(jobs, name, wide)
            draw(Screenful(table if table.rows else None, _next_line(jobs, name), answers.trouble))
            if name is not None and jobs[0].status.phase.terminal:
                return


def _read_jobs(target: Target, name: str | None) -> list[ElasticJob]:
    """The job, or all jobs of the namespace that have workers."""
    if name is not None:
        return [ElasticJob.from_manifest(target.cluster.get_job(target.namespace, name))]
    jobs = map(ElasticJob.from_manifest, target.cluster.list_jobs(target.namespace))
    return [job for job in jobs if job.status.active and not job.status.phase.terminal]


def _table(jobs: list[ElasticJob], name: str | None, wide: bool) -> Table:
    return usage_of_jobs(jobs) if name is None else worker_table(jobs[0], time.time(), each_gpu=wide)


def _next_line(jobs: list[ElasticJob], name: str | None) -> str:
    """Why there is nothing to show, or what to type next."""
    if not jobs:
        return "no job is running. Next: elasticctl list"
    first = jobs[0]
    if name is None:
        return f"Next: worker by worker: elasticctl top {first.name}"
    if first.status.phase.terminal:
        return f"{name} has ended: nothing is in use. Next: elasticctl status {name}"
    if first.status.usage is None:
        return f"no measurements yet: workers begin to measure once they run. Next: elasticctl status {name}"
    return f"Next: what its ranks do: elasticctl stacks {name}"


_USE = tuple(name.upper() for name in (*USES, *PARTS))
_SPARE = (*(name.upper() for name in ("Network", "Temp", "Power", *reversed(PARTS))), "GPU MEMORY", "GPU", "NOTE")
_NO_TIMES = ("",) * len(PARTS)


def worker_table(job: ElasticJob, now: float, *, each_gpu: bool = False) -> Table:
    """A row for each worker that has been measured; `each_gpu`: one for each of its GPUs."""
    usage = job.status.usage or JobUsage()
    rows = []
    for worker in usage.workers:
        name, gpus = worker.worker.removeprefix(f"{job.name}-"), worker.gpus
        rows.append((name, *uses(worker), *part_texts(worker.step_times), usage_note(job, worker, now)))
        if each_gpu:
            single = (uses(WorkerUsage(gpus=gpu)) for gpu in single_gpus(gpus))
            rows += [(f"  gpu {n}", *words, *_NO_TIMES, "") for n, words in enumerate(single)]
    notes = (unshown_text(usage), _unknown(job))
    return Table(("WORKER", *_USE, "NOTE"), rows, spare=_SPARE, notes=tuple(note for note in notes if note))


def _unknown(job: ElasticJob) -> str:
    """Why the times of the steps' parts are unknown; empty if they are known."""
    usage = job.status.usage
    if usage is None or mean_times(usage.workers).is_known:
        return ""
    return f"Where the time of the steps goes is {step_times_text(job.status)}."


def usage_of_jobs(jobs: Sequence[ElasticJob]) -> Table:
    """A row for each job with the total usage of its workers."""
    rows = []
    for job in jobs:
        usage = job.status.usage or JobUsage()
        note = idle_text(usage, job.name) if usage.measured else "nothing measured yet"
        parts = part_texts(mean_times(usage.workers))
        rows.append((job.name, str(usage.measured), *uses(total_usage(usage)), *parts, note))
    return Table(("NAME", "WORKERS", *_USE, "NOTE"), rows, spare=_SPARE)


def usage_data(jobs: Sequence[ElasticJob]) -> dict[str, Any]:
    """The same as data."""
    empty = {"measured": 0, "workers": []}
    return {
        "jobs": [
            {"name": job.name, "namespace": job.namespace, **empty, **to_json(job.status.usage or JobUsage())}
            for job in jobs
        ]
    }
