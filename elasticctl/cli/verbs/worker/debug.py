"""`debug`: a worker like those of a job that failed, to look around in."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.errors import ClusterError, NotFoundError
from elasticctl.api.text import span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import say
from elasticctl.cli.framework.target import PATIENCE_S, Poller, Target, reach
from elasticctl.cli.verbs.worker.choose_worker import WhichWorker, choose_running
from elasticctl.cli.verbs.worker.exec import SHELL, on_a_terminal, run_inside

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.base import Manifest

app = new_app()

HOUR_S = 3600
LOOK_EVERY_S = 0.5


@verb(app, "debug")
def debug(
    *,
    job: options.Job,
    command: Annotated[tuple[str, ...], typer.Argument(metavar="-- COMMAND...")] = (),
    limit: Annotated[
        int,
        typer.Option(
            "--for",
            parser=options.duration,
            metavar="TIME",
            show_default=False,
            help="End the worker after this time at the latest; 1h by default.",
        ),
    ] = HOUR_S,
    where: Where,
) -> int:
    """Open a shell in a new worker like those of a job that failed.

    This creates a job with one worker that has the same image, code, environment, secrets, volumes and kind of
    machine. The worker runs nothing by itself and has no checkpoints to write to; the original job is not affected.
    It ends with the shell, or when its time is over. Until then, it costs what a worker of the job costs.

    \b
      elasticctl debug train
      elasticctl debug train --for 10m -- python -m pip list
    """
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.submit.derived_manifests import debug_manifest, next_name

    target = reach(where)
    old = target.find(job)
    taken = {other["metadata"]["name"] for other in target.cluster.list_jobs(target.namespace)}
    name = f"{old['metadata']['name'][:45].rstrip('-')}-debug"
    made = target.cluster.create_job(debug_manifest(old, next_name(name, taken) if name in taken else name, limit))
    try:
        _say_plan(ElasticJob.from_manifest(old), ElasticJob.from_manifest(made), limit)
        pod = _await_worker(target, made)
        code = run_inside(target, pod, command or SHELL, stdin=True, tty=on_a_terminal())
        status = ElasticJob.from_manifest(target.reread(made)).status
        if status.phase.terminal:
            say(f"{made['metadata']['name']} has ended: {status.message}")
        return code
    finally:
        with contextlib.suppress(NotFoundError):
            target.cluster.delete_job(target.namespace, made["metadata"]["name"])


def _say_plan(old: ElasticJob, new: ElasticJob, limit_s: float) -> None:
    from elasticctl.api.observed.cost import rate_of
    from elasticctl.api.podtemplate import hardware
    from elasticctl.cli.views.cost import plan_line, with_live_spot
    from elasticctl.diagnosis.not_training import describe_failure

    failure = old.status.newest_failure
    if failure is not None:
        say(f"{old.name}: {describe_failure(failure, old.name)}")
    say(f"{new.name}: a worker like those of {old.name}, for {span(limit_s)} at most; it ends with its shell")
    one = with_live_spot(rate_of(new))
    if one is not None:
        say(plan_line(one, 1))
    words = hardware(old).command
    say(f"the job's command: {shlex.join(words[words.index('--') + 1 :] if '--' in words else words)}")


def _await_worker(target: Target, made: Manifest) -> Manifest:
    """Wait until the worker has set up its folder, and print why it waits. Raises ClusterError if it ends before."""
    from elasticctl.api.observed.workers import runs
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ElasticJob

    said = ""
    for manifest in Poller(lambda: target.reread(made), LOOK_EVERY_S, patience_s=PATIENCE_S, say=say).each():
        job = ElasticJob.from_manifest(manifest)
        if job.status.phase.terminal:
            raise ClusterError(f"{job.name} has ended: {job.status.message}")
        running = [pod for pod in target.cluster.pods_of([job])[job.uid] if runs(pod)]
        if running and (job.status.generations or not hardware(job).launched):
            return choose_running(job, running, WhichWorker())
        if job.status.message != said:
            said = job.status.message
            say(f"{job.name}: {said}")
    raise AssertionError("unreachable")
