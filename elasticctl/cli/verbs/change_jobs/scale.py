"""`scale`: change the number of workers of a running job, and wait until they run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from elasticctl.api.errors import UsageError
from elasticctl.api.text import plural, plural_are, span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import Verb, new_app, verb
from elasticctl.cli.framework.options import described, flag
from elasticctl.cli.framework.output import hint
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cli.verbs.start_jobs.job_options import GOAL_OPTIONS
from elasticctl.cluster.base import Manifest
from elasticctl.operations import scale as scaling
from elasticctl.operations.option_values import whole
from elasticctl.operations.scale import Awaited, ScaleChange, ScaleRequest
from elasticctl.operations.target import Target
from elasticctl.terminal import say

TIMED_OUT = 124
_SIZE_OPTIONS: Mapping[str, Any] = {
    **GOAL_OPTIONS,
    "to": described("N workers in total.", "N"),
    "gpus": described("N GPUs in total.", "N"),
    "add": described("K more workers.", "K"),
    "remove": described("K fewer workers: those with the highest numbers go.", "K"),
    "remove_worker": options.worker("Remove this worker, by name or number.", "--remove-worker"),
    "auto": flag("As many workers as fit, within the job's bounds.", "--auto"),
}

app = new_app()


@dataclass(frozen=True, slots=True)
class ScaleWait:
    """Whether and how long to wait for the workers, and what to do if they do not come."""

    wait: Annotated[bool, typer.Option("--wait", help="Return when that many workers run.")] = False
    timeout: options.Timeout = None
    rollback: Annotated[
        bool, typer.Option("--rollback", help="With --timeout: return to the previous size if the time is over.")
    ] = False


class ScaleVerb(Verb):
    """Lists sizes and goals apart."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Size": ("to", "gpus", "add", "remove", "remove_worker", "auto"),
        "Deadline and budget": ("finish_by", "budget", "prefer"),
    }


@verb(app, "scale", cls=ScaleVerb)
def scale(
    *,
    job: options.Job,
    bare: Annotated[int | None, typer.Argument(metavar="N", parser=whole(1), show_default=False)] = None,
    request: Annotated[ScaleRequest, _SIZE_OPTIONS],
    until: ScaleWait,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would change, or why it would be refused.")
    ] = False,
    where: Where,
) -> int:
    """Change the number of workers of a running job, which continues from its current step. N is short for --to N.

    With --finish-by, --budget or --prefer, change the job's goal; the number of workers is then chosen again.

    If the script reports no steps, its ranks start again; --dry-run says how much training that may cost.

    \b
      elasticctl scale digits 4
      elasticctl scale digits --remove-worker 2 --wait
      elasticctl scale digits --add 4 --timeout 10m --rollback
      elasticctl scale digits --auto
      elasticctl scale digits --finish-by 'Fri 18:00' --budget 200
    """
    if bare is not None:
        if request != ScaleRequest():
            raise UsageError(f"two sizes given, {bare} and an option. FIX: leave one of them out")
        request = ScaleRequest(to=bare)
    _check(request, until)
    target = reach(where)
    found = target.find(job)
    name = found["metadata"]["name"]
    change = scaling.preview(target, found, request) if dry_run else scaling.scale(target, found, request)
    say(f"{name}: {change.words}" + (" (dry run: nothing changes)" if dry_run else ""))
    redone_s = scaling.redone_s(found, change, time.time())
    if redone_s is not None:
        say(f"its script reports no steps: unless it keeps checkpoints of its own, {span(redone_s)} are redone from 0")
    if dry_run:
        return 0
    if until.wait or until.rollback:
        return _await_workers(target, found, change, until)
    hint(f"Next: watch it: elasticctl status -w {name}")
    return 0


def _await_workers(target: Target, found: Manifest, change: ScaleChange, until: ScaleWait) -> int:
    """Wait until the workers run, or roll back; returns the exit code: 1 if they never will, 124 after the time."""
    name, wanted = found["metadata"]["name"], change.after
    ended, job, running = scaling.await_workers(target, found, wanted, until.timeout)
    if ended is Awaited.RUNNING:
        say(f"{name}: {plural_are(wanted, 'worker')} running")
        return 0
    if ended is Awaited.ENDED:
        say(f"{name} ended ({job.status.phase.value}) before that")
        return 1
    if ended is Awaited.SUSPENDED:
        say(f"{name} is suspended: its workers start when it is resumed")
        return 1
    goes_on = "" if until.rollback else "; it keeps running"
    say(f"{name}: {running} of {plural(wanted, 'worker')} running after {until.timeout} s{goes_on}")
    if until.rollback:
        if scaling.roll_back(target, found, change):
            say(f"{name}: rolled back to {plural(change.before, 'worker')}")
        else:
            say(f"{name}: not rolled back, as it has ended or was scaled again")
    return TIMED_OUT


def _check(request: ScaleRequest, until: ScaleWait) -> None:
    """Raise UsageError for contradicting options."""
    if request.is_goal and request.sizes:
        raise UsageError("a goal determines the number of workers. FIX: give a number or a goal, not both")
    if request.sizes != 1 and not request.is_goal:
        raise UsageError(
            "no size given. FIX: add one of --to N, --gpus N, --add K, --remove K, --remove-worker NAME, --auto,"
            " or a goal with --finish-by TIME or --budget USD"
        )
    if until.rollback and until.timeout is None:
        raise UsageError("--rollback needs a time limit. FIX: add --timeout 10m, for example")
    if until.timeout is not None and not (until.wait or until.rollback):
        raise UsageError("--timeout has no effect without waiting. FIX: add --wait or --rollback")
    if (request.auto or request.is_goal) and (until.wait or until.rollback):
        what = "a goal" if request.is_goal else "--auto"
        raise UsageError(f"{what} sets no number of workers to wait for. FIX: leave out --wait and --rollback")
