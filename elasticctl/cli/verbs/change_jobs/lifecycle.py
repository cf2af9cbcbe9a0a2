"""`suspend`, `resume`, `move`, `cancel`, `delete` and `preempt`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import plural, span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.completion import complete_context
from elasticctl.cli.framework.options import Labels
from elasticctl.cli.framework.output import hint
from elasticctl.cli.framework.place import Where, reach
from elasticctl.operations import lifecycle, workers
from elasticctl.operations.option_values import duration
from elasticctl.operations.selection import SUSPENDED, UNENDED, chosen_names
from elasticctl.operations.workers import WhichWorker
from elasticctl.terminal import say

app = new_app()


@verb(app, "suspend")
def suspend(*, jobs: options.Jobs = (), label: Labels = (), where: Where) -> None:
    """Stop a job's workers; `resume` continues from the last checkpoint."""
    target = reach(where)

    def stop(name: str) -> None:
        job = lifecycle.suspend(target, target.find(name))
        say(f"{job.name}: stopping its workers")
        hint(f"Next: resume it: elasticctl resume {job.name}")

    _for_each(chosen_names(target, jobs, label, UNENDED), stop)


@verb(app, "resume")
def resume(
    *,
    jobs: options.Jobs = (),
    label: Labels = (),
    here: Annotated[bool, typer.Option("--here", help="Cancel an unfinished move: the job continues here.")] = False,
    where: Where,
) -> None:
    """Resume a suspended job from its last checkpoint."""
    target = reach(where)

    def resume_one(name: str) -> None:
        found = target.find(name)
        job = lifecycle.resume(target, found, here=here)
        if job is None:
            say(f"{found['metadata']['name']}: not suspended, nothing to resume")
            return
        say(f"{job.name}: resuming with {plural(job.desired, 'worker')}")

    _for_each(chosen_names(target, jobs, label, SUSPENDED), resume_one)


@verb(app, "move")
def move(
    *,
    job: options.Job,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="CONTEXT", autocompletion=complete_context, help="The context to move the job to."
        ),
    ],
    storage: Annotated[
        str,
        options.described("The new storage of its state; by default a new location in that context's storage.", "URL"),
    ] = "",
    where: Where,
) -> None:
    """Continue a job in another context, from exactly the step at which it stops in this one.

    The job's newest checkpoint is copied and verified. Then the job continues in the new context under the same name,
    and never again in the old one. With its current context and --storage, only its state moves. After a failure, run
    the same command again to continue.

    While a move is unfinished, the job trains in at most one place: `resume --here` cancels the move.

    \b
      elasticctl move digits --to gcp
      elasticctl move digits --to local --storage s3://bucket/digits
    """
    from elasticctl.operations import move as moves

    source = reach(where)
    manifest = source.find(job, whole=True)
    metadata = manifest["metadata"]
    source = dataclasses.replace(source, namespace=metadata["namespace"])
    target = source if to == source.context.name else reach(Where(to, where.namespace))
    if moves.move(source, target, manifest, storage):
        hint(f"Next: follow it: elasticctl logs -f {metadata['name']} --context {to}")


@verb(app, "cancel")
def cancel(
    *,
    jobs: options.Jobs = (),
    label: Labels = (),
    yes: Annotated[bool, typer.Option("-y", "--yes", hidden=True)] = False,  # it never asks, but `delete` does
    where: Where,
) -> None:
    """Stop a job permanently; its status, logs and checkpoints stay."""
    target = reach(where)

    def end(name: str) -> None:
        job = lifecycle.cancel(target, target.find(name, whole=True))
        say(f"{job.name}: cancelled")
        hint(f"Next: delete it: elasticctl delete {job.name}")

    _for_each(chosen_names(target, jobs, label, UNENDED), end)


@verb(app, "delete")
def delete(*, jobs: options.Jobs = (), label: Labels = (), yes: options.Yes = False, where: Where) -> None:
    """Delete a job, its workers and its logs; its checkpoints stay."""
    target = reach(where)

    def remove(name: str) -> None:
        found = target.find(name, whole=True)
        job = ElasticJob.from_manifest(found)
        if not (yes or job.status.phase.terminal or _confirm_delete(job)):
            say(f"{job.name}: not deleted")
            return
        lifecycle.delete(target, found)
        storage = hardware(job).storage
        say(f"{job.name}: deleted" + (f"; its checkpoints stay in {storage}" if storage else ""))

    _for_each(chosen_names(target, jobs, label), remove)


def _for_each(names: Sequence[str], act: Callable[[str], None]) -> None:
    """Apply a change to each job; an error with one is reported, and does not affect the others.

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


def _confirm_delete(job: ElasticJob) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(f"{job.name} is still {job.status.phase.value}. FIX: add --yes to delete it anyway")
    return typer.confirm(f"{job.name} is still {job.status.phase.value}. Delete it?", err=True)


NOTICE_S = 120
"""What AWS gives."""


def parse_notice(text: str) -> int:
    """A duration -> whole seconds; `none` is no notice at all."""
    return 0 if text == "none" else duration(text)


_WHICH: Mapping[str, Any] = {
    "worker": options.worker("The worker, by name or number."),
    "rank": options.described("The worker that runs rank N.", "N"),
}


@verb(app, "preempt")
def preempt(
    *,
    job: options.Job,
    which: Annotated[WhichWorker, _WHICH],
    notice_s: Annotated[
        int,
        typer.Option(
            "--notice",
            parser=parse_notice,
            metavar="TIME",
            show_default=False,
            help="How long in advance the worker gets notice: 30s, 2m (the default), or none.",
        ),
    ] = NOTICE_S,
    where: Where,
) -> None:
    """Remove a worker from a job, in the way that a cloud reclaims a spot machine; the job replaces it.

    By default, it is the last running worker. With notice, the group commits a last step together, and no step is
    repeated. Without notice, the worker is killed immediately. Neither counts towards --backoff-limit.

    \b
      elasticctl preempt digits
      elasticctl preempt digits --rank 0 --notice none
    """
    target = reach(where)
    found = target.find(job)
    name = workers.preempt(target, found, which, float(notice_s))
    say(f"{name}: " + (f"notified; to be killed after {span(notice_s)}" if notice_s else "killed without notice"))
    hint(f"Next: see what it cost: elasticctl history {found['metadata']['name']}")
