"""`suspend`, `resume`, `cancel`, `delete`, `wait` and `preempt`: the life of a job that is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.observed.ranks import worker_of_rank
from elasticctl.api.observed.workers import runs
from elasticctl.api.text import plural, span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import hint, say
from elasticctl.cli.framework.selection import SUSPENDED, UNENDED, Labels, chosen_names
from elasticctl.cli.framework.target import Target, full_worker_name, reach
from elasticctl.cli.verbs.inspect.logs import delete_stored_logs

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.base import Manifest


_RUNS = ("Pending", "Running", "Restarting")

app = new_app()


@verb(app, "suspend")
def suspend(*, jobs: options.Jobs = (), label: Labels = (), where: Where) -> None:
    """Stop a job's workers; `resume` continues from the last checkpoint."""
    target = reach(where)

    def stop(name: str) -> None:
        job = _patch_spec(target, name, {"suspend": True}, "suspended")
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

    def go_on(name: str) -> None:
        if not here:
            found = _check_here(target, name)
            if found.status.phase in _RUNS and not (found.suspend or found.cancel):
                say(f"{found.name}: not suspended, nothing to resume")
                return
        ended = _end_move(target, name) if here else None
        job = _patch_spec(target, name, {"suspend": False}, "resumed", ended)
        say(f"{job.name}: resuming with {plural(job.desired, 'worker')}")

    _for_each(chosen_names(target, jobs, label, SUSPENDED), go_on)


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
        job = _patch_spec(target, name, {"cancel": True}, "cancelled", whole=True)
        say(f"{job.name}: cancelled")
        hint(f"Next: delete it: elasticctl delete {job.name}")

    _for_each(chosen_names(target, jobs, label, UNENDED), end)


@verb(app, "delete")
def delete(*, jobs: options.Jobs = (), label: Labels = (), yes: options.Yes = False, where: Where) -> None:
    """Delete a job, its workers and its logs; its checkpoints stay."""
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ElasticJob

    target = reach(where)

    def remove(name: str) -> None:
        found = target.find(name, whole=True)
        job = ElasticJob.from_manifest(found)
        if not (yes or job.status.phase.terminal or _confirm_delete(job)):
            say(f"{job.name}: not deleted")
            return
        target.reread(found)  # whoever was asked may have taken long to answer
        target.cluster.delete_job(target.namespace, job.name)
        delete_stored_logs(job)
        if job.moving_to:
            from elasticctl.cli.submit import move_job

            move_job.clean_up(job)
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


def _check_here(target: Target, name: str) -> ElasticJob:
    """The job. Raises ConflictError if it continues elsewhere, or may do so: only there can it restore and commit."""
    from elasticctl.api.spec import ElasticJob

    found = ElasticJob.from_manifest(target.find(name))
    context = found.moved_to.partition(" ")[0]
    if context:
        there = f"`elasticctl resume {found.name} --context {context}`"
        raise ConflictError(f"{found.name} runs in context {context} now. FIX: {there}")
    if found.is_moving:
        from elasticctl.cli.submit import move_job

        raise ConflictError(move_job.describe_open(found))
    return found


def _end_move(target: Target, name: str) -> dict[str, Any] | None:
    """Abandon an unfinished move; returns the changes to the job's metadata."""
    from elasticctl.api.spec import ANNOTATION_MOVING_FROM, ANNOTATION_MOVING_TO, ElasticJob

    found = ElasticJob.from_manifest(target.find(name))
    if not found.is_moving or found.status.phase.terminal:
        _check_here(target, name)
        return None
    from elasticctl.cli.submit import move_job

    move_job.call_off(found)
    return {"annotations": {ANNOTATION_MOVING_TO: None, ANNOTATION_MOVING_FROM: None}}


def _patch_spec(
    target: Target,
    name: str,
    spec: dict[str, Any],
    done: str,
    metadata: dict[str, Any] | None = None,
    *,
    whole: bool = False,
) -> ElasticJob:
    """Change the spec and `metadata` of a job. Raises ConflictError once it has ended."""
    from elasticctl.api.spec import ElasticJob

    job = ElasticJob.from_manifest(target.find(name, whole=whole))
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}) and cannot be {done}")
    if job.cancel and "cancel" not in spec:
        raise ConflictError(f"{job.name} is being cancelled and cannot be {done}. FIX: `elasticctl rerun {job.name}`")
    patch = {"spec": spec} if metadata is None else {"metadata": metadata, "spec": spec}
    return ElasticJob.from_manifest(target.cluster.patch_job(target.namespace, job.name, patch))


def _confirm_delete(job: ElasticJob) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(f"{job.name} is still {job.status.phase.value}. FIX: add --yes to delete it anyway")
    return typer.confirm(f"{job.name} is still {job.status.phase.value}. Delete it?", err=True)


@verb(app, "wait")
def wait(
    *,
    jobs: options.Jobs = (),
    label: Labels = (),
    until: Annotated[Literal["done", "running"], typer.Option("--for", help="What to wait for.")] = "done",
    timeout: options.Timeout = None,
    where: Where,
) -> int:
    """Wait until jobs end.

    The exit code says how they ended: 0 succeeded, 1 failed, 3 not found or unreachable, 4 cancelled, 124 timed out.
    With several jobs, it is the first of 1, 3, 124 and 4 that applies to any of them.

    With --for running, it returns once enough workers run; the first step follows a few seconds later.

    \b
      elasticctl wait train --timeout 2h
      elasticctl wait --label sweep=lr
    """
    from elasticctl.cli.submit.follow import await_all

    target = reach(where)
    found = [target.find(name) for name in chosen_names(target, jobs, label)]
    return await_all(target, found, timeout_s=timeout, running=until == "running")


NOTICE_S = 120
"""What AWS gives."""


def parse_notice(text: str) -> int:
    """A duration -> whole seconds; `none` is no notice at all."""
    return 0 if text == "none" else options.duration(text)


@verb(app, "preempt")
def preempt(
    *,
    job: options.Job,
    worker: Annotated[str, options.worker("The worker, by name or number.")] = "",
    rank: Annotated[int | None, options.count("The worker that runs rank N.", low=0)] = None,
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
    repeated. Without notice, the worker is killed at once. Neither counts towards --backoff-limit.

    \b
      elasticctl preempt digits
      elasticctl preempt digits --rank 0 --notice none
    """
    from elasticctl.api.spec import ElasticJob

    if worker and rank is not None:
        raise UsageError("--worker and --rank cannot be used together. FIX: give one of them")
    target = reach(where)
    found = ElasticJob.from_manifest(target.find(job))
    pods = target.cluster.pods_of([found])[found.uid]
    name = choose_worker(found, pods, worker, rank)
    target.cluster.evict_pod(target.namespace, name, grace_s=float(notice_s))
    say(f"{name}: " + (f"notified; to be killed after {span(notice_s)}" if notice_s else "killed without notice"))
    hint(f"Next: see what it cost: elasticctl history {found.name}")


def choose_worker(job: ElasticJob, pods: list[Manifest], worker: str, rank: int | None) -> str:
    """The worker with this name, or of `rank`, or else the last one that runs. Pure.

    Raises ConflictError if no worker runs, NotFoundError for a worker or a rank that does not exist.
    """
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}) and has no workers to lose")
    running: list[str] = [pod["metadata"]["name"] for pod in pods if runs(pod)]
    if not running:
        raise ConflictError(f"no worker of {job.name} is running. FIX: see why with `elasticctl status {job.name}`")
    name = running[-1]
    if worker:
        name = full_worker_name(job.name, worker)
    elif rank is not None:
        name = worker_of_rank(job, rank)
    if name not in running:
        raise NotFoundError(f"{name} is not running. These workers of {job.name} are: {', '.join(running)}")
    return name
