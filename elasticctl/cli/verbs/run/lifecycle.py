"""`suspend`, `resume`, `cancel`, `delete`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.text import counted
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import hint, say
from elasticctl.cli.framework.target import Target, reach
from elasticctl.cli.verbs.inspect.logs import forget

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob

app = new_app()


@verb(app, "suspend")
def suspend(*, jobs: options.Jobs, where: Where) -> None:
    """Stop a job's workers; `resume` goes on from the last checkpoint."""
    target = reach(where)

    def stop(name: str) -> None:
        job = _patched(target, name, {"suspend": True}, "suspended")
        say(f"{job.name}: its workers are being stopped")
        hint(f"go on: elasticctl resume {job.name}")

    _each(jobs, stop)


@verb(app, "resume")
def resume(*, jobs: options.Jobs, where: Where) -> None:
    """Start the workers of a suspended job again."""
    target = reach(where)

    def go_on(name: str) -> None:
        _check_here(target, name)
        job = _patched(target, name, {"suspend": False}, "resumed")
        say(f"{job.name}: going on with {counted(job.desired, 'worker')}")

    _each(jobs, go_on)


@verb(app, "cancel")
def cancel(*, jobs: options.Jobs, where: Where) -> None:
    """Stop a job for good; its status, logs and checkpoints stay."""
    target = reach(where)

    def end(name: str) -> None:
        job = _patched(target, name, {"cancel": True}, "cancelled")
        say(f"{job.name}: cancelled")
        hint(f"remove it: elasticctl delete {job.name}")

    _each(jobs, end)


@verb(app, "delete")
def delete(*, jobs: options.Jobs, yes: options.Yes = False, where: Where) -> None:
    """Delete a job, its workers and its logs; its checkpoints stay."""
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ElasticJob

    target = reach(where)

    def remove(name: str) -> None:
        job = ElasticJob.from_manifest(target.find(name))
        if not (yes or job.status.phase.terminal or _confirmed(job)):
            say(f"{job.name}: kept")
            return
        target.cluster.delete_job(target.namespace, job.name)
        forget(job)
        storage = hardware(job).storage
        say(f"{job.name}: deleted" + (f"; its checkpoints stay in {storage}" if storage else ""))

    _each(jobs, remove)


def _each(names: Sequence[str], act: Callable[[str], None]) -> None:
    """Do it to each job: what stands in the way of one is said, and does not keep it from the others.

    Raises the last of these errors at the end.
    """
    failed: NotFoundError | ConflictError | UsageError | None = None
    for name in dict.fromkeys(names):
        try:
            act(name)
        except (NotFoundError, ConflictError, UsageError) as e:
            if failed is not None:
                say(f"error: {failed}")
            failed = e
    if failed is not None:
        raise failed


def _check_here(target: Target, name: str) -> None:
    """Raise ConflictError for a job that goes on elsewhere: here it could neither restore nor commit any more."""
    from elasticctl.api.spec import ElasticJob

    found = ElasticJob.from_manifest(target.find(name))
    context = found.moved_to.partition(" ")[0]
    if context:
        there = f"`elasticctl resume {found.name} --context {context}`"
        raise ConflictError(f"{found.name} goes on in context {context}, where it was moved to: {there}")


def _patched(target: Target, name: str, spec: dict[str, Any], done: str) -> ElasticJob:
    """The job with its spec changed; ConflictError once it has ended."""
    from elasticctl.api.spec import ElasticJob

    job = ElasticJob.from_manifest(target.find(name))
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}) and cannot be {done}")
    return ElasticJob.from_manifest(target.cluster.patch_job(target.namespace, job.name, {"spec": spec}))


def _confirmed(job: ElasticJob) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(f"{job.name} is still {job.status.phase.value}; add --yes to delete it all the same")
    return typer.confirm(f"{job.name} is still {job.status.phase.value}. Delete it?", err=True)
