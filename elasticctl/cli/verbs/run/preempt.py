"""`preempt`: rehearse what a cloud does when it wants a machine back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.text import span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import hint, say
from elasticctl.cli.framework.target import full_worker_name, reach, worker_of_rank

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.base import Manifest

app = new_app()

NOTICE_S = 120
"""What AWS gives."""


def notice(text: str) -> int:
    """A duration -> whole seconds; `none` is no notice at all."""
    return 0 if text == "none" else options.duration(text)


@verb(app, "preempt")
def preempt(
    *,
    job: options.Job,
    worker: Annotated[str, options.text("This worker: its name or number.")] = "",
    rank: Annotated[int | None, options.count("The worker that runs rank N.", low=0)] = None,
    notice_s: Annotated[
        int,
        typer.Option(
            "--notice",
            parser=notice,
            metavar="TIME",
            show_default=False,
            help="How long before it is killed the worker is told: 30s, 2m (the default), or none.",
        ),
    ] = NOTICE_S,
    where: Where,
) -> None:
    """Take a worker away from a job, as a cloud takes back a spot machine; the job makes another.

    \b
      elasticctl preempt digits
      elasticctl preempt digits --rank 0 --notice none
    """
    from elasticctl.api.spec import ElasticJob

    if worker and rank is not None:
        raise UsageError("say --worker NAME or --rank N, not both")
    target = reach(where)
    found = ElasticJob.from_manifest(target.find(job))
    pods = target.cluster.pods_of([found])[found.uid]
    name = choose_worker(found, pods, worker, rank)
    target.cluster.evict_pod(target.namespace, name, grace_s=float(notice_s))
    say(f"{name}: " + (f"told to go, and killed after {span(notice_s)}" if notice_s else "killed without notice"))
    hint(f"what it cost: elasticctl history {found.name}")


def choose_worker(job: ElasticJob, pods: list[Manifest], worker: str, rank: int | None) -> str:
    """The worker that was named, or runs `rank`, or else the last of those that run. Pure.

    Raises ConflictError where nobody runs, NotFoundError for a worker or a rank that is not there.
    """
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}): it has no workers to lose")
    running: list[str] = [pod["metadata"]["name"] for pod in pods if _runs(pod)]
    if not running:
        raise ConflictError(f"no worker of {job.name} runs now; `elasticctl status {job.name}` shows why")
    name = running[-1]
    if worker:
        name = full_worker_name(job.name, worker)
    elif rank is not None:
        name = worker_of_rank(job, rank)
    if name not in running:
        raise NotFoundError(f"{name} does not run now; these workers of {job.name} do: {', '.join(running)}")
    return name


def _runs(pod: Manifest) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
